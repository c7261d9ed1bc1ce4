"""The training state of a member is loaded as it was saved, or refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from cases import GIVEN, recipe
from torch import Tensor, nn

from plateaux.config.builders.data import build_data
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RunError
from plateaux.data.sources import from_tensors
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.training.checkpoint import load_state_dict, state_dict
from plateaux.training.setup import build_train_states
from plateaux.training.state import CPU
from plateaux.training.train import train


class Assigning(nn.Linear):
    """Assigns a new tensor to its buffer in the forward pass."""

    def __init__(self, shape: tuple[int, ...], classes: int, *, persistent: bool) -> None:
        super().__init__(shape[0], classes)
        self.register_buffer("calls", torch.zeros(()), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x)


def test_a_buffer_that_the_model_replaces_is_an_error_before_it_is_lost(tmp_path: Path) -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    data = from_tensors((x, x[:, 0] > 0), (x, x[:, 0] > 0), classes=2)
    tree = {
        "members": 1,
        "data": {"name": "x"},
        "model": {"name": "own"},
        "train": {"epochs": 1},
        "executor": {"threads": 1},
    }
    with pytest.raises(RunError, match=r"buffer 'calls' .* write self\.calls\.copy_\(value\) in the model"):
        train(Recipe.from_dict(tree), tmp_path / "run", data=data, model=partial(Assigning, persistent=True))
    run = train(Recipe.from_dict(tree), tmp_path / "other", data=data, model=partial(Assigning, persistent=False))
    assert run.progress(0).finished


def test_a_checkpoint_that_was_pruned_by_another_rule_is_refused() -> None:
    row = recipe("deep_ensemble", model={"hidden_sizes": [6, 6], "sparsity": 0.5})
    options = {"device": CPU, "steps": 2, "components": GIVEN}
    (state,) = build_train_states(row, build_data(row, GIVEN), [1], SINGLE_PROCESS, **options)  # type: ignore[arg-type]
    stored = state_dict(state)
    load_state_dict(state, stored)
    other = {**stored, "params": {name: torch.ones_like(param) for name, param in stored["params"].items()}}
    with pytest.raises(RunError, match=r"member 1 was pruned by another rule: 3\.weight has live weights"):
        load_state_dict(state, other)
