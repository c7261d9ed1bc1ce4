"""SAM and SharpBalance for custom training loops: an optimizer that wraps another one.

    optimizer = SharpnessAware(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), rho=0.05, model=net)
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(net(x), y).backward()
        with optimizer.perturbed():
            loss_fn(net(x), y).backward()
        optimizer.step()

The arithmetic is that of `plateaux.optim.sam`: this module answers the gradient requests of an update with the
gradients that the loop computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from plateaux.core import tensor_tree
from plateaux.core.errors import TrainingLoopError
from plateaux.core.member import at_params, preserve_module_buffers
from plateaux.core.method import Average, GradRequest, StepContext, Update
from plateaux.core.types import TensorTree
from plateaux.optim import sam as updates
from plateaux.optim.forward_records import ForwardRecords

NO_SECOND_GRADIENT = (
    "SharpnessAware.step() was called without a gradient at perturbed weights, which would be a step without SAM: "
    "compute it in `with optimizer.perturbed():` between backward and step, or call optimizer.step(closure) (Lightning "
    "with 16-mixed precision: use bf16-mixed; Hugging Face Trainer: use SharpnessAwareMixin)"
)
NOT_RECOMPUTED = (
    "step(closure) was called with gradients of earlier backward passes in .grad (gradient accumulation), which the "
    "closure does not compute again at the perturbed weights: use `with optimizer.perturbed():` after every backward "
    "pass, or compute all parts of the batch in the closure (Lightning: set accumulate_grad_batches = 1, or use manual "
    "optimization)"
)
MODEL_NOT_CALLED = (
    "There is no gradient of a forward pass of `model` since the last step: call model(x) and loss.backward() before "
    "optimizer.perturbed() or in the closure, and pass as `model` the module that you call"
)
NO_GRADIENT = (
    "No gradient was computed in `with optimizer.perturbed():`; call the model and loss.backward() in the block again"
)
PARTS_LEFT = (
    "`with optimizer.perturbed(mask=mask) as parts:` ended before all parts were computed; loop over all of them: "
    "`for rows in parts:`"
)


class SharpnessAware(torch.optim.Optimizer):
    """Sharpness-aware minimization around any optimizer, for a training loop of your own.

    Between backward and step, compute the gradient again at perturbed weights: `with optimizer.perturbed():`. Or pass
    a closure to `step`, which calls it twice. Parameter groups, state, and state_dict are those of the wrapped
    optimizer. `model` is the module that the loop calls; its buffers (BatchNorm statistics) do not change in the
    perturbed pass, and its dropout noise is the same in both passes. `adaptive` selects ASAM.

    >>> net = nn.Linear(2, 1)
    >>> optimizer = SharpnessAware(torch.optim.SGD(net.parameters(), lr=0.1), rho=0.05, model=net)
    >>> net(torch.ones(4, 2)).square().mean().backward()
    >>> with optimizer.perturbed():
    ...     net(torch.ones(4, 2)).square().mean().backward()
    >>> optimizer.step()
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, rho: float, model: nn.Module, adaptive: bool = False
    ) -> None:
        if not rho >= 0 or rho == float("inf"):
            raise TrainingLoopError(
                f"rho = {rho} is not a radius; set it to a finite number of at least 0, such as 0.05"
            )
        self.optimizer = optimizer
        self.rho, self.adaptive = rho, adaptive
        self._gradients = GradientState(optimizer, model)
        self.__setstate__({})  # the hooks of torch.optim.Optimizer, without groups and state of its own

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        return self.optimizer.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self._gradients.discard()

    def perturbed(self, *, mask: Tensor | None = None) -> AbstractContextManager[Any]:
        """Compute a gradient at perturbed weights in a with block, between backward and step.

        The perturbation follows the gradient in `.grad`; the gradient that the block computes replaces it. On exit,
        weights and buffers have their exact values again, also after an exception.

        Gradient accumulation: after the backward passes of several micro-batches, a block that computes all of them
        again uses one perturbation for the batch. With one block per micro-batch, each has a perturbation of its own
        (m-sharpness), and `.grad` accumulates the gradients at the perturbed weights.

        With a `mask` [B] of booleans, SAM applies to these samples of a batch only, and the others contribute plain
        gradients (SharpBalance). The block then computes all gradients, none is needed before it:

            with optimizer.perturbed(mask=mask) as parts:
                for rows in parts:
                    (loss_fn(net(x[rows]), y[rows]).sum() / len(x)).backward()

        The parts are the other samples, the samples of the mask, and those again at perturbed weights; or the whole
        batch, if the mask contains all samples or none.
        """
        direction = updates.asam_direction(0.01) if self.adaptive else updates.sam_direction
        update = updates.sam(self.rho, direction=direction)
        if mask is None:
            return self._gradients.perturbed(update)
        if mask.dtype != torch.bool or mask.ndim != 1:
            raise TrainingLoopError(
                f"mask has dtype {mask.dtype} and shape {list(mask.shape)}; it must contain one boolean per sample, [B]"
            )
        return self._gradients.mixed(
            updates.sam_on_subset(update, warmup=updates.plain_gradient),
            mask,
            passes=updates.count_gradients(update, 1),
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of the wrapped optimizer with the gradient at the perturbed weights.

        A closure computes the loss and the gradient and returns the loss. It is called twice: at the weights, and at
        the perturbed weights with the same random numbers. A closure without a backward pass is called once. Return
        the first result of the closure.
        """
        loss = None if closure is None else self._call_twice(closure)
        if not self._gradients.is_ready:
            raise TrainingLoopError(NO_SECOND_GRADIENT)
        result = self.optimizer.step()
        self._gradients.reset()
        return result if closure is None else loss

    def _call_twice(self, closure: Callable[[], Any]) -> Any:
        records = self._gradients.records
        earlier, rng = records.with_gradient(), records.rng_state()
        with torch.enable_grad():
            loss = closure()
        now = records.with_gradient()
        if all(record in earlier for record in now):  # no backward pass through the model
            if not earlier and not self._gradients.is_ready and _collect(self._gradients.params()):
                raise TrainingLoopError(MODEL_NOT_CALLED)
            return loss
        if any(record in now for record in earlier):
            raise TrainingLoopError(NOT_RECOMPUTED)
        with self.perturbed(), torch.enable_grad():
            rng.restore()
            closure()
        return loss


class GradientState:
    """What the gradients in `.grad` are, and how the requests of an update are answered with them."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self.optimizer, self.model = optimizer, model
        self.is_ready = False  # `.grad` contains gradients at perturbed weights, and nothing else
        self.carried: TensorTree = {}  # gradients at perturbed weights of earlier micro-batches
        self.records = ForwardRecords(model, self._on_backward)
        self.params()  # reports parameters that do not belong to the model

    def params(self) -> TensorTree:
        """Return the parameters of the optimizer by their names in the model."""
        optimized = {param for group in self.optimizer.param_groups for param in group["params"]}
        params: TensorTree = {name: param for name, param in self.model.named_parameters() if param in optimized}
        if len(params) < len(optimized):
            raise TrainingLoopError(
                f"{len(optimized) - len(params)} of {len(optimized)} parameters of the optimizer are not parameters of "
                "`model`; pass as `model` the module that contains all of them and that you call"
            )
        return params

    def reset(self) -> None:
        """Forget everything: the gradients were used or discarded."""
        self.is_ready = False
        self.carried = {}
        self.records.clear()

    def discard(self) -> None:
        """Note that `.grad` was cleared; in a perturbed pass, this concerns only gradients computed in it."""
        if self.records.is_replaying:
            self._restore_carried()
        else:
            self.is_ready = False
            self.carried = {}
            self.records.discard_gradients()

    def _on_backward(self) -> None:
        """Move gradients at perturbed weights out of `.grad` before a backward pass of the next micro-batch."""
        if self.is_ready:
            self._carry()

    def _carry(self) -> None:
        params = self.params()
        # Copies, here and in `_parts`: DistributedDataParallel may reuse the memory of the gradients.
        self.carried = {name: param.grad.clone() for name, param in params.items() if param.grad is not None}
        _clear(params)
        self.is_ready = False

    def _restore_carried(self) -> None:
        """Let the next gradient add up with those of earlier micro-batches.

        They are in `.grad` before the backward pass, because DistributedDataParallel then averages their sum.
        """
        params = self.params()
        for name, value in self.carried.items():
            params[name].grad = value.clone()

    @contextmanager
    def perturbed(self, update: Update) -> Iterator[None]:
        """Answer the first request of an update with `.grad`, and the second with the gradient of the block."""
        params = {name: param for name, param in self.params().items() if param.grad is not None}
        gradient = _collect(params)
        if not self.records.with_gradient() or not gradient:
            raise TrainingLoopError(MODEL_NOT_CALLED)
        requests = update(params, self._context(1))
        with torch.no_grad():
            next(requests)
            try:
                at = cast(GradRequest, requests.send(gradient)).at
            except StopIteration:  # rho = 0
                at = None
            factor = _nan_unless_finite(gradient)
        del gradient
        _clear(params)
        try:
            with self._at(params, at):
                self._restore_carried()
                yield
        except BaseException:
            _clear(params)
            self.reset()
            raise
        if not self.records.has_replayed_gradient:
            _clear(params)
            self.reset()
            raise TrainingLoopError(NO_GRADIENT)
        self._finish(self.params(), _collect(self.params()), factor)

    @contextmanager
    def mixed(self, update: Update, mask: Tensor, *, passes: int) -> Iterator[Iterator[slice | Tensor]]:
        """Yield an iterator over the parts of a batch; the caller computes the gradient of each.

        `passes` is the number of gradients that SAM requests.
        """
        if self.records.with_gradient():
            raise TrainingLoopError(
                "optimizer.perturbed(mask=mask) computes all gradients of the batch in its block, but .grad contains "
                "gradients of an earlier backward pass: remove that backward pass, or call optimizer.zero_grad()"
            )
        params = self.params()
        if self.is_ready:
            self._carry()
        _clear(params)
        parts = self._parts(params, update, mask, passes)
        try:
            yield parts
        except BaseException:
            parts.close()
            _clear(params)
            self.reset()
            raise
        parts.close()
        if not self.is_ready:
            _clear(params)
            self.reset()
            raise TrainingLoopError(PARTS_LEFT)

    def _parts(self, params: TensorTree, update: Update, mask: Tensor, passes: int) -> Generator[slice | Tensor]:
        """Yield the rows of every request of an update, and answer the request with the gradient in `.grad`."""
        remaining = passes
        context = self._context(len(mask), mask)
        smallest, requests = context.min_fraction, update(params, context)
        answer: TensorTree | None = None
        factor = None
        while True:
            with torch.no_grad():
                try:
                    request = next(requests) if answer is None else requests.send(answer)
                except StopIteration as end:
                    self._finish(params, end.value, factor)
                    return
            if isinstance(request, Average):
                answer = self._average(request.tree)
                fraction = float(answer["fraction"])
                remaining = 1 if fraction < smallest else passes + (fraction <= 1 - smallest)
                continue
            remaining -= 1
            rows = slice(None) if request.rows is None else request.rows
            with ExitStack() as stack:
                if request.at is None:
                    self.records.clear()
                else:
                    stack.enter_context(self._at(params, request.at))
                if not remaining:  # the gradient of the last part is added to the others, whatever they are
                    self._restore_carried()
                yield rows
            has_gradient = self.records.with_gradient() if request.at is None else self.records.has_replayed_gradient
            if not has_gradient:
                raise TrainingLoopError(NO_GRADIENT)
            answer = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in params.items()}
            if request.at is None:
                factor = _nan_unless_finite(answer)
            _clear(params)

    @contextmanager
    def _at(self, params: TensorTree, at: TensorTree | None) -> Iterator[None]:
        """Write perturbed weights; restore weights, buffers, and random states on exit."""
        # Within one autocast context, autocast caches converted weights, also those from before the perturbation.
        torch.clear_autocast_cache()
        try:
            with preserve_module_buffers(self.model), at_params(params, at), self.records.replay():
                yield
        finally:
            torch.clear_autocast_cache()

    def _finish(self, params: TensorTree, descent: TensorTree, factor: Tensor | None) -> None:
        """Put the gradient of the step into `.grad`."""
        with torch.no_grad():
            for name, value in descent.items():
                params[name].grad = value
            if factor is not None:
                torch._foreach_mul_(list(descent.values()), factor)
        self.reset()
        self.is_ready = True

    def _context(self, size: int, mask: Tensor | None = None) -> StepContext:
        lr = float(self.optimizer.param_groups[0].get("lr", 1.0))
        smallest = 0.0 if mask is None else updates.min_fraction(self.model, size, share=1 / self._processes())
        return StepContext(size, lr, lr, mask, smallest)

    def _processes(self) -> int:
        is_ddp = isinstance(self.model, DistributedDataParallel)
        return dist.get_world_size(self.model.process_group) if is_ddp else 1  # type: ignore[arg-type]

    def _average(self, tree: TensorTree) -> TensorTree:
        """Average a tree over the processes of DistributedDataParallel."""
        if not isinstance(self.model, DistributedDataParallel):
            return tree
        sums = tensor_tree.clone(tree)
        for tensor in sums.values():
            dist.all_reduce(tensor, group=self.model.process_group)
        return tensor_tree.scale(sums, 1 / self._processes())


def _collect(params: TensorTree) -> TensorTree:
    return {name: param.grad for name, param in params.items() if param.grad is not None}


def _clear(params: TensorTree) -> None:
    for param in params.values():
        param.grad = None


def _nan_unless_finite(gradient: TensorTree) -> Tensor:
    """Return 1, or NaN if the gradient is not finite, for a GradScaler to skip the step. This does not synchronize."""
    norm = tensor_tree.norm(gradient)
    return torch.where(torch.isfinite(norm), 1.0, torch.nan).to(norm.dtype)
