"""The squared norm of every sample's gradient over all trained parameters, for about the price of one training step.

One forward pass records what each layer sees, one backward pass brings each layer the gradient at its output, and both
together give the layer's share of every sample's norm at once (layers.py): no sample's gradient is ever stored. Weights
of layers without a rule go sample by sample. The first time a network is met, both are held against plain backward
passes of two samples.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad as gradient_of
from torch.func import vmap

from plateaux.core.errors import RecipeError, first_line
from plateaux.core.member import MemberModule, pruning_masks
from plateaux.core.method import LossFn
from plateaux.core.types import Batch, map_tensors
from plateaux.optim.grad_norm_hooks import Call, GradNormHooks
from plateaux.optim.grad_norm_rules import layer_type, unsupported_attention_reason

AGREE = 1e-3  # relative: far above rounding, far below any mistake
MAX_BATCH = 512  # samples scored at once
FIXED = 2**25  # bytes that scoring takes whatever the batch: workspaces, compiled kernels
SLOW_BYTES = 2**27  # of gradients held at once where samples are taken one by one

Start = Callable[[Tensor], Tensor]
"""Logits to the gradient at them that the backward pass starts from."""


@dataclass
class GradNormPlan:
    """How a network is gone through; names only, so that it keeps no network alive."""

    slow: dict[str, str] = field(default_factory=dict)  # parameters that go sample by sample, and why
    raw: tuple[str, ...] = ()  # parameters of shape [1, ...] that every sample is given a copy of
    axes: dict[Call, int | None] = field(default_factory=dict)  # where a layer's samples lie; None: all see the same
    loop: bool = False  # vmap does not run


_plans: WeakKeyDictionary[nn.Module, dict[frozenset[str], GradNormPlan]] = WeakKeyDictionary()


def squared_norms(view: MemberModule, batch: Batch, loss: LossFn | None = None) -> Tensor:
    """Return the squared norm of every sample's gradient, `[B]` in float64."""
    module = view.module
    assert isinstance(module, nn.Module)
    trained = _trained(view)
    batch = replace(batch, x=map_tensors(batch.x, Tensor.detach))
    plans = _plans.setdefault(module, {})
    sizes: list[Tensor] = []

    def start(logits: Tensor) -> Tensor:
        unit, size = normalized_logit_gradient(logits, batch, loss)
        sizes.append(size)
        return unit

    with _plain_numbers(batch.y.device.type):
        if frozenset(trained) not in plans:
            plans[frozenset(trained)] = _verified_plan(module, trained, batch)
        plan = plans[frozenset(trained)]
        found, strays = _scores(module, trained, batch, plan, start)
        while strays:  # the network does something that it did not when it was met
            plan.slow |= dict(strays)
            plan.loop = True
            warnings.warn(_slow_words(module, plan), stacklevel=3)
            found, strays = _scores(module, trained, batch, plan, start)
        return found * sizes[-1]


def normalized_logit_gradient(logits: Tensor, batch: Batch, loss: LossFn | None) -> tuple[Tensor, Tensor]:
    """Return each sample's gradient at the logits, scaled to norm one, and its squared norm in float64.

    The scaling keeps the gradients of well-fitted samples, down to the smallest, from vanishing in float32.
    """
    gradient = logit_gradient(logits, batch, loss)
    size = gradient.flatten(1).square().sum(1)
    norm = size.sqrt().clamp(min=torch.finfo(torch.float64).tiny).view(-1, *[1] * (gradient.ndim - 1))
    return gradient / norm, size


def logit_gradient(logits: Tensor, batch: Batch, loss: LossFn | None) -> Tensor:
    """Return the gradient of each sample's loss at its logits, in float64."""
    if loss is None and logits.ndim == 2 and batch.y.ndim == 1 and not batch.y.is_floating_point():
        counted = batch.y >= 0  # cross_entropy passes over labels of -100
        label = batch.y.clamp(min=0)[:, None]
        wide = logits.double()
        gradient = wide.softmax(1)
        # p_y - 1 = -sigmoid(log sum of the others - z_y), which does not cancel where p_y is nearly one.
        return gradient.scatter(1, label, -torch.sigmoid(_behind(wide, label))) * counted[:, None]
    with torch.enable_grad():
        wide = logits.detach().double().requires_grad_()
        total = (loss or _cross_entropy)(wide[None], batch).sum()
        return torch.autograd.grad(total, wide)[0]


def sample_losses(logits: Tensor, batch: Batch, loss: LossFn | None) -> Tensor:
    """Return the loss of every sample in float64."""
    return (loss or _cross_entropy)(logits.double()[None], batch)[0].double()


def _behind(logits: Tensor, label: Tensor) -> Tensor:
    others = logits.scatter(1, label, -torch.inf)
    return others.logsumexp(1, keepdim=True) - logits.gather(1, label)


def _cross_entropy(table: Tensor, batch: Batch) -> Tensor:
    y = batch.y.to(table.dtype) if batch.y.is_floating_point() else batch.y
    losses = F.cross_entropy(table[0], y, reduction="none")
    return losses.reshape(1, len(losses), -1).mean(-1)


def max_batch_size(view: MemberModule, batch: Batch, *, bound: int) -> int:
    """Return how many samples to score at once within `bound` bytes: a power of two from 1 to 512.

    Counted from the shapes that one forward pass over `batch` shows: whatever it keeps, a few times the largest for the
    gradients on their way back, and a quarter more, for memory is never packed tightly.
    """
    module = view.module
    assert isinstance(module, nn.Module)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in (*module.parameters(), *module.buffers())}
    with _plain_numbers(batch.y.device.type), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        logits = MemberModule(module)(map_tensors(batch.x, Tensor.detach))
    sizes = [size for place, size in kept.items() if place not in weights]
    each = 5 * (sum(sizes) + 4 * max(sizes, default=0)) // (4 * len(logits)) + 1
    return min(MAX_BATCH, 1 << max(0, (max(1, bound - FIXED) // each).bit_length() - 1))


@contextmanager
def _plain_numbers(device: str) -> Iterator[None]:
    """Open a context with gradients, without autocast and without kernels that pass over submodules."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.enable_grad(), torch.autocast(device, enabled=False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _trained(view: MemberModule) -> dict[str, nn.Parameter]:
    """Return the parameters that are counted, each under its first name."""
    assert isinstance(view.module, nn.Module)
    parameters = dict(view.module.named_parameters())
    own = {id(p) for n, p in view.module.named_parameters(remove_duplicate=False) if not view.own or n in view.own}
    trained = {name: p for name, p in parameters.items() if p.requires_grad and id(p) in own}
    if not trained:
        raise RecipeError("No parameter is trained, so that no sample has a gradient; leave one out of `freeze`")
    if low := next((name for name, p in parameters.items() if p.is_floating_point() and p.element_size() < 4), None):
        raise RecipeError(f"Gradient norms need float32 or float64; {low} is {parameters[low].dtype}: call .float()")
    return trained


def _scores(
    module: nn.Module, trained: Mapping[str, nn.Parameter], batch: Batch, plan: GradNormPlan, start: Start
) -> tuple[Tensor, list[tuple[str, str]]]:
    """Return the norms by the plan, and the parameters for which it did not hold, with reasons."""
    watched = {name: p for name, p in trained.items() if name not in plan.slow}
    if not watched:  # samples may then see one another, and are taken by themselves from the start
        with torch.no_grad():
            alone = [
                MemberModule(module)(map_tensors(batch.x, lambda t, row=row: t[row : row + 1]))
                for row in range(len(batch))
            ]
        logits = torch.cat(alone)
        return _one_by_one(module, trained, batch, plan, start(logits).to(logits.dtype)), []
    with GradNormHooks(module, watched, len(batch), raw=plan.raw, axes=plan.axes) as seen:
        logits = MemberModule(module)(batch.x)
        unit = start(seen.sharper(logits.detach())).to(logits.dtype)
        if logits.requires_grad:
            torch.autograd.backward(logits, unit)
        total = seen.finish(logits)
    if plan.slow:
        total = total + _one_by_one(module, {name: trained[name] for name in plan.slow}, batch, plan, unit)
    return total, seen.strays


def _one_by_one(
    module: nn.Module, some: Mapping[str, nn.Parameter], batch: Batch, plan: GradNormPlan, unit: Tensor
) -> Tensor:
    """Return the norms over some parameters from gradients of every sample, a few samples at a time."""
    if plan.loop:
        return _loop(module, some, batch, unit)
    masks = pruning_masks(module)

    def one(own: dict[str, Tensor], x: Any, direction: Tensor) -> Tensor:
        return (MemberModule(module)(map_tensors(x, lambda t: t[None]), own)[0] * direction).sum()

    def norm(x: Any, direction: Tensor) -> Tensor:
        found = gradient_of(one)({name: p.detach() for name, p in some.items()}, x, direction)
        return sum(((g * masks[n] if n in masks else g).square().sum() for n, g in found.items()), torch.zeros(()))

    size = sum(p.numel() * p.element_size() for p in some.values())
    chunk = max(1, min(16, SLOW_BYTES // size))
    with torch.no_grad():
        return vmap(norm, chunk_size=chunk)(batch.x, unit).double()


def _loop(module: nn.Module, some: Mapping[str, nn.Parameter], batch: Batch, unit: Tensor) -> Tensor:
    norms, masks = [], pruning_masks(module)
    for row in range(len(batch)):
        logits = MemberModule(module)(map_tensors(batch.x, lambda t, row=row: t[row : row + 1]))
        total = (logits * unit[row : row + 1]).sum()
        found = torch.autograd.grad(total, list(some.values()), allow_unused=True) if total.requires_grad else ()
        pairs = [(n, g) for n, g in zip(some, found, strict=bool(found)) if g is not None]
        norms.append(sum(float((g * masks[n] if n in masks else g).double().square().sum()) for n, g in pairs))
    return torch.tensor(norms, dtype=torch.float64, device=unit.device)


def _probe(logits: Tensor) -> Tensor:
    """Return a gradient at the logits in which nothing cancels and nothing is zero."""
    return torch.cos(1.0 + torch.arange(logits.numel(), device=logits.device)).view_as(logits).to(logits.dtype)


def _verified_plan(module: nn.Module, trained: Mapping[str, nn.Parameter], batch: Batch) -> GradNormPlan:
    """Find out how a network can be gone through, hold that against plain backward passes, and say what is slow."""
    rows = torch.tensor([0, min(1, len(batch) - 1)], device=batch.y.device)
    two = Batch(map_tensors(batch.x, lambda t: t[rows.to(t.device)]), batch.y[rows], batch.index[:1].expand(2))
    with torch.no_grad():
        unit = _probe(MemberModule(module)(two.x))
    truth = _loop(module, trained, two, unit)
    why = "the fast way and a plain backward pass disagree"
    raw = _raw(module, trained)
    for handed, spread in dict.fromkeys(((raw, True), (raw, False), ((), False))):
        try:
            plan = _plan(module, trained, two, handed, spread, unit)
            if _agree(_scores(module, trained, two, plan, lambda _: unit)[0], truth):
                break
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError) as error:
            why = f"the fast way fails with {type(error).__name__}: {first_line(error)}"
    else:
        plan = GradNormPlan(slow=dict.fromkeys(trained, why))
        plan.loop = not _vmap_agrees(module, trained, two, plan, unit)
    if plan.slow:
        warnings.warn(_slow_words(module, plan), stacklevel=5)
    return plan


def _agree(found: Tensor, truth: Tensor) -> bool:
    return bool(((found - truth).abs() <= AGREE * truth.abs()).all())


def _plan(
    module: nn.Module, trained: Mapping[str, nn.Parameter], two: Batch, raw: tuple[str, ...], spread: bool, unit: Tensor
) -> GradNormPlan:
    """Return a plan in which every parameter has a rule that holds, is handed out, or goes sample by sample.

    With `spread`, a layer that sees the same for all samples, as one of positions does, is given its own for each.
    """
    plan = GradNormPlan(_without_rule(module, trained, raw), raw)
    touched = _used_params(module, trained, two.take(slice(0, 1)))
    while True:
        watched = {name: p for name, p in trained.items() if name not in plan.slow}
        seen = [_run_hooks(module, watched, plan, part) for part in (two, two.take(slice(0, 1)))]
        strays = dict(seen[0].strays)
        axes = {call: _axis(shape, seen[1].shapes.get(call)) for call, shape in seen[0].shapes.items()}
        same = [call for call, axis in axes.items() if axis is None]
        if spread and (new := next((call for call in same if plan.axes.get(call, 0) is not None), None)):
            plan.axes[new] = None  # one at a time: what comes after it will see another shape
            continue
        plan.axes = axes
        if not spread:
            plan.axes = {call: axis or 0 for call, axis in axes.items()}
            strays |= dict.fromkeys((n for c in same for n in seen[0].owners[c]), "what it sees has no axis of samples")
        used = {name for name, _ in seen[0].used}
        outside = touched.intersection(watched) - used - set(raw) - set(strays)
        strays |= dict.fromkeys(sorted(outside), "it is used outside its layer's call")
        if not strays:
            bare = GradNormPlan({}, plan.raw, plan.axes)
            strays = dict(_scores(module, watched, two, bare, lambda _: unit)[1])
        if not strays:
            break
        plan.slow |= strays
    slow = {name: trained[name] for name in plan.slow}
    plan.loop = bool(slow) and not _vmap_agrees(module, slow, two, plan, unit)
    return plan


def _run_hooks(
    module: nn.Module, watched: Mapping[str, nn.Parameter], plan: GradNormPlan, batch: Batch
) -> GradNormHooks:
    with GradNormHooks(module, watched, len(batch), raw=plan.raw, axes=plan.axes, check=True) as seen:
        MemberModule(module)(batch.x)
    return seen


def _axis(two: torch.Size, one: torch.Size | None) -> int | None:
    """Return the axis that is twice as long for two samples as for one."""
    if one is None or len(one) != len(two):
        return None
    longer = [axis for axis, (a, b) in enumerate(zip(two, one, strict=True)) if a != b]
    return longer[0] if len(longer) == 1 and two[longer[0]] == 2 * one[longer[0]] else None


def _used_params(module: nn.Module, trained: Mapping[str, nn.Parameter], one: Batch) -> set[str]:
    total = MemberModule(module)(one.x).sum()
    found = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
    return {name for name, g in zip(trained, found, strict=True) if g is not None}


def _vmap_agrees(
    module: nn.Module, some: Mapping[str, nn.Parameter], two: Batch, plan: GradNormPlan, unit: Tensor
) -> bool:
    try:
        found = _one_by_one(module, some, two, replace(plan, loop=False), unit)
    except Exception:  # whatever a network does that vmap cannot follow
        return False
    return _agree(found, _loop(module, some, two, unit))


def _owners(module: nn.Module, parameter: nn.Parameter) -> list[tuple[nn.Module, str]]:
    parts = module.modules()
    return [(part, attr) for part in parts for attr, p in part.named_parameters(recurse=False) if p is parameter]


def _raw(module: nn.Module, trained: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """Return the parameters `[1, ...]` of unknown modules, such as a class token: each sample can be given its own."""
    return tuple(
        name
        for name, p in trained.items()
        if p.ndim > 1 and len(p) == 1 and [_rule_for(*owner) for owner in _owners(module, p)] == [None]
    )


def _rule_for(owner: nn.Module, attr: str) -> str | None:
    """Return what takes care of a layer's parameter, or nothing."""
    if isinstance(owner, nn.MultiheadAttention):
        return "attend" if unsupported_attention_reason(owner) is None and not attr.startswith("bias_") else None
    return "rule" if layer_type(owner) is not None and attr in ("weight", "bias") else None


def _without_rule(module: nn.Module, trained: Mapping[str, nn.Parameter], raw: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name, p in trained.items():
        unknown = next((owner for owner, attr in _owners(module, p) if _rule_for(owner, attr) is None), None)
        if unknown is not None and name not in raw:
            reason = unsupported_attention_reason(unknown) if isinstance(unknown, nn.MultiheadAttention) else None
            found[name] = reason or f"{type(unknown).__name__} has no rule"
    return found


def _slow_words(module: nn.Module, plan: GradNormPlan) -> str:
    """Return one line on what goes sample by sample and why."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, why in plan.slow.items():
        layer = name.rpartition(".")[0] or type(module).__name__
        if layer not in reasons[why]:
            reasons[why].append(layer)
    said = "; ".join(f"{_few(layers)} ({why})" for why, layers in reasons.items())
    way = "one sample at a time, for vmap does not run it" if plan.loop else "by vmap, a few samples at a time"
    return f"Gradient norms are slower than they could be: {said}, done {way}"


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
