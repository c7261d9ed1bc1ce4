"""The setting in which probes run: the sample of data, the mode of the network, and the metadata of each result."""

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
"""Called at the start of every forward pass."""


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """How members are evaluated by probes and plots; recorded with every result.

    `batchnorm`: running statistics (`eval`), or the statistics of each batch (`train`). `augment`: apply the recipe's
    training augmentation to the samples. `normalize_logits`: center the logits of every sample and scale them to norm
    one before the loss.
    """

    batchnorm: Literal["eval", "train"] = "eval"
    augment: bool = False
    normalize_logits: bool = False

    def metadata(self, module: nn.Module) -> dict[str, Any]:
        """Return the options to record for a network; without BatchNorm layers, its mode is `none`."""
        mode = self.batchnorm if batchnorm_layers(module) else "none"
        return {"batchnorm": mode, "normalize_logits": self.normalize_logits}


DEFAULT_OPTIONS = ProbeOptions()


@dataclass(frozen=True, slots=True)
class ProbeBatch:
    """A sample of data in batches on the device of the networks. A smaller sample is a prefix of a larger one."""

    ids: Tensor
    batches: tuple[Batch, ...]

    def first(self, count: int) -> ProbeBatch:
        """Return the first `count` samples, or all if there are fewer."""
        batches: list[Batch] = []
        remaining = count
        for batch in self.batches:
            if remaining > 0:
                batches.append(batch if len(batch) <= remaining else batch.take(slice(0, remaining)))
            remaining -= len(batch)
        return ProbeBatch(self.ids[:count], tuple(batches))

    def metadata(self) -> dict[str, Any]:
        """Return the number of samples and a hash of their ids."""
        content = self.ids.cpu().to(torch.int64).numpy().tobytes()
        return {"samples": len(self.ids), "ids": blake2b(content, digest_size=8).hexdigest()}


def sample_ids(ids: Tensor, seed: int, count: int) -> Tensor:
    """Return `count` ids drawn without replacement. They depend on the run's seed alone; fewer are a prefix of more."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "landscape"))
    return ids[torch.randperm(len(ids), generator=generator)[:count]]


def make_loss_surface(
    module: nn.Module,
    sample: ProbeBatch,
    options: ProbeOptions,
    *,
    seed: int,
    member_id: int,
    on_forward: ForwardCallback = lambda: None,
) -> LossSurface:
    """Return the loss surface of one member of a run. The weights keep their own precision, without autocast."""
    member_seed = derive_seed(seed, "landscape", member_id)

    def forward() -> AbstractContextManager[Any]:
        on_forward()
        # Random numbers that a network draws in training mode must not come from the global generator.
        return fork_rng(member_seed, sample.batches[0].index.device) if module.training else nullcontext()

    member = MemberModule(module, forward=forward)
    return LossSurface(member, sample.batches, seed=member_seed, normalize_logits=options.normalize_logits)


@contextmanager
def probe_mode(module: nn.Module, batchnorm: Literal["eval", "train"]) -> Iterator[None]:
    """Set a network to evaluation mode, and its BatchNorm layers to the given mode; restore the mode of every layer."""
    with eval_mode([module]):
        layers = batchnorm_layers(module) if batchnorm == "train" else []
        for layer in layers:
            layer.train()  # frozen BatchNorm layers override train() and stay in evaluation mode
        module.training = bool(layers)  # tells LossSurface to restore the buffers
        yield
