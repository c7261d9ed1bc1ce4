"""The loss of one member on a sample of data, as a function of the member's weights, and the setting of probes.

    surface = LossSurface(MemberModule(module), batches, seed=7)
    loss, gradient = surface.gradient(batch, at=tensor_tree.add(surface.origin, direction, times=0.1))

A probe measures a property of ONE member's loss surface, with any number of passes over the samples. Weights are
changed in place and restored, so any module works as it does in training; `loss_fn` is for `torch.func`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plateaux.core import tensor_tree
from plateaux.core.member import LayerRecord, MemberModule, at_params, preserve_buffers
from plateaux.core.method import LossFn
from plateaux.core.runtime import fork_rng
from plateaux.core.types import Batch, TensorTree, derive_seed
from plateaux.models.modes import eval_mode
from plateaux.models.surgery import batchnorm_layers
from plateaux.optim.losses import call_loss

ForwardCallback = Callable[[], None]
"""Called at the start of every forward pass."""


class LossSurface:
    """The loss of one member on some samples.

    `batches` hold the samples on the member's device, in batches that fit in memory. The loss is the cross entropy of
    every sample, or `loss`; with `normalize_logits`, the logits of each sample are first centered and scaled to norm
    one. Only parameters that require a gradient change; buffers never do.
    """

    def __init__(
        self,
        member: MemberModule,
        batches: Sequence[Batch],
        *,
        seed: int = 0,
        normalize_logits: bool = False,
        loss: LossFn | None = None,
    ) -> None:
        assert isinstance(member.module, nn.Module)
        self.member, self.batches, self.seed, self.normalize_logits = member, tuple(batches), seed, normalize_logits
        self.loss = loss
        self.module: nn.Module = member.module
        self.params: TensorTree = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.origin: TensorTree = tensor_tree.clone(self.params)  # the trained weights

    @property
    def samples(self) -> int:
        """The number of samples."""
        return sum(len(batch) for batch in self.batches)

    @property
    def num_params(self) -> int:
        """The number of trained weights."""
        return sum(tensor.numel() for tensor in self.origin.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self.origin.values())).device

    def generator(self, *labels: int | str) -> torch.Generator:
        """Return a random generator whose seed depends only on the seed of the surface and on the labels."""
        return torch.Generator(self.device).manual_seed(derive_seed(self.seed, *labels))

    def at_params(self, at: TensorTree | None) -> AbstractContextManager[None]:
        """Set the member to other weights, and restore the trained weights on exit; with None, do nothing."""
        return at_params(self.params, at, origin=self.origin)

    def losses(self, batch: Batch, at: TensorTree | None = None) -> Tensor:
        """Return the loss of every sample `[B]` in float64, without a graph."""
        with torch.no_grad(), self.at_params(at), self.preserve_buffers():
            return self.losses_from_logits(self.member(batch.x).double(), batch)

    def all_losses(self, at: TensorTree | None = None) -> Tensor:
        """Return the loss of every sample of all batches `[N]` in float64."""
        return torch.cat([self.losses(batch, at) for batch in self.batches])

    def gradient(self, batch: Batch, at: TensorTree | None = None) -> tuple[Tensor, TensorTree]:
        """Return the mean loss of a batch in float64, and its gradient with respect to the trained weights."""
        with self.at_params(at), self.preserve_buffers(), torch.enable_grad():
            loss = self.losses_from_logits(self.member(batch.x).double(), batch).mean()
            gradients = torch.autograd.grad(loss, list(self.params.values()), allow_unused=True)
        pairs = zip(self.params.items(), gradients, strict=True)
        return loss.detach(), {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}

    def record(self, batch: Batch, layers: Sequence[str] = ()) -> tuple[Tensor, Mapping[str, LayerRecord]]:
        """Return the logits of a batch, and the inputs and outputs of each named layer, without a graph."""
        with torch.no_grad(), self.preserve_buffers():
            return self.member.record(batch.x, layers)

    def logits_fn(self, batch: Batch) -> Callable[[TensorTree], Tensor]:
        """Return the logits of every sample `[B, C]` as a function of the trained weights, for `torch.func`."""
        buffers = {name: b for name, b in self.module.named_buffers()}

        def logits(params: TensorTree) -> Tensor:
            # BatchNorm in training mode writes to its buffers, so it gets copies.
            copies = {name: b.clone() for name, b in buffers.items()} if self.module.training else {}
            return self.member(batch.x, {**copies, **params})

        return logits

    def loss_fn(self, batch: Batch) -> Callable[[TensorTree], Tensor]:
        """Return the loss of every sample `[B]` as a function of the trained weights, for `torch.func`."""
        logits = self.logits_fn(batch)
        return lambda params: self.losses_from_logits(logits(params), batch)

    def losses_from_logits(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the loss of every sample `[B]`."""
        if self.loss is not None:
            return call_loss(self.loss, self.prepare_logits(logits), batch)
        y = batch.y.to(logits.dtype) if batch.y.is_floating_point() else batch.y
        return F.cross_entropy(self.prepare_logits(logits), y, reduction="none")

    def prepare_logits(self, logits: Tensor) -> Tensor:
        """Return the logits that enter the cross entropy: normalized if `normalize_logits` is set."""
        if not self.normalize_logits:
            return logits
        logits = logits - logits.mean(-1, keepdim=True)
        norm: Tensor = torch.linalg.vector_norm(logits, dim=-1, keepdim=True)
        return logits / norm.clamp(min=1e-10)

    @contextmanager
    def preserve_buffers(self) -> Iterator[None]:
        """Restore the buffers that BatchNorm in training mode writes to."""
        buffers = dict(self.module.named_buffers()) if self.module.training else {}
        if not buffers:
            yield
            return
        with preserve_buffers(buffers):
            yield


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
    loss: LossFn | None = None,
    on_forward: ForwardCallback = lambda: None,
) -> LossSurface:
    """Return the loss surface of one member of a run. The weights keep their own precision, without autocast."""
    member_seed = derive_seed(seed, "landscape", member_id)

    def forward() -> AbstractContextManager[Any]:
        on_forward()
        # Random numbers that a network draws in training mode must not come from the global generator.
        return fork_rng(member_seed, sample.batches[0].index.device) if module.training else nullcontext()

    member = MemberModule(module, forward=forward)
    return LossSurface(member, sample.batches, seed=member_seed, normalize_logits=options.normalize_logits, loss=loss)


@contextmanager
def probe_mode(module: nn.Module, batchnorm: Literal["eval", "train"]) -> Iterator[None]:
    """Set a network to evaluation mode, and its BatchNorm layers to the given mode; restore the mode of every layer."""
    with eval_mode([module]):
        layers = batchnorm_layers(module) if batchnorm == "train" else []
        for layer in layers:
            layer.train()  # frozen BatchNorm layers override train() and stay in evaluation mode
        module.training = bool(layers)  # tells LossSurface to restore the buffers
        yield
