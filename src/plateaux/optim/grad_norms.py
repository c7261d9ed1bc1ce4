"""Per-sample gradient norms over all trained parameters, at about the cost of one training step.

One forward pass records the inputs of each layer, and one backward pass the gradient at its output. Both together give
the layer's contribution to the squared norm of every sample (grad_norm_rules.py); per-sample gradients are not stored.
Parameters of layers without a rule are handled sample by sample. At the first use of a network, the result is verified
against backward passes of single samples: of two samples, and of some samples of the whole batch in both orders.
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
from torch import Tensor, nn
from torch.func import grad as gradient_of
from torch.func import vmap

from plateaux.core.errors import PlateauxError, RecipeError, first_line
from plateaux.core.member import MemberModule, pruning_masks
from plateaux.core.method import LossFn
from plateaux.core.types import Batch, map_tensors
from plateaux.optim.grad_norm_hooks import Call, GradNormHooks
from plateaux.optim.grad_norm_rules import layer_type, unsupported_attention_reason
from plateaux.optim.losses import normalized_logit_gradient

MAX_REL_ERROR = 1e-3  # of the verification: far above rounding errors, far below those of a wrong rule
# Of a fast rule.
FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError)
CHECKED_ROWS = 4  # of a batch, that are verified against backward passes of single samples
MAX_BATCH = 512  # samples in one backward pass
FIXED_BYTES = 2**25  # memory for workspaces and compiled kernels, independent of the batch
MAX_GRADIENT_BYTES = 2**27  # per-sample gradients in memory at once, for parameters without a rule

LogitGradient = Callable[[Tensor], Tensor]
"""Maps logits to the gradient with respect to them, from which the backward pass starts."""


@dataclass
class GradNormPlan:
    """How the norms of a network are computed; it contains names only, so that it keeps no network in memory."""

    slow: dict[str, str] = field(default_factory=dict)  # parameters handled sample by sample, and the reason
    expanded: tuple[str, ...] = ()  # parameters of shape [1, ...] that are expanded to one copy per sample
    axes: dict[Call, int | None] = field(default_factory=dict)  # the sample axis of a layer's input; None: it has none
    loop: bool = False  # vmap does not support the network
    verified: int = 1  # the size of the largest batch on which the norms were verified


_plans: WeakKeyDictionary[nn.Module, dict[frozenset[str], GradNormPlan]] = WeakKeyDictionary()


def squared_norms(member: MemberModule, batch: Batch, loss: LossFn | None = None) -> Tensor:
    """Return the squared norm of the gradient of every sample, `[B]` in float64."""
    module = member.module
    assert isinstance(module, nn.Module)
    trained = _trained_params(member)
    batch = replace(batch, x=map_tensors(batch.x, Tensor.detach))
    plans = _plans.setdefault(module, {})
    scales: list[Tensor] = []

    def start(logits: Tensor) -> Tensor:
        unit, scale = normalized_logit_gradient(logits, batch, loss)
        scales.append(scale)
        return unit

    with _exact_mode(batch.y.device.type):
        if frozenset(trained) not in plans:
            plans[frozenset(trained)] = _verified_plan(module, trained, batch)
        plan = plans[frozenset(trained)]
        if len(batch) > plan.verified and len(plan.slow) < len(trained):
            plan.verified = len(batch)
            _slow_down(module, plan, _disagreement(module, trained, batch, plan))
        norms, unsupported = _try_plan(module, trained, batch, plan, start)
        while unsupported:  # the forward pass differs from that of the verification
            _slow_down(module, plan, unsupported)
            norms, unsupported = _try_plan(module, trained, batch, plan, start)
        return norms * scales[-1]


def _slow_down(module: nn.Module, plan: GradNormPlan, unsupported: list[tuple[str, str]]) -> None:
    if unsupported:
        plan.slow |= dict(unsupported)
        plan.loop = True
        warnings.warn(_describe_slow(module, plan), stacklevel=4)


def _try_plan(
    module: nn.Module, trained: Mapping[str, nn.Parameter], batch: Batch, plan: GradNormPlan, start: LogitGradient
) -> tuple[Tensor, list[tuple[str, str]]]:
    """Return the norms and what the plan does not support: everything, if a fast rule fails on this batch."""
    try:
        return _planned_norms(module, trained, batch, plan, start)
    except (torch.OutOfMemoryError, PlateauxError):
        raise
    except FAILURES as error:
        if len(plan.slow) == len(trained):
            raise
        with torch.no_grad():
            MemberModule(module)(batch.x)  # raises an error of the network itself
        reason = f"the fast rule fails with {type(error).__name__}: {first_line(error)}"
        return torch.zeros(len(batch)), [(name, reason) for name in trained]


def _disagreement(
    module: nn.Module, trained: Mapping[str, nn.Parameter], batch: Batch, plan: GradNormPlan
) -> list[tuple[str, str]]:
    """Return what a plan does not support on a batch: all, if norms depend on the order or differ from single passes.

    A network may sort or route its samples by their content, which two samples need not show.
    """
    with torch.no_grad():
        unit = _test_gradient(MemberModule(module)(batch.x))
    order = torch.arange(len(batch), device=batch.y.device).flip(0)
    norms, unsupported = _try_plan(module, trained, batch, plan, lambda _: unit)
    reversed_norms, more = _try_plan(module, trained, batch.take(order), plan, lambda _: unit.flip(0))
    if unsupported or more:
        return [*unsupported, *more]
    rows = order[:: -(-len(batch) // CHECKED_ROWS)]
    reference = norms.clone()
    reference[rows] = _looped_norms(module, trained, batch.take(rows), unit[rows])
    rounding = 1e-6 * float(reference.max())
    if all(_agree(found, reference, rounding) for found in (norms, reversed_norms.flip(0))):
        return []
    return [(name, "samples of a batch are reordered or routed by their content") for name in trained]


def max_batch_size(member: MemberModule, batch: Batch, *, bound: int) -> int:
    """Return how many samples fit into `bound` bytes in `squared_norms`: a power of two from 1 to 512.

    Estimated from one forward pass over `batch`: the saved activations, four times the largest of them for gradients in
    the backward pass, and a quarter more for memory fragmentation.
    """
    module = member.module
    assert isinstance(module, nn.Module)
    saved: dict[int, int] = {}  # bytes by address

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in (*module.parameters(), *module.buffers())}
    with _exact_mode(batch.y.device.type), torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
        logits = MemberModule(module)(map_tensors(batch.x, Tensor.detach))
    sizes = [size for address, size in saved.items() if address not in weights]
    sample_bytes = 5 * (sum(sizes) + 4 * max(sizes, default=0)) // (4 * len(logits)) + 1
    return min(MAX_BATCH, 1 << max(0, (max(1, bound - FIXED_BYTES) // sample_bytes).bit_length() - 1))


@contextmanager
def _exact_mode(device: str) -> Iterator[None]:
    """Enable gradients, and disable autocast and the fast path of attention, which does not call submodules."""
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.enable_grad(), torch.autocast(device, enabled=False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)


def _trained_params(member: MemberModule) -> dict[str, nn.Parameter]:
    """Return the trained parameters of a member, each under its first name."""
    module = member.module
    assert isinstance(module, nn.Module)
    parameters = dict(module.named_parameters())
    own = {id(p) for n, p in module.named_parameters(remove_duplicate=False) if not member.own or n in member.own}
    trained = {name: p for name, p in parameters.items() if p.requires_grad and id(p) in own}
    if not trained:
        raise RecipeError(
            "No parameter is trained, so samples have no gradients; leave some parameters out of `model.freeze`"
        )
    if low := next((name for name, p in parameters.items() if p.is_floating_point() and p.element_size() < 4), None):
        raise RecipeError(f"Gradient norms need float32 or float64; {low} is {parameters[low].dtype}: call .float()")
    return trained


def _planned_norms(
    module: nn.Module, trained: Mapping[str, nn.Parameter], batch: Batch, plan: GradNormPlan, start: LogitGradient
) -> tuple[Tensor, list[tuple[str, str]]]:
    """Return the norms according to a plan, and the parameters that it does not support, with reasons."""
    watched = {name: p for name, p in trained.items() if name not in plan.slow}
    if not watched:  # outputs may depend on other samples of the batch, so every sample has a forward pass of its own
        with torch.no_grad():
            rows = [
                MemberModule(module)(map_tensors(batch.x, lambda t, row=row: t[row : row + 1]))
                for row in range(len(batch))
            ]
        logits = torch.cat(rows)
        return _per_sample_norms(module, trained, batch, plan, start(logits).to(logits.dtype)), []
    with GradNormHooks(module, watched, len(batch), expanded=plan.expanded, axes=plan.axes) as hooks:
        logits = MemberModule(module)(batch.x)
        unit = start(hooks.float64_logits(logits.detach())).to(logits.dtype)
        if logits.requires_grad:
            torch.autograd.backward(logits, unit)
        total = hooks.squared_norms(logits)
    if plan.slow:
        slow = {name: trained[name] for name in plan.slow}
        total = total + _per_sample_norms(module, slow, batch, plan, unit)
    return total, hooks.unsupported


def _per_sample_norms(
    module: nn.Module, params: Mapping[str, nn.Parameter], batch: Batch, plan: GradNormPlan, unit: Tensor
) -> Tensor:
    """Return the squared norms over some parameters from per-sample gradients, a few samples at a time."""
    if plan.loop:
        return _looped_norms(module, params, batch, unit)
    masks = pruning_masks(module)

    def output(own: dict[str, Tensor], x: Any, direction: Tensor) -> Tensor:
        return (MemberModule(module)(map_tensors(x, lambda t: t[None]), own)[0] * direction).sum()

    def norm(x: Any, direction: Tensor) -> Tensor:
        grads = gradient_of(output)({name: p.detach() for name, p in params.items()}, x, direction)
        return sum(((g * masks[n] if n in masks else g).square().sum() for n, g in grads.items()), torch.zeros(()))

    size = sum(p.numel() * p.element_size() for p in params.values())
    chunk = max(1, min(16, MAX_GRADIENT_BYTES // size))
    with torch.no_grad():
        return vmap(norm, chunk_size=chunk)(batch.x, unit).double()


def _looped_norms(module: nn.Module, params: Mapping[str, nn.Parameter], batch: Batch, unit: Tensor) -> Tensor:
    """Return the squared norms over some parameters from one forward and backward pass per sample."""
    norms, masks = [], pruning_masks(module)
    for row in range(len(batch)):
        logits = MemberModule(module)(map_tensors(batch.x, lambda t, row=row: t[row : row + 1]))
        total = (logits * unit[row : row + 1]).sum()
        grads = torch.autograd.grad(total, list(params.values()), allow_unused=True) if total.requires_grad else ()
        pairs = [(n, g) for n, g in zip(params, grads, strict=bool(grads)) if g is not None]
        norms.append(sum(float((g * masks[n] if n in masks else g).double().square().sum()) for n, g in pairs))
    return torch.tensor(norms, dtype=torch.float64, device=unit.device)


def _test_gradient(logits: Tensor) -> Tensor:
    """Return a gradient with respect to the logits in which no terms cancel and no entry is zero."""
    return torch.cos(1.0 + torch.arange(logits.numel(), device=logits.device)).view_as(logits).to(logits.dtype)


def _verified_plan(module: nn.Module, trained: Mapping[str, nn.Parameter], batch: Batch) -> GradNormPlan:
    """Choose a plan, verify it against single backward passes, and warn about parameters without a fast rule."""
    rows = torch.tensor([0, min(1, len(batch) - 1)], device=batch.y.device)
    pair = Batch(map_tensors(batch.x, lambda t: t[rows.to(t.device)]), batch.y[rows], batch.index[:1].expand(2))
    with torch.no_grad():
        unit = _test_gradient(MemberModule(module)(pair.x))
    reference = _looped_norms(module, trained, pair, unit)
    reason = "the fast rule and a plain backward pass disagree"
    candidates = _expandable(module, trained)
    for expanded, add_axis in dict.fromkeys(((candidates, True), (candidates, False), ((), False))):
        try:
            plan = _make_plan(module, trained, pair, expanded, add_axis, unit)
            if _agree(_planned_norms(module, trained, pair, plan, lambda _: unit)[0], reference):
                break
        except FAILURES as error:
            reason = f"the fast rule fails with {type(error).__name__}: {first_line(error)}"
    else:
        plan = GradNormPlan(slow=dict.fromkeys(trained, reason))
        plan.loop = not _vmap_agrees(module, trained, pair, plan, unit)
    if plan.slow:
        warnings.warn(_describe_slow(module, plan), stacklevel=5)
    return plan


def _agree(norms: Tensor, reference: Tensor, rounding: float = 0.0) -> bool:
    return bool(((norms - reference).abs() <= MAX_REL_ERROR * reference.abs() + rounding).all())


def _make_plan(
    module: nn.Module,
    trained: Mapping[str, nn.Parameter],
    pair: Batch,
    expanded: tuple[str, ...],
    add_axis: bool,
    unit: Tensor,
) -> GradNormPlan:
    """Return a plan in which every parameter has a supported rule, is expanded, or is handled sample by sample.

    With `add_axis`, an input that all samples share, such as positions, is expanded to one copy per sample.
    """
    plan = GradNormPlan(_without_rule(module, trained, expanded), expanded)
    used_params = _used_params(module, trained, pair.take(slice(0, 1)))
    while True:
        watched = {name: p for name, p in trained.items() if name not in plan.slow}
        both, single = (_run_hooks(module, watched, plan, part) for part in (pair, pair.take(slice(0, 1))))
        unsupported = dict(both.unsupported)
        axes = {call: _sample_axis(shape, single.shapes.get(call)) for call, shape in both.shapes.items()}
        shared = [call for call, axis in axes.items() if axis is None]
        if add_axis and (new := next((call for call in shared if plan.axes.get(call, 0) is not None), None)):
            plan.axes[new] = None  # one at a time, because this changes the shapes of later layers
            continue
        plan.axes = axes
        if not add_axis:
            plan.axes = {call: axis or 0 for call, axis in axes.items()}
            names = (name for call in shared for name in both.owners[call])
            unsupported |= dict.fromkeys(names, "its input has no sample axis")
        hooked = {name for name, _ in both.used}
        outside = used_params.intersection(watched) - hooked - set(expanded) - set(unsupported)
        unsupported |= dict.fromkeys(sorted(outside), "it is used outside its layer's call")
        if not unsupported:
            fast = GradNormPlan({}, plan.expanded, plan.axes)
            unsupported = dict(_planned_norms(module, watched, pair, fast, lambda _: unit)[1])
        if not unsupported:
            break
        plan.slow |= unsupported
    slow = {name: trained[name] for name in plan.slow}
    plan.loop = bool(slow) and not _vmap_agrees(module, slow, pair, plan, unit)
    return plan


def _run_hooks(
    module: nn.Module, watched: Mapping[str, nn.Parameter], plan: GradNormPlan, batch: Batch
) -> GradNormHooks:
    with GradNormHooks(module, watched, len(batch), expanded=plan.expanded, axes=plan.axes, check=True) as hooks:
        MemberModule(module)(batch.x)
    return hooks


def _sample_axis(pair: torch.Size, single: torch.Size | None) -> int | None:
    """Return the axis that is twice as long for two samples as for one."""
    if single is None or len(single) != len(pair):
        return None
    different = [axis for axis, (a, b) in enumerate(zip(pair, single, strict=True)) if a != b]
    return different[0] if len(different) == 1 and pair[different[0]] == 2 * single[different[0]] else None


def _used_params(module: nn.Module, trained: Mapping[str, nn.Parameter], single: Batch) -> set[str]:
    total = MemberModule(module)(single.x).sum()
    grads = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
    return {name for name, g in zip(trained, grads, strict=True) if g is not None}


def _vmap_agrees(
    module: nn.Module, params: Mapping[str, nn.Parameter], pair: Batch, plan: GradNormPlan, unit: Tensor
) -> bool:
    try:
        norms = _per_sample_norms(module, params, pair, replace(plan, loop=False), unit)
    except Exception:  # vmap raises many kinds for networks that it does not support
        return False
    return _agree(norms, _looped_norms(module, params, pair, unit))


def _owners(module: nn.Module, parameter: nn.Parameter) -> list[tuple[nn.Module, str]]:
    parts = module.modules()
    return [(part, attr) for part in parts for attr, p in part.named_parameters(recurse=False) if p is parameter]


def _expandable(module: nn.Module, trained: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """Return the parameters `[1, ...]` of modules without a rule, such as a class token: they can be expanded."""
    return tuple(
        name
        for name, p in trained.items()
        if p.ndim > 1 and len(p) == 1 and [_rule_for(*owner) for owner in _owners(module, p)] == [None]
    )


def _rule_for(owner: nn.Module, attr: str) -> str | None:
    """Return which rule supports a parameter of a layer; None without one."""
    if isinstance(owner, nn.MultiheadAttention):
        return "attention" if unsupported_attention_reason(owner) is None and not attr.startswith("bias_") else None
    return "rule" if layer_type(owner) is not None and attr in ("weight", "bias") else None


def _without_rule(module: nn.Module, trained: Mapping[str, nn.Parameter], expanded: tuple[str, ...]) -> dict[str, str]:
    """Return the parameters that no rule supports, and the reasons."""
    reasons = {}
    for name, p in trained.items():
        unknown = next((owner for owner, attr in _owners(module, p) if _rule_for(owner, attr) is None), None)
        if unknown is not None and name not in expanded:
            reason = unsupported_attention_reason(unknown) if isinstance(unknown, nn.MultiheadAttention) else None
            reasons[name] = reason or f"{type(unknown).__name__} has no rule"
    return reasons


def _describe_slow(module: nn.Module, plan: GradNormPlan) -> str:
    """Return a warning about the layers that are handled sample by sample, and the reasons."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, reason in plan.slow.items():
        layer = name.rpartition(".")[0] or type(module).__name__
        if layer not in reasons[reason]:
            reasons[reason].append(layer)
    layers = "; ".join(f"{_shorten(names)} ({reason})" for reason, names in reasons.items())
    how = (
        "one sample at a time, because vmap does not support them"
        if plan.loop
        else "with vmap, a few samples at a time"
    )
    return f"Per-sample gradient norms are slow for some layers: {layers}. They are computed {how}"


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
