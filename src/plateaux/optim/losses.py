"""Losses as settles, a table of outputs `[R, B, ...]` and its batch to losses `[R, B]`; and the words of joint ones.

Joint objectives add to the loss of each row how alike it is to the others: `disagreement` (A2D), `information`
(DivDis) and `distance` between all pairs of rows, `among` and `after` to mean them over a row's company, `hardness` to
weigh samples (SED), `balance` to keep predictions from collapsing. All are functions of probabilities `[R, B, C]`, are
finite where a probability is exactly 0 or 1, and never hold a tensor with samples beside classes times classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from plateaux.core.errors import RecipeError, suggest
from plateaux.core.method import LossFn
from plateaux.core.types import Batch


def cross_entropy(*, label_smoothing: float = 0.0, class_weights: tuple[float, ...] = ()) -> LossFn:
    """Cross entropy of every row and sample; labels may be class numbers [B] or probabilities [B, C].

    Class weights are normalised to mean one over the classes, so that a batch's loss stays a mean over its samples.
    """

    def settle(table: Tensor, batch: Batch) -> Tensor:
        rows = len(table)
        weight = None
        if class_weights:
            weight = torch.tensor(class_weights, dtype=table.dtype, device=table.device)
            weight = weight * (len(class_weights) / weight.sum())
        losses = [
            F.cross_entropy(table[row], batch.y, weight, reduction="none", label_smoothing=label_smoothing)
            for row in range(rows)
        ]
        table_of = torch.stack(losses)  # [R, B, ...]: text has a loss for every token
        return table_of.flatten(2).mean(-1) if table_of.ndim > 2 else table_of

    settle.plain = not label_smoothing and not class_weights  # type: ignore[attr-defined]  # its gradient has a closed form
    return settle


LOSSES: dict[str, Callable[..., LossFn]] = {"cross_entropy": cross_entropy}
NOT_YET = {
    "mse": "regression", "l1": "regression", "huber": "regression", "gaussian_nll": "regression",
    "bce": "multi-label classification", "binary_cross_entropy": "multi-label classification",
}  # fmt: skip


def get_loss(name: str) -> Callable[..., LossFn]:
    """Return the factory of the loss called `name`."""
    if name in NOT_YET:
        raise RecipeError(
            f"loss {name!r} is for {NOT_YET[name]}, which Plateaux does not train yet; "
            f"available: {', '.join(LOSSES)}. From Python, pass one of your own: plateaux.Components(loss=my_loss)"
        )
    if name not in LOSSES:
        raise RecipeError(f"There is no loss called {name!r}; {suggest(name, [*LOSSES, *NOT_YET])}")
    return LOSSES[name]


FLOOR = 1e-7  # added inside A2D's logarithm: two sure rows that agree cost -log FLOOR, and no more
LEAST = 1e-12  # a probability whose logarithm is divided by is at least this
CELLS = 1 << 20  # entries of joint distributions in memory at a time

DiversityLoss = Callable[[Tensor], Tensor]
"""How alike rows are: probabilities `[R, U, C]` to a number for every pair, `[R, R]`, larger where they agree more."""


def disagreement(p: Tensor, *, frozen: bool = False) -> Tensor:
    """A2D of every pair of rows and sample, `[R, R, B]`: entry (r, s) takes the class y that row s finds likeliest.

    -log(p_s(y) (1 - p_r(y)) + p_r(y) (1 - p_s(y)) + FLOOR), smallest where exactly one of the two is sure of y. With
    `frozen`, row s is taken as it is and only row r gets a gradient.
    """
    said, likeliest = (p.detach() if frozen else p).max(-1)  # [S, B]
    wanted = likeliest.T[:, None, :].expand(-1, len(p), -1)  # [B, R, S]
    own = p.transpose(0, 1).gather(2, wanted).permute(1, 2, 0)  # [R, S, B]
    return -(said * (1 - own) + own * (1 - said) + FLOOR).log()


def mean_over_others(rows: int, like: Tensor) -> Tensor:
    """Return the weights `[R, R]` of a mean over all others."""
    return (1 - torch.eye(rows, dtype=like.dtype, device=like.device)) / max(rows - 1, 1)


def mean_over_previous(rows: int, like: Tensor) -> Tensor:
    """Return the weights `[R, R]` of a mean over those before; the first row has none."""
    earlier = torch.ones(rows, rows, dtype=like.dtype, device=like.device).tril(-1)
    return earlier / earlier.sum(1, keepdim=True).clamp_min(1)


def mutual_information(p: Tensor) -> Tensor:
    """Mutual information in nats between what two rows predict over the samples, `[R, R]`; the diagonal is left zero.

    sum_cd P log(P / (m_r m_s)) with P = mean_b p_r(b, c) p_s(b, d) and its marginals m. Samples are contracted first,
    a few pairs at a time, and the joint distributions are computed again on the way back instead of being kept.
    """
    one, other = torch.triu_indices(len(p), len(p), 1, device=p.device)
    few = max(1, CELLS // p.shape[-1] ** 2)
    found = [
        checkpoint(_information, p[left], p[right], use_reentrant=False, preserve_rng_state=False)
        for left, right in zip(one.split(few), other.split(few), strict=True)
    ]
    half = p.new_zeros(len(p), len(p)).index_put((one, other), torch.cat(found))
    return half + half.T


def _information(a: Tensor, b: Tensor) -> Tensor:
    joint = a.transpose(1, 2) @ b / a.shape[1]  # [K, C, C]
    return _plogp(joint).sum((1, 2)) - _plogp(a.mean(1)).sum(1) - _plogp(b.mean(1)).sum(1)


def _plogp(p: Tensor) -> Tensor:
    """p log p, with value and gradient finite at zero."""
    return torch.xlogy(p, p.clamp_min(torch.finfo(p.dtype).tiny))


def l1_distance(p: Tensor) -> Tensor:
    """Minus the L1 distance of two rows' probabilities, mean over the samples, `[R, R]`."""
    return torch.stack([-(row - p).abs().sum(-1).mean(-1) for row in p])


def sample_hardness(table: Tensor, batch: Batch, *, floor: float) -> Tensor:
    """SED's weights `[B]` of samples: CE_n / (mean CE)^2 of the logit-averaged rows, without a gradient.

    Their mean is 1 / (mean CE), which grows without end as a batch is fitted: the mean CE is taken as at least `floor`.
    """
    losses = F.cross_entropy(table.detach().mean(0), batch.y, reduction="none")
    return losses / losses.mean().clamp_min(floor) ** 2


def kl_backward(target: Tensor, source: Tensor) -> Tensor:
    """KL(m_r || s) with m_r the row's mean prediction and s everyone's on labelled samples, without a gradient."""
    mean, known = target.mean(1), _known(source)
    return (_plogp(mean) - mean * known.clamp_min(LEAST).log()).sum(-1)


def kl_forward(target: Tensor, source: Tensor) -> Tensor:
    """KL(s || m_r) with m_r the row's mean prediction and s everyone's on labelled samples, without a gradient."""
    known = _known(source)
    return (_plogp(known) - known * target.mean(1).clamp_min(LEAST).log()).sum(-1)


def entropy(target: Tensor, source: Tensor) -> Tensor:
    """Minus the entropy of the row's mean prediction."""
    return _plogp(target.mean(1)).sum(-1)


def ratio(class_ratio: tuple[float, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    """Half the L1 distance of the row's mean prediction from the classes' known shares; of two classes, |m - s|."""

    def regularise(target: Tensor, source: Tensor) -> Tensor:
        known = torch.tensor(class_ratio, dtype=target.dtype, device=target.device)
        return (target.mean(1) - known).abs().sum(-1) / 2

    return regularise


def _known(source: Tensor) -> Tensor:
    return source.detach().mean((0, 1))
