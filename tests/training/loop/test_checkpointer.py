"""The training state of a member is loaded as it was saved, or refused."""

from __future__ import annotations

import pytest
import torch
from cases import GIVEN, recipe

from plateaux.config.experiment import Experiment
from plateaux.core.errors import RunError
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.training.loop.checkpointer import load_state_dict, state_dict
from plateaux.training.loop.setup import build_train_states
from plateaux.training.loop.state import CPU


def test_a_checkpoint_that_was_pruned_by_another_rule_is_refused() -> None:
    row = recipe("deep_ensemble", model={"hidden_sizes": [6, 6], "sparsity": 0.5})
    own = Experiment(row, GIVEN)
    (state,) = build_train_states(own, own.data, [1], SINGLE_PROCESS, device=CPU, steps=2)
    stored = state_dict(state)
    load_state_dict(state, stored)
    other = {**stored, "params": {name: torch.ones_like(param) for name, param in stored["params"].items()}}
    with pytest.raises(RunError, match=r"member 1 was pruned by another rule: 3\.weight has live weights"):
        load_state_dict(state, other)
