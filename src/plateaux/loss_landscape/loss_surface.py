"""What a probe stands on: one member, some samples, and the loss as a function of the member's weights.

    ground = Ground(View(module), batches, key=7)
    loss, gradient = ground.gradient(batch, at=trees.add(ground.home, direction, times=0.1))

A Probe asks one question about ONE member's landscape and takes as many passes over the samples as it likes. Weights
are moved in place and put back, so that any module works as it does in training; `function` is for torch.func.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plateaux.core import tensor_tree
from plateaux.core.member import LayerRecord, MemberModule
from plateaux.core.types import Batch, TensorTree, derive_seed


class LossSurface:
    """One member and the samples its landscape is asked about.

    `batches` hold the samples as the member sees them, in pieces that fit memory. The loss is the cross entropy of
    every sample; with `normalize_logits` each sample's logits are centered and scaled to length one before it. Only
    weights that are trained move; buffers never do.
    """

    def __init__(
        self, member: MemberModule, batches: Sequence[Batch], *, seed: int = 0, normalize_logits: bool = False
    ) -> None:
        assert isinstance(member.module, nn.Module)
        self.member, self.batches, self.seed, self.normalize_logits = member, tuple(batches), seed, normalize_logits
        self.module: nn.Module = member.module
        self.params: TensorTree = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.origin: TensorTree = tensor_tree.clone(self.params)  # where the member stands

    @property
    def samples(self) -> int:
        return sum(len(batch) for batch in self.batches)

    @property
    def num_params(self) -> int:
        """How many numbers are trained."""
        return sum(tensor.numel() for tensor in self.origin.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self.origin.values())).device

    def generator(self, *words: int | str) -> torch.Generator:
        """Return randomness of one's own, which depends on the ground's key and on the words alone."""
        return torch.Generator(self.device).manual_seed(derive_seed(self.seed, *words))

    @contextmanager
    def at_params(self, at: TensorTree | None) -> Iterator[None]:
        """Put the member somewhere else for a while."""
        if at is None:
            yield
            return
        tensor_tree.write(self.params, at)
        try:
            yield
        finally:
            tensor_tree.write(self.params, self.origin)

    def losses(self, batch: Batch, at: TensorTree | None = None) -> Tensor:
        """Return every sample's loss `[B]` in float64, without a graph."""
        with torch.no_grad(), self.at_params(at), self._preserve_buffers():
            return self.losses_from_logits(self.member(batch.x).double(), batch)

    def all_losses(self, at: TensorTree | None = None) -> Tensor:
        """Return the loss of every sample of the ground `[N]` in float64."""
        return torch.cat([self.losses(batch, at) for batch in self.batches])

    def gradient(self, batch: Batch, at: TensorTree | None = None) -> tuple[Tensor, TensorTree]:
        """Return the mean loss of a batch in float64, and its gradient over the trained weights."""
        with self.at_params(at), self._preserve_buffers(), torch.enable_grad():
            loss = self.losses_from_logits(self.member(batch.x).double(), batch).mean()
            found = torch.autograd.grad(loss, list(self.params.values()), allow_unused=True)
        pairs = zip(self.params.items(), found, strict=True)
        return loss.detach(), {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}

    def record(self, batch: Batch, layers: Sequence[str] = ()) -> tuple[Tensor, Mapping[str, LayerRecord]]:
        """Return the logits of a batch and what each named layer saw of it, without a graph."""
        with torch.no_grad(), self._preserve_buffers():
            return self.member.record(batch.x, layers)

    def logits_fn(self, batch: Batch) -> Callable[[TensorTree], Tensor]:
        """Return every sample's logits `[B, C]` as a function of the trained weights, for torch.func."""
        buffers = {name: b for name, b in self.module.named_buffers()}

        def logits(at: TensorTree) -> Tensor:
            # A BatchNorm in training mode writes its buffers: it gets copies.
            given = {**{name: b.clone() for name, b in buffers.items()}, **at} if self.module.training else at
            return self.member(batch.x, given)

        return logits

    def loss_fn(self, batch: Batch) -> Callable[[TensorTree], Tensor]:
        """Return every sample's loss `[B]` as a function of the trained weights, for torch.func."""
        logits = self.logits_fn(batch)
        return lambda at: self.losses_from_logits(logits(at), batch)

    def losses_from_logits(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return every sample's loss `[B]`."""
        y = batch.y.to(logits.dtype) if batch.y.is_floating_point() else batch.y
        return F.cross_entropy(self.prepare_logits(logits), y, reduction="none")

    def prepare_logits(self, logits: Tensor) -> Tensor:
        """Return logits as the cross entropy sees them."""
        if not self.normalize_logits:
            return logits
        logits = logits - logits.mean(-1, keepdim=True)
        length: Tensor = torch.linalg.vector_norm(logits, dim=-1, keepdim=True)
        return logits / length.clamp(min=1e-10)

    @contextmanager
    def _preserve_buffers(self) -> Iterator[None]:
        """Put back what a BatchNorm in training mode writes."""
        if not self.module.training or next(self.module.buffers(), None) is None:
            yield
            return
        before = {name: b.clone() for name, b in self.module.named_buffers()}
        try:
            yield
        finally:
            tensor_tree.write(dict(self.module.named_buffers()), before)
