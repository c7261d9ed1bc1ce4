"""One training step: members' updates ask for gradients, the executor answers, the optimisers move.

Updates are generators, one a member. All members of a group are driven in lockstep: everyone's current ask is answered
before anyone asks again, so that a joint objective sees every member at the place it asked about. Members that are
absent from a step are not touched; a process that holds only such members is there when the others gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from plateaux.core import tensor_tree
from plateaux.core.errors import RecipeError
from plateaux.core.executor import Executor
from plateaux.core.member import MemberModule
from plateaux.core.method import GradRequest, Objective, Rows, StepContext
from plateaux.core.runtime import autocast, fork_rng
from plateaux.core.types import Batch, TensorTree, derive_seed
from plateaux.distributed.sync_batchnorm import SyncedBatchNorm
from plateaux.optim.sam import trace_requests
from plateaux.training.state import INACTIVE, StepOptions, StepStats, TrainState, at_params, preserve_buffers


def step(
    executor: Executor,
    states: Sequence[TrainState],
    batches: Sequence[Batch],
    options: StepOptions,
    *,
    share: float = 1.0,
) -> list[StepStats]:
    """Move every learner that is present by one step on its batch; `share` is what part of it is worked on here."""
    objective = states[0].method.objective
    joint = objective.gather != "none"
    here, first = _active_members(executor, objective, options.members or len(states), batches[0].seed, len(states))
    tallies = [INACTIVE] * len(states)
    for group in executor.groups([states[i].architecture for i in here], is_joint=joint) if here else []:
        taking_part = [here[i] for i in group]
        for i in taking_part:
            states[i].sync_lr()
        rounds = StepRunner(
            executor, [states[i] for i in taking_part], [batches[i] for i in taking_part], options, share, first
        )
        for i, tally in zip(taking_part, rounds.drive(), strict=True):
            tallies[i] = tally
    if joint and not here and first is not None:
        StepRunner(executor, states[:1], batches[:1], options, share).attend()
    for pace in options.shared_lr_schedulers:
        if pace.every_step:
            pace.step()
    return tallies


def _active_members(
    executor: Executor, objective: Objective, members: int, step: int, held: int
) -> tuple[Sequence[int], int | None]:
    """Return which of the learners held here take part, and how many rows others lay on the table before theirs.

    Without a number everyone takes part, or nobody at all.
    """
    if objective.active is None:
        return range(held), None
    chosen = sorted(set(objective.active(members, step)))
    if chosen and not 0 <= chosen[0] <= chosen[-1] < members:
        raise RecipeError(f"the objective has members {chosen} take part in a step; there are 0 to {members - 1}")
    mine = executor.local_members(members)
    before = sum(position < mine.start for position in chosen)
    return [position - mine.start for position in chosen if position in mine], before if chosen else None


@dataclass(frozen=True, slots=True)
class _ForwardResult:
    """One piece of a batch after its forward pass."""

    piece: slice | None
    batches: list[Batch]
    losses: Tensor  # [R, B]
    held: Tensor  # the rows of the table held here
    mine: list[int]  # which rows of the losses these are


@dataclass(slots=True)
class StepRunner:
    """The asks of one group, answered round by round."""

    executor: Executor
    states: Sequence[TrainState]
    batches: Sequence[Batch]
    options: StepOptions
    share: float
    first: int | None = None  # which row of the table is the first of ours, where not everyone takes part
    kept: dict[tuple[int, ...], list[_ForwardResult]] = field(
        default_factory=dict
    )  # passes whose losses are asked for again

    def drive(self) -> list[StepStats]:
        """Run every member's update to its end and take the steps."""
        everyone = range(len(self.states))
        in_turn = self.executor.offloads and len(self.states) > 1
        walks = [learner.method.update(learner.params, self._moment(i)) for i, learner in enumerate(self.states)]
        asks: dict[int, GradRequest] = {}
        tallies: dict[int, StepStats] = {}
        for i in everyone:
            with self.options.resident(self.states[i]), torch.no_grad():
                asks[i] = next(walks[i])
        while asks:
            rows = self._fill(asks) if in_turn else None
            following: dict[int, GradRequest] = {}
            for turn in [[i] for i in asks] if in_turn else self._turns(asks):
                with ExitStack() as awake:
                    for i in turn:
                        awake.enter_context(self.options.resident(self.states[i]))
                    answers, seen = self._answer(turn, asks, rows)
                    for i, answer, tally in zip(turn, answers, seen, strict=True):
                        self._note(tallies, i, asks[i], tally)
                        try:
                            with torch.no_grad():
                                following[i] = walks[i].send(answer)
                        except StopIteration as end:
                            self.states[i].apply_gradient(end.value)
            if self._joint and following and len(following) < len(asks):
                raise RecipeError(_OUT_OF_STEP)
            asks = following
        return [tallies[i] for i in everyone]

    def _turns(self, asks: dict[int, GradRequest]) -> list[list[int]]:
        """Return which asks are answered in one go: all that members who see each other have, else those alike."""
        if self._joint:
            return [list(asks)]
        alike: dict[Any, list[int]] = {}
        for i, ask in asks.items():
            part: Any = ask.rows
            if isinstance(part, Tensor):
                part = i  # chosen samples are this member's own: nobody else has as many
            elif part is not None:
                part = part.start, part.stop
            alike.setdefault((part, ask.average is None, ask.keep_graph, ask.reuse_graph), []).append(i)
        return list(alike.values())

    def _note(self, tallies: dict[int, StepStats], i: int, ask: GradRequest, tally: StepStats) -> None:
        """Remember what was seen where the member stands: of the batch once, or of its parts one by one."""
        if ask.at is not None or ask.average is not None or (i in tallies and ask.rows is None):
            return
        size = len(self.batches[i])
        share = 1.0 if ask.rows is None else _count(ask.rows, size) / max(size, 1)
        tallies.setdefault(i, StepStats(torch.zeros(()), None)).join(tally, share)

    def _moment(self, i: int) -> StepContext:
        learner = self.states[i]
        careful = None if learner.sam_set is None else learner.sam_set(self.batches[i].index)
        rate = float(learner.optimizer.param_groups[0]["lr"])
        return StepContext(len(self.batches[i]), rate, learner.peak_lr, careful)

    def _answer(
        self, turn: list[int], asks: dict[int, GradRequest], rows: list[Tensor] | None
    ) -> tuple[list[TensorTree], list[StepStats]]:
        first = asks[turn[0]]
        if first.average is not None:
            trees_of = [asks[i].average or {} for i in turn]
            return [self.executor.all_reduce(tensor_tree.scale(tree, self.share)) for tree in trees_of], [
                _NOTHING
            ] * len(turn)
        learners = [self.states[i] for i in turn]
        if isinstance(first.rows, slice) and self._sharded:
            _refuse_parts(learners[0].module)
        batches = [_part(self.batches[i], asks[i]) for i in turn]
        with ExitStack() as places:
            for learner, i in zip(learners, turn, strict=True):
                places.enter_context(at_params(learner, asks[i].at))
            tallies = self._backward(turn, learners, batches, asks, rows)
        return [self._collect(learner, asks[i]) for learner, i in zip(learners, turn, strict=True)], tallies

    def _backward(
        self,
        turn: list[int],
        learners: list[TrainState],
        batches: list[Batch],
        asks: dict[int, GradRequest],
        rows: list[Tensor] | None,
    ) -> list[StepStats]:
        """Fill `.grad` of every learner with the gradient of its mean loss; return what was seen.

        The loss is weighted by this copy's share before its gradient is taken: BatchNorm over all copies carries
        everyone's gradients to everyone, so they must be of one loss.
        """
        sizes = [asks[i].mean_over or max(len(batch), 1) for i, batch in zip(turn, batches, strict=True)]
        tallies = [StepStats(torch.zeros(()), None) for _ in turn]
        shares = [1.0 if asks[i].local else self.share for i in turn]
        first = asks[turn[0]]
        passes = self.kept.pop(tuple(turn)) if first.reuse_graph else self._forward(turn, learners, batches, rows)
        for passed in passes:
            if self._joint:  # every row counts once, whoever holds it
                # A share without labelled samples may have unlabelled ones: what is settled whole is divided by all.
                whole = self._objective.gather == "batch" and passed.piece is None and not first.local
                size, part = (passed.losses.shape[1], 1.0) if whole else (sizes[0], shares[0])
                total = passed.losses.sum() / size * part
            else:
                scaled = (
                    _weighted(passed.losses[row], asks[i], passed.piece).sum()
                    / sizes[row]
                    * (learners[row].factor * shares[row])
                    for row, i in enumerate(turn)
                )
                total = torch.stack(list(scaled)).sum() if len(turn) > 1 else next(scaled)
            total.backward(retain_graph=first.keep_graph)  # type: ignore[no-untyped-call]
            if first.keep_graph:
                self.kept.setdefault(tuple(turn), []).append(passed)
            for row, tally in enumerate(tallies):
                small = passed.batches[row]
                share = len(small) / max(len(batches[row]), 1)
                labelled = (
                    passed.held[row].detach()[: len(small)]
                    if self._objective.extra_inputs
                    else passed.held[row].detach()
                )
                tally.add(passed.losses[passed.mine[row]].detach(), labelled, small, share)
        return tallies

    def _forward(
        self, turn: list[int], learners: list[TrainState], batches: list[Batch], rows: list[Tensor] | None
    ) -> Iterator[_ForwardResult]:
        """Run the batch forward, piece by piece: the next one only when this one has gone back."""
        for number, piece in enumerate(self._pieces(len(batches[0]))):
            small = [_cut(batch, piece) for batch in batches]
            yield _ForwardResult(
                piece, small, *self._losses(turn, learners, small, rows[number] if rows is not None else None)
            )

    def _losses(
        self, turn: list[int], learners: list[TrainState], batches: list[Batch], rows: Tensor | None
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Return losses `[R, B]`, the rows of the table held here, and which rows of the losses these are."""
        objective = self._objective
        views = [self._view(learner, batch) for learner, batch in zip(learners, batches, strict=True)]
        held = self.executor.map_members(objective.output, views, batches)
        if held.dtype in (torch.bfloat16, torch.float16):
            held = held.float()  # three digits are enough for a layer, not for what all of them add up to
        if not self._joint:
            settled = [
                learner.method.objective.loss(held[row : row + 1], batches[row]) for row, learner in enumerate(learners)
            ]
            return torch.cat(settled), held, list(range(len(turn)))
        if rows is not None:
            table, batch, start = torch.cat([rows[: turn[0]], held, rows[turn[0] + 1 :]]), batches[0], turn[0]
        elif self.options.frozen_outputs is not None:
            earlier = self.options.frozen_outputs(batches[0]).to(held.dtype)
            table, batch = self._laid_out(torch.cat([earlier, held]), batches[0])
            start = len(earlier)
        else:
            table, batch = self._laid_out(held, batches[0])
            start = self.executor.local_members(len(table)).start if self.first is None else self.first
        return objective.loss(table, batch), held, list(range(start, start + len(turn)))

    def _laid_out(self, held: Tensor | None, batch: Batch) -> tuple[Tensor, Batch]:
        """Return everyone's rows, those of labelled samples first, and the batch they are about; None: we have none."""
        whole = self._objective.gather == "batch"
        parts = [torch.empty(0, device=self.options.device) if held is None else held]
        if whole and self._objective.extra_inputs and self._sharded:
            size = len(batch)
            parts = parts * 2 if held is None else [held[:, :size], held[:, size:]]
        gathered = [
            self.executor.all_gather(part, batch=whole, own_member_only=self.options.is_independent) for part in parts
        ]
        return torch.cat(gathered, 1) if len(gathered) > 1 else gathered[0], self._whole(batch) if whole else batch

    def attend(self) -> None:
        """Be there whenever the others lay out their rows: of the members held here none takes part."""
        for ask in trace_requests(self.states[0].method.update, len(self.batches[0])):
            if ask.average is None and not ask.reuse_graph:
                batch = _part(self.batches[0], ask)
                for piece in self._pieces(len(batch)):
                    self._laid_out(None, _cut(batch, piece))

    @property
    def _objective(self) -> Objective:
        return self.states[0].method.objective

    @property
    def _joint(self) -> bool:
        return self._objective.gather != "none"

    @property
    def _sharded(self) -> bool:
        """Say whether other copies of these members work on other samples."""
        return self.executor.is_sharded

    def _pieces(self, size: int) -> list[slice | None]:
        """Cut a batch for accumulation; copies that share one cut equally often, for they may meet in every forward."""
        count = self.options.gradient_accumulation_steps
        if count == 1 or (size <= 1 and not self._sharded):
            return [None]
        edge = -(-size // count)
        cuts: list[slice | None] = [slice(min(i * edge, size), min((i + 1) * edge, size)) for i in range(count)]
        return cuts if self._sharded else [cut for cut in cuts if cut and cut.start < cut.stop]

    def _whole(self, batch: Batch) -> Batch:
        """Return the batch with everyone's labels and ids; inputs stay this copy's own."""

        def gather_batch(values: Tensor) -> Tensor:
            return self.executor.all_gather(values[None], batch=True, own_member_only=self.options.is_independent)[0]

        return replace(batch, y=gather_batch(batch.y), index=gather_batch(batch.index))

    @torch.no_grad()
    def _fill(self, asks: dict[int, GradRequest]) -> list[Tensor] | None:
        """Return everyone's rows of every piece without gradients: filling the table moves no buffers."""
        if next(iter(asks.values())).average is not None:
            return None
        tables: list[list[Tensor]] = []
        for i, ask in asks.items():
            learner = self.states[i]
            batch = _part(self.batches[i], ask)
            small = [_cut(batch, piece) for piece in self._pieces(len(batch))]
            offer = learner.method.objective.output
            with self.options.resident(learner), at_params(learner, ask.at), preserve_buffers(learner.buffers):
                tables.append([self.executor.map_members(offer, [self._view(learner, each)], [each]) for each in small])
        return [torch.cat(rows) for rows in zip(*tables, strict=True)]

    def _view(self, learner: TrainState, batch: Batch) -> MemberModule:
        # Processes that share a batch must not all drop the same units. The offset is part of a seed: do not change it.
        offset = (self.executor.data_rank << 20) // self.executor.data_size
        seed = derive_seed(batch.seed, "forward", learner.number, *([offset] if offset else []))

        def forward() -> AbstractContextManager[Any]:
            return _forward(seed, self.options)

        return MemberModule(
            learner.call or learner.module,
            forward=forward,
            own=learner.params,
            buffers=learner.buffers,
            kind=learner.architecture,
        )

    def _collect(self, learner: TrainState, ask: GradRequest) -> TensorTree:
        gradient: TensorTree = {}
        for name, param in learner.params.items():
            gradient[name] = param.grad if param.grad is not None else torch.zeros_like(param)
            param.grad = None
        for name, mask in learner.masks.items():
            gradient[name].mul_(mask)
        if learner.scaler is not None:
            gradient = tensor_tree.scale(gradient, 1.0 / learner.scaler.factor)
        return gradient if ask.local else self.executor.all_reduce(gradient)


@contextmanager
def _forward(seed: int, way: StepOptions) -> Iterator[None]:
    with fork_rng(seed, way.device), autocast(way.precision, way.device):
        yield


_NOTHING = StepStats(torch.zeros(()), None)
_OUT_OF_STEP = (
    "Members that see each other must ask for gradients equally often, but some have ended and others go on; "
    "a radius of zero asks once, any other twice: give every member a radius above zero, or all of them zero"
)


def _part(batch: Batch, ask: GradRequest) -> Batch:
    return _cut(batch, ask.rows)


def _cut(batch: Batch, rows: Rows | None) -> Batch:
    """Return some samples of a batch, with a key of their own: parts must not all drop the same units."""
    if rows is None:
        return batch
    start = rows.start if isinstance(rows, slice) else int(rows[0]) if len(rows) else 0
    return replace(batch.take(rows), seed=derive_seed(batch.seed, "from", start) if start else batch.seed)


def _count(rows: Rows, size: int) -> int:
    return len(range(size)[rows]) if isinstance(rows, slice) else len(rows)


def _weighted(losses: Tensor, ask: GradRequest, piece: slice | None) -> Tensor:
    if ask.weight is None:
        return losses
    weight = ask.weight if ask.rows is None else ask.weight[ask.rows]
    return losses * (weight if piece is None else weight[piece])


def _refuse_parts(module: nn.Module) -> None:
    if any(isinstance(layer, SyncedBatchNorm) for layer in module.modules()):
        raise RecipeError(
            "Groups of samples that climb on their own (method.m) cannot share BatchNorm's statistics on a data axis; "
            "set executor.sync_batchnorm=false, executor.data_parallel = 1, or leave out method.m"
        )
