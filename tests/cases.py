"""The case table: tiny nets, toy data and two joint methods, as recipes that take a fraction of a second.

Add a row here rather than a fixture. Names that begin with `cases:` are reached as a user's own code is, by
`package.module:function`, so that nothing of this file is in the registries.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plateaux.config.builders.data import build_data
from plateaux.config.builders.model import build_member
from plateaux.config.components import Components
from plateaux.config.recipe import Recipe
from plateaux.config.schema import accepts
from plateaux.core import registry
from plateaux.core.method import LossFn, Method, Objective
from plateaux.core.types import Batch, TensorTree
from plateaux.data.sources import DataSplits, InMemorySource
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.optim.losses import cross_entropy
from plateaux.optim.sam import sam
from plateaux.storage.run import Run
from plateaux.storage.run_info import DataInfo, RunInfo, SplitInfo
from plateaux.training.loop import trainer
from plateaux.training.loop.state import StepOptions, StepStats, TrainState
from plateaux.training.loop.step import step
from plateaux.training.train import train

GIVEN = Components(trust=("cases",))
NO_DATA = RunInfo(DataInfo("none", 2, (1,), (), (), (), SplitInfo(0, ""), SplitInfo(0, "")))


@dataclass(frozen=True)
class Net:
    """A network of the table, and what the laws must know of it."""

    model: Mapping[str, Any]
    data: str
    unlabelled: str = "spirals@13"
    batchnorm: bool = False
    dropout: bool = False


NETS = {
    "mlp": Net({"name": "mlp", "hidden_sizes": [6]}, "blobs"),
    "wide": Net({"name": "mlp", "hidden_sizes": [256]}, "blobs"),
    "conv": Net({"name": "cnn", "channels": [3, 4]}, "cases:patches", "cases:static@13"),
    "conv_bn": Net({"name": "cnn", "channels": [3, 4], "norm": "batch"}, "cases:patches", "cases:static@13", True),
    "dropout": Net({"name": "cases:dropping", "width": 6}, "blobs", dropout=True),
    "adapted": Net({"name": "mlp", "hidden_sizes": [6, 6], "lora": {"rank": 2, "target_modules": ["1", "3"]}}, "blobs"),
}


@dataclass(frozen=True)
class Way:
    """A way to train: the recipe's method section, and what the laws must know of it."""

    method: Mapping[str, Any]
    sees: str = "none"
    sharded: bool = True  # a data axis computes the same thing
    unlabelled: bool = False  # it looks at samples without labels
    ordered: bool = False  # a row looks at those before it


# Values at which a method does something visible in six steps; a method without a row runs with its defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "sam": {"rho": 0.1},
    "asam": {"rho": 0.5},
    "gsam": {"rho": 0.1, "rho_min": 0.02, "alpha": 0.4},
    "sharpbalance": {"rho": 0.1},
    "divdis": {"diversity_weight": 100.0, "regularizer_weight": 1.0},
    "sed": {"diversity_weight": 0.5},
}


def way(name: str, *, ordered: bool = False, **options: Any) -> Way:
    """Return a row for a registered method: what it sees and wants, it says itself."""
    factory = registry.method.get(name)
    epochs = {"epochs": 2} if accepts(factory, "epochs") else {}
    objective = factory(cross_entropy(), **epochs, **options).objective
    return Way({"name": name, **options}, objective.gather, True, "unlabeled" in objective.extra_inputs, ordered)


METHODS = {name: way(name, **OPTIONS.get(name, {})) for name in registry.method.names()}
METHODS |= {
    "a2d, sequential": way("a2d", training="sequential", disagree_on="both", ordered=True),
    "a2d on labelled, climbing": way("a2d", disagree_on="labeled", update="sam", rho=0.1),
    "sed, climbing": way("sed", diversity_weight=0.5, update="sam", rho=0.1),
    "asam elementwise": Way({"name": "asam", "variant": "elementwise", "rho": 1.0}),
    "gsam elementwise": Way({"name": "gsam", "variant": "elementwise", "rho": 0.5}),
    "sam in groups": Way({"name": "sam", "rho": 0.1, "m": 3}, sharded=False),
    "sam per worker": Way({"name": "sam", "rho": 0.1, "perturbation": "per_worker"}, sharded=False),
    "sam, a radius each": Way({"name": "sam", "rho": [0.0, 0.1, 0.3]}),
    "sharpbalance by gsam": Way({"name": "sharpbalance", "rho": 0.1, "sam_variant": "gsam", "rule": "released"}),
    "apart": Way({"name": "cases:apart"}, sees="members"),
    "apart, climbing": Way({"name": "cases:apart", "rho": 0.1}, sees="members"),
    "balanced": Way({"name": "cases:balanced"}, sees="batch"),
    "balanced, climbing": Way({"name": "cases:balanced", "rho": 0.1}, sees="batch"),
}
OWN = [name for name, way in METHODS.items() if way.sees == "none"]
JOINT = [name for name, way in METHODS.items() if way.sees != "none"]


def apart(loss: LossFn, *, strength: float = 0.5, rho: float = 0.0) -> Method:
    """Cross entropy plus how alike a member's predictions are to every other's: a mean over samples."""

    def settle(table: Tensor, batch: Batch) -> Tensor:
        p = table.softmax(-1)  # [R, B, C]
        alike = torch.einsum("rbc,sbc->rsb", p, p)
        others = 1 - torch.eye(len(p), dtype=p.dtype)
        return loss(table, batch) + strength * (others[:, :, None] * alike).sum(1)

    return Method(Objective(settle, gather="members"), sam(rho))


def balanced(loss: LossFn, *, strength: float = 0.5, rho: float = 0.0) -> Method:
    """Cross entropy plus how alike members' mean predictions over the batch are: no mean over samples."""

    def settle(table: Tensor, batch: Batch) -> Tensor:
        mean = table.softmax(-1).mean(1)  # [R, C]
        alike = mean @ mean.T
        others = 1 - torch.eye(len(mean), dtype=mean.dtype)
        return loss(table, batch) + strength * (others * alike).sum(1)[:, None]

    return Method(Objective(settle, gather="batch", per_sample=False), sam(rho))


def patches(*, samples: int = 19, test_samples: int = 3, seed: int = 0) -> DataSplits:
    """Three classes of 6 x 6 noise, each with a bright corner of its own."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> InMemorySource:
        y = torch.arange(count) % 3
        x = torch.randn(count, 2, 6, 6, generator=generator)
        for sample, label in enumerate(y.tolist()):
            x[sample, :, 2 * label : 2 * label + 2, 2 * label : 2 * label + 2] += 1.5
        return InMemorySource(x, y)

    return DataSplits("patches", draw(samples), draw(test_samples), 3, (2, 6, 6))


def static(*, samples: int = 17, seed: int = 1) -> DataSplits:
    """6 x 6 noise of no class."""
    x = 2 * torch.randn(samples, 2, 6, 6, generator=torch.Generator().manual_seed(seed))
    some = InMemorySource(x, torch.zeros(samples, dtype=torch.int64))
    return DataSplits("static", some, some, 1, (2, 6, 6))


def dropping(*, shape: tuple[int, ...], classes: int, width: int = 6) -> nn.Module:
    """A perceptron with dropout."""
    return nn.Sequential(nn.Linear(shape[0], width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, classes))


def bent(*, shape: tuple[int, ...], classes: int) -> nn.Module:
    """A perceptron whose weights have the names and shapes of `mlp`'s, but are used otherwise."""
    layers = [nn.Linear(shape[0], 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, classes)]
    return nn.Sequential(nn.Flatten(), *layers)


def recipe(
    method: str = "deep_ensemble",
    net: str = "mlp",
    /,
    *,
    precision: str = "fp32",
    members: int = 3,
    samples: int = 19,  # batches of 7, 7 and 5: nothing divides evenly by two
    batch: int = 7,
    **sections: Any,
) -> Recipe:
    """Return a row of the table as a recipe; `sections` change what is in it."""
    of_net = NETS[net]
    besides = {"unlabeled": of_net.unlabelled, "unlabeled_batch_size": batch - 2} if METHODS[method].unlabelled else {}
    whole = Recipe.from_dict(
        {
            "members": members,
            "seed": 7,
            "data": {"name": of_net.data, "samples": samples, "test_samples": 3, "batch_size": batch, **besides},
            "model": dict(of_net.model),
            "method": dict(METHODS[method].method),
            "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
            "lr_scheduler": [{"name": "cosine", "interval": "step"}],
            "train": {"epochs": 2, "precision": precision},
            "executor": {"threads": 1},  # more of them make tiny tensors many times slower
            "run": {"checkpoint_every_epochs": 9},
        }
    )
    return whole.replaced(**sections)


def weights(run: Run) -> list[TensorTree]:
    """Return every member's weights and buffers."""
    return [run.weights(number) for number in range(run.recipe.members)]


def trained(row: Recipe, out: Path) -> list[TensorTree]:
    """Train a row in this process and return its members' weights."""
    return weights(train(row, out, **GIVEN.keywords()))


def distance(left: list[TensorTree], right: list[TensorTree]) -> float:
    """Return the largest difference of any weight of any member; zero only if every bit is the same."""
    assert len(left) == len(right)
    return max(_apart(a, b) for a, b in zip(left, right, strict=True))


def _apart(a: TensorTree, b: TensorTree) -> float:
    assert a.keys() == b.keys()
    same = all(torch.equal(a[name], b[name]) for name in a)
    widest = max(float((a[name].double() - b[name].double()).abs().max()) for name in a)
    return 0.0 if same else max(widest, 5e-324)


@dataclass(frozen=True)
class Corner:
    """One member's problem without a run: a network and a batch of its data."""

    module: nn.Module
    batch: Batch


def corner(net: str = "mlp", *, dtype: torch.dtype = torch.float64, size: int = 8, seed: int = 0) -> Corner:
    """Return a network of the table with a batch of its data."""
    row = recipe("deep_ensemble", net, samples=size, batch=size, precision="fp64" if dtype == torch.float64 else "fp32")
    data = build_data(row, GIVEN)
    x, y = data.train.fetch(torch.arange(size))
    assert isinstance(x, Tensor)
    return Corner(build_member(row, data, seed, GIVEN).train(), Batch(x.to(dtype), y, torch.arange(size), seed=seed))


def make_state(module: nn.Module, method: Method, *, number: int = 0, lr: float = 0.1, **options: Any) -> TrainState:
    """Return a training state with SGD; `options` are those of SGD, `max_grad_norm`, `masks`, and `scaler`."""
    params = dict(module.named_parameters())
    own = {name: options.pop(name) for name in ("max_grad_norm", "masks", "scaler") if name in options}
    optimizer = torch.optim.SGD(params.values(), lr=lr, **options)
    return TrainState(
        number, module, method, optimizer, params, dict(module.named_buffers()), lr, architecture="one", **own
    )


def steps(member: TrainState, batches: Sequence[Batch], **way: Any) -> list[StepStats]:
    """Train a member on batches in one process, and return the statistics of every step."""
    return [step(SINGLE_PROCESS, [member], [batch], StepOptions(**way))[0] for batch in batches]


def stop_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process SIGTERM after a number of steps."""
    real, left = trainer.step, [steps]

    def counted(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **options)

    monkeypatch.setattr(trainer, "step", counted)


BLOBS = """
members = 2
lr_scheduler = []
[data]
name = "blobs"
samples = 48
test_samples = 12
batch_size = 16
[model]
name = "mlp"
hidden_sizes = [6]
[optimizer]
name = "SGD"
lr = 0.1
[train]
epochs = 4
[executor]
threads = 1
[run]
log_every = 1
"""


OBJECTS = Recipe.parse("""
members = 2
lr_scheduler = []
[data]
name = "given"
batch_size = 16
[model]
name = "given"
[optimizer]
name = "SGD"
[train]
epochs = 1
[executor]
threads = 1
""")
"""A recipe whose data and model are passed as objects."""


def blobs(*changes: str) -> Recipe:
    """Return a recipe that trains two tiny perceptrons within a second, with `a.b=c` changes."""
    return Recipe.parse(BLOBS, changes)


def weight_files(run: Run) -> list[bytes]:
    """Return the content of the weights files of all members."""
    return [weights_path(str(run), n).read_bytes() for n in range(run.recipe.members)]


def rewrite(run: Run) -> None:
    """Write the recipe and the description of a run with their digests, as anyone can who changes a run folder."""
    digest = run.store.put("recipe.toml", run.recipe.to_toml().encode())
    members = run.store.get_json("run.json")["members"]
    run.store.put_json("run.json", {**run.info.to_dict(), "recipe_digest": digest, "members": members})


def weights_path(run: str | Path, number: int) -> Path:
    """Return the file with the weights of a member of a run in a folder."""
    return Path(run) / json.loads((Path(run) / f"members/{number}/progress.json").read_text())["weights"]
