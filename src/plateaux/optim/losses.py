"""Losses of all members, their gradients with respect to the logits, and the terms that joint methods add to them.

A loss takes the outputs `[R, B, ...]` of all members and their batch, and returns losses `[R, B]`. Joint methods add a
similarity between members: `disagreement` (A2D), `mutual_information` (DivDis), and `l1_distance` for all pairs;
`mean_over_others` and `mean_over_previous` are the weights of their means; `sample_hardness` weights samples (SED); the
regularizers of DivDis keep predictions from collapsing to one class. All take probabilities `[R, B, C]`, are finite
where a probability is exactly 0 or 1, and never allocate a tensor of samples x classes x classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from plateaux.core.errors import PlateauxError, RecipeError, first_line, suggest
from plateaux.core.method import LossFn
from plateaux.core.ranges import Fraction, NonNegative
from plateaux.core.types import Batch


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Cross entropy of every member and sample; labels are class numbers `[B]` or probabilities `[B, C]`.

    Class weights are normalized to mean one over the classes, so that the loss of a batch is a mean over samples.
    Training replaces "balanced" by the inverse frequencies of the classes in the training samples.
    """

    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | Literal["balanced"] = ()

    @property
    def is_unweighted(self) -> bool:
        """Whether neither labels nor classes are reweighted: the gradient then has a closed form, softmax - one-hot."""
        return not self.label_smoothing and not self.class_weights

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        weight = None
        if self.class_weights:
            assert self.class_weights != "balanced"
            weight = torch.tensor(self.class_weights, dtype=logits.dtype, device=logits.device)
            weight = weight * (len(self.class_weights) / weight.sum())
        losses = torch.stack(
            [
                F.cross_entropy(logits[row], batch.y, weight, reduction="none", label_smoothing=self.label_smoothing)
                for row in range(len(logits))
            ]
        )  # [R, B], or [R, B, T] for text with a loss per token
        return losses.flatten(2).mean(-1) if losses.ndim > 2 else losses


def cross_entropy(
    *, label_smoothing: Fraction = 0.0, class_weights: tuple[NonNegative, ...] | Literal["balanced"] = ()
) -> CrossEntropy:
    """Return the cross entropy loss; see `CrossEntropy`."""
    return CrossEntropy(label_smoothing, class_weights)


LOSSES: dict[str, Callable[..., LossFn]] = {"cross_entropy": cross_entropy}
UNSUPPORTED = {
    "mse": "regression", "l1": "regression", "huber": "regression", "gaussian_nll": "regression",
    "bce": "multi-label classification", "binary_cross_entropy": "multi-label classification",
}  # fmt: skip


def get_loss(name: str) -> Callable[..., LossFn]:
    """Return the factory of the loss called `name`."""
    if name in UNSUPPORTED:
        raise RecipeError(
            f"loss {name!r} is for {UNSUPPORTED[name]}, which is not supported yet; available: {', '.join(LOSSES)}"
        )
    if name not in LOSSES:
        raise RecipeError(f"There is no loss called {name!r}; {suggest(name, [*LOSSES, *UNSUPPORTED])}")
    return LOSSES[name]


def normalized_logit_gradient(logits: Tensor, batch: Batch, loss: LossFn | None) -> tuple[Tensor, Tensor]:
    """Return the gradient of each sample with respect to its logits, scaled to norm one, and its squared norm.

    Without the scaling, the gradients of well-fitted samples would underflow in float32.
    """
    gradient = logit_gradient(logits, batch, loss)
    scale = gradient.flatten(1).square().sum(1)
    norm = scale.sqrt().clamp(min=torch.finfo(torch.float64).tiny).view(-1, *[1] * (gradient.ndim - 1))
    return gradient / norm, scale


def logit_gradient(logits: Tensor, batch: Batch, loss: LossFn | None) -> Tensor:
    """Return the gradient of the loss of each sample with respect to its logits, in float64."""
    if loss is None and logits.ndim == 2 and batch.y.ndim == 1 and not batch.y.is_floating_point():
        is_labeled = batch.y >= 0  # cross_entropy ignores labels of -100
        label = batch.y.clamp(min=0)[:, None]
        wide = logits.double()
        gradient = wide.softmax(1)
        # p_y - 1 = -sigmoid(logsumexp of the others - z_y), which does not cancel where p_y is nearly one.
        return gradient.scatter(1, label, -torch.sigmoid(_negative_margin(wide, label))) * is_labeled[:, None]
    with torch.enable_grad():
        wide = logits.detach().double().requires_grad_()
        total = call_loss(loss or _cross_entropy, wide, batch).sum()
        return torch.autograd.grad(total, wide)[0]


def sample_losses(logits: Tensor, batch: Batch, loss: LossFn | None) -> Tensor:
    """Return the loss of every sample in float64."""
    return call_loss(loss or _cross_entropy, logits.double(), batch).double()


def _negative_margin(logits: Tensor, label: Tensor) -> Tensor:
    others = logits.scatter(1, label, -torch.inf)
    return others.logsumexp(1, keepdim=True) - logits.gather(1, label)


def _cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    y = batch.y.to(logits.dtype) if batch.y.is_floating_point() else batch.y
    losses = F.cross_entropy(logits[0], y, reduction="none")
    return losses.reshape(1, len(losses), -1).mean(-1)


def call_loss(loss: LossFn, logits: Tensor, batch: Batch) -> Tensor:
    """Return the losses `[B]` of one member; probes and scores compute them in float64."""
    try:
        return loss(logits[None], batch)[0]
    except PlateauxError:
        raise
    except RuntimeError as error:
        raise RecipeError(
            f"The loss cannot be computed from outputs of {logits.dtype}: {first_line(error)}. Convert its tensors to "
            "the dtype of the outputs, as in weight.to(outputs.dtype)"
        ) from error


A2D_EPSILON = 1e-7  # added inside the logarithm of A2D: two certain members that agree cost at most -log(epsilon)
MIN_PROB = 1e-12  # lower bound of probabilities inside a logarithm
MAX_JOINT_ENTRIES = 1 << 20  # entries of joint distributions in memory at a time


def disagreement(p: Tensor, *, frozen: bool = False) -> Tensor:
    """A2D of every pair of members and sample, `[R, R, B]`: entry (r, s) uses the class y that member s predicts.

    -log(p_s(y) (1 - p_r(y)) + p_r(y) (1 - p_s(y)) + epsilon), smallest where exactly one of the two predicts y with
    certainty. With `frozen`, member s gets no gradient.
    """
    top_prob, pred = (p.detach() if frozen else p).max(-1)  # [S, B]
    index = pred.T[:, None, :].expand(-1, len(p), -1)  # [B, R, S]
    prob = p.transpose(0, 1).gather(2, index).permute(1, 2, 0)  # [R, S, B]
    return -(top_prob * (1 - prob) + prob * (1 - top_prob) + A2D_EPSILON).log()


def mean_over_others(rows: int, like: Tensor) -> Tensor:
    """Return the weights `[R, R]` of a mean over all other members."""
    return (1 - torch.eye(rows, dtype=like.dtype, device=like.device)) / max(rows - 1, 1)


def mean_over_previous(rows: int, like: Tensor) -> Tensor:
    """Return the weights `[R, R]` of a mean over all previous members; the first member has none."""
    earlier = torch.ones(rows, rows, dtype=like.dtype, device=like.device).tril(-1)
    return earlier / earlier.sum(1, keepdim=True).clamp_min(1)


def mutual_information(p: Tensor) -> Tensor:
    """Mutual information in nats between the predictions of two members over the samples, `[R, R]`; zero diagonal.

    sum_cd P log(P / (m_r m_s)) with P = mean_b p_r(b, c) p_s(b, d) and its marginals m. Samples are contracted first,
    for a few pairs at a time, and activation checkpointing recomputes the joint distributions in the backward pass.
    """
    rows, columns = torch.triu_indices(len(p), len(p), 1, device=p.device)
    pairs = max(1, MAX_JOINT_ENTRIES // p.shape[-1] ** 2)
    values = [
        checkpoint(_mutual_information, p[a], p[b], use_reentrant=False, preserve_rng_state=False)
        for a, b in zip(rows.split(pairs), columns.split(pairs), strict=True)
    ]
    upper = p.new_zeros(len(p), len(p)).index_put((rows, columns), torch.cat(values))
    return upper + upper.T


def _mutual_information(a: Tensor, b: Tensor) -> Tensor:
    joint = a.transpose(1, 2) @ b / a.shape[1]  # [K, C, C]
    return _plogp(joint).sum((1, 2)) - _plogp(a.mean(1)).sum(1) - _plogp(b.mean(1)).sum(1)


def _plogp(p: Tensor) -> Tensor:
    """p log p, with a finite value and gradient at zero."""
    return torch.xlogy(p, p.clamp_min(torch.finfo(p.dtype).tiny))


def l1_distance(p: Tensor) -> Tensor:
    """Minus the L1 distance between the probabilities of two members, mean over the samples, `[R, R]`."""
    return torch.stack([-(row - p).abs().sum(-1).mean(-1) for row in p])


def sample_hardness(logits: Tensor, batch: Batch, *, floor: float) -> Tensor:
    """SED's weights `[B]` of samples: CE_n / (mean CE)^2 of the averaged logits, without a gradient.

    Their mean is 1 / (mean CE), which is unbounded as the batch is fitted; `floor` is a lower bound of the mean CE.
    """
    losses = F.cross_entropy(logits.detach().mean(0), batch.y, reduction="none")
    return losses / losses.mean().clamp_min(floor) ** 2


def kl_backward(target: Tensor, source: Tensor) -> Tensor:
    """KL(m_r || s), m_r: the mean prediction of a member, s: that of all members on labeled samples, detached."""
    mean, prior = target.mean(1), _mean_prediction(source)
    return (_plogp(mean) - mean * prior.clamp_min(MIN_PROB).log()).sum(-1)


def kl_forward(target: Tensor, source: Tensor) -> Tensor:
    """KL(s || m_r), m_r: the mean prediction of a member, s: that of all members on labeled samples, detached."""
    prior = _mean_prediction(source)
    return (_plogp(prior) - prior * target.mean(1).clamp_min(MIN_PROB).log()).sum(-1)


def entropy(target: Tensor, source: Tensor) -> Tensor:
    """Minus the entropy of the mean prediction of a member."""
    return _plogp(target.mean(1)).sum(-1)


def ratio(class_ratio: tuple[float, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    """Half the L1 distance between the mean prediction of a member and the known class ratio."""

    def regularize(target: Tensor, source: Tensor) -> Tensor:
        prior = torch.tensor(class_ratio, dtype=target.dtype, device=target.device)
        return (target.mean(1) - prior).abs().sum(-1) / 2

    return regularize


def _mean_prediction(source: Tensor) -> Tensor:
    return source.detach().mean((0, 1))
