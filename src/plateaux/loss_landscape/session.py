"""A member asked about its landscape: on which samples, in what mode, and what is recorded beside every answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plateaux.core.member import MemberModule
from plateaux.core.runtime import fork_rng
from plateaux.core.types import Batch, derive_seed
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.models.modes import eval_mode
from plateaux.models.surgery import batchnorm_layers

ForwardCallback = Callable[[], None]
"""Hears of every forward pass."""


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """Under what members are asked; recorded with every number."""

    batchnorm: Literal["eval", "train"] = "eval"
    augment: bool = False
    normalize_logits: bool = False

    def of(self, module: nn.Module) -> dict[str, Any]:
        """Return what is recorded of them about a network: one without BatchNorm has none of its modes."""
        mode = self.batchnorm if batchnorm_layers(module) else "none"
        return {"batchnorm": mode, "unit_logits": self.normalize_logits}


DEFAULT_SETTINGS = ProbeSettings()


@dataclass(frozen=True, slots=True)
class ProbeBatch:
    """Samples that landscapes are looked at on, as networks take them: the first so many of a seeded order."""

    ids: Tensor
    batches: tuple[Batch, ...]

    def first(self, count: int) -> ProbeBatch:
        """Return the first so many of them, or all there are."""
        found: list[Batch] = []
        left = count
        for batch in self.batches:
            if left > 0:
                found.append(batch if len(batch) <= left else batch.take(slice(0, left)))
            left -= len(batch)
        return ProbeBatch(self.ids[:count], tuple(found))

    def metadata(self) -> dict[str, Any]:
        """Return how many they are, and a hash of which."""
        content = self.ids.cpu().to(torch.int64).numpy().tobytes()
        return {"samples": len(self.ids), "ids": blake2b(content, digest_size=8).hexdigest()}


def sample_ids(ids: Tensor, seed: int, count: int) -> Tensor:
    """Return so many of the ids, drawn without replacement by the run's seed alone; fewer are the first of more."""
    chance = torch.Generator().manual_seed(derive_seed(seed, "landscape"))
    return ids[torch.randperm(len(ids), generator=chance)[:count]]


def make_loss_surface(
    module: nn.Module,
    sample: ProbeBatch,
    settings: ProbeSettings,
    *,
    seed: int,
    number: int,
    on_forward: ForwardCallback = lambda: None,
) -> LossSurface:
    """Return the ground of one member of a run; its weights are used in their own precision."""
    own = derive_seed(seed, "landscape", number)

    def forward() -> AbstractContextManager[Any]:
        on_forward()
        # What a network draws in training mode must not come from the global generator.
        return fork_rng(own, sample.batches[0].index.device) if module.training else nullcontext()

    view = MemberModule(module, forward=forward)
    return LossSurface(view, sample.batches, seed=own, normalize_logits=settings.normalize_logits)


@contextmanager
def probe_mode(module: nn.Module, batchnorm: Literal["eval", "train"]) -> Iterator[None]:
    """Hold a network in evaluation mode, its BatchNorm maybe in training mode, and put every layer back."""
    with eval_mode([module]):
        layers = batchnorm_layers(module) if batchnorm == "train" else []
        for layer in layers:
            layer.train()  # a frozen one knows better
        module.training = bool(layers)  # so that a ground puts the buffers back
        yield
