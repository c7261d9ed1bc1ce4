"""How members meet: an offer is made for one, a settle is taken for all.

Members meet in only one way. Each *offers* something, the offers are laid side by side in a table whose first axis is
the member, and all *settle* what follows. What differs between methods is only how often they meet and what they say.

The laws, each a test over every method and executor (tests/laws):

1. One and all: offers have no member axis; settles accept any number of rows and never ask which members they are.
2. Own row live: a gathered table carries gradients only in the holder's rows, and the loss is summed over all rows.
3. Same decision everywhere: settle and decide are deterministic given table, batch and key.
4. Lockstep: when an objective sees others, its update asks for gradients a fixed number of times.
5. Weight zero may be skipped where the forward treats each sample alone; absent members are skipped always.
6. Adding a member changes no other member, for methods that see only their own row.
7. Interrupted equals uninterrupted, bit for bit on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from plateaux.core.outputs import OutputFn, logits
from plateaux.core.types import Batch, TensorTree

LossFn = Callable[[Tensor, Batch], Tensor]
"""What follows for ALL rows: the table `[R, B, ...]` to losses `[R, B]`."""

ActiveFn = Callable[[int, int], Sequence[int]]
"""Who takes part in a step: the number of members and the batch's key to their positions."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What members minimise, and how far a row must look.

    `sees` is the whole communication pattern in one word: `own`, nothing is gathered; `all`, every member on this
    rank's share of the batch; `whole`, every member and the whole batch. `samplewise` says that the loss of a batch is
    the mean of its samples' losses, so that a batch may be worked through in pieces.

    `wants` names the extras of a batch that the offer speaks of too, their rows after those of the labelled samples:
    the table is then `[R, B + U, ...]`. Members that are not `present` in a step are left alone: no forward, no
    gradient, no decay, no moments; the settle sees the rows of the others only.
    """

    loss: LossFn
    output: OutputFn = logits
    gather: Literal["none", "members", "batch"] = "none"
    per_sample: bool = True
    extra_inputs: tuple[str, ...] = ()
    active: ActiveFn | None = None  # None: everyone, in every step


Rows = slice | Tensor
"""Some samples of a batch: a run of them, or their positions."""


@dataclass(frozen=True, slots=True)
class GradRequest:
    """A gradient that an update asks for."""

    at: TensorTree | None = None  # the weights to take it at; None: where the member stands
    weight: Tensor | None = None  # [B] weight of every sample; None: all one
    rows: Rows | None = None  # only these samples of the batch; the mean is then over them
    mean_over: int | None = None  # the mean is over so many samples of the batch held here instead
    keep_graph: bool = False  # the forward pass is kept: another weighting of its losses is asked for next
    reuse_graph: bool = False  # of the pass that was kept: no new one is run
    local: bool = False  # this worker's samples only: not averaged over the data axis
    average: TensorTree | None = None  # no gradient: this tree of mine, averaged over the data axis


@dataclass(frozen=True, slots=True)
class StepContext:
    """What an update may know of the step it is in."""

    size: int  # samples of the batch held here
    lr: float  # the optimiser's rate now
    peak_lr: float  # its rate before any schedule
    sam_set: Tensor | None = None  # [B] bits from the last meeting; None: there was none yet


Update = Callable[[TensorTree, StepContext], Generator[GradRequest, TensorTree, TensorTree]]
"""How gradients become a step, for ONE member: asks for gradients one by one, returns the direction."""


def plain_gradient(params: TensorTree, context: StepContext) -> Generator[GradRequest, TensorTree, TensorTree]:
    """Go where the gradient says."""
    gradient = yield GradRequest()
    return gradient


class Scores(Protocol):
    """Everyone's scores of every sample, as they lie in the run folder: streamed, never all in memory."""

    @property
    def members(self) -> int: ...

    @property
    def samples(self) -> int:
        """N: ids 0 .. N-1 of the whole training source."""

    @property
    def seed(self) -> int:
        """The only randomness a decision may use."""

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """Yield scores `[M, b]` (float32) in the order of ids, anew at every call; below zero: not trained on."""


AssignFn = Callable[[Scores], Iterator[NDArray[np.bool_]]]
"""What follows from the scores: bits `[M, b]` in the order of ids, row i what member i is to be careful about."""


@dataclass(frozen=True, slots=True)
class DataPartition:
    """A rare meeting: when, what each brings, and what is decided."""

    after: tuple[int, ...]  # completed epochs at which members meet
    output: OutputFn  # -> [B] scores
    assign: AssignFn
    metadata: Mapping[str, Any] = field(default_factory=dict)  # rule and scores in plain words: recorded with the notes
    prefix_method: Mapping[str, Any] = field(
        default_factory=dict
    )  # the method of a recipe that trains the same until then


@dataclass(frozen=True, slots=True)
class Method:
    """How an ensemble is trained: an objective, an update, and maybe a meeting.

    `turn` says when a member may begin: at `any` time; `after` all before it have finished, whose rows then stand
    before its own on its table; `onward` from where the one before it ended.
    """

    objective: Objective
    update: Update = plain_gradient
    partition: DataPartition | None = None
    member_order: Literal["parallel", "sequential", "chained"] = "parallel"

    @property
    def is_joint(self) -> bool:
        """Whether members take every step side by side, because each sees what the others say of it."""
        return self.objective.gather != "none" and self.member_order == "parallel"
