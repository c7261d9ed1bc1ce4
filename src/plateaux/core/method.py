"""The protocol of a training method: an output function for one member and a loss over all members.

An output function computes something for ONE member. The outputs of all members are gathered to `[R, B, ...]`, and a
loss function maps them to losses `[R, B]`. Methods differ in these functions, in what is gathered, and in the update.

Laws that hold for every method and executor, each with a test in tests/laws:

1. Output functions have no member axis; loss functions accept any number of members and do not depend on their numbers.
2. Gathered outputs carry gradients only in the rows of this process's members; the loss is summed over all rows.
3. Losses and assignments are deterministic functions of outputs, batch, and seed, so that all processes agree.
4. The update of a joint method requests a constant number of gradients.
5. Samples of weight zero may be skipped if samples do not interact in the forward pass; inactive members are skipped.
6. Adding a member does not change the other members, unless the method is joint.
7. An interrupted and resumed run equals an uninterrupted one, bit for bit on one thread.
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
"""Maps the outputs `[R, B, ...]` of ALL members and their batch to losses `[R, B]`."""

ActiveFn = Callable[[int, int], Sequence[int]]
"""Maps the number of members and the seed of the batch to the positions of the members that are active in a step."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What members minimize, and which outputs their loss needs.

    `gather` is the communication pattern: `none`, nothing is gathered; `members`, the outputs of all members for this
    process's samples; `batch`, the outputs of all members for the full batch. `per_sample` states that the loss of a
    batch is the mean of the losses of its samples, so that gradients can be accumulated over parts of a batch.

    `extra_inputs` names extra inputs of a batch that the output function uses too; their outputs follow those of the
    labeled samples: `[R, B + U, ...]`. Members that are not `active` in a step have no forward pass, gradient, weight
    decay, or optimizer update; the loss gets the outputs of the active members only.
    """

    loss: LossFn
    output: OutputFn = logits
    gather: Literal["none", "members", "batch"] = "none"
    per_sample: bool = True
    extra_inputs: tuple[str, ...] = ()
    active: ActiveFn | None = None  # None: all members are active in every step


Rows = slice | Tensor
"""Some samples of a batch: a slice, or their positions."""


@dataclass(frozen=True, slots=True)
class GradRequest:
    """A request of an update for a gradient."""

    at: TensorTree | None = None  # the weights at which the gradient is computed; None: the current weights
    rows: Rows | None = None  # only these samples of the batch; the mean is then over them
    mean_over: int | None = None  # divide the sum by this number instead of the number of samples
    local: bool = False  # the samples of this process only: no average over the data axis


@dataclass(frozen=True, slots=True)
class Average:
    """A request of an update for the average of a tree over the processes of the data axis."""

    tree: TensorTree


@dataclass(frozen=True, slots=True)
class StepContext:
    """The information that an update has about its step."""

    size: int  # samples of the batch in this process
    lr: float  # current learning rate
    peak_lr: float  # learning rate before any schedule
    sam_set: Tensor | None = None  # [B] whether a sample is in the sharpness-aware set; None: before the partition
    min_fraction: float = 1e-9  # a part of the batch below this fraction is empty or too small to be trained on alone


Update = Callable[[TensorTree, StepContext], Generator[GradRequest | Average, TensorTree, TensorTree]]
"""Computes the step of ONE member: a generator that yields requests and returns the direction."""


def plain_gradient(params: TensorTree, context: StepContext) -> Generator[GradRequest, TensorTree, TensorTree]:
    """Return the plain gradient as the direction."""
    gradient = yield GradRequest()
    return gradient


class Scores(Protocol):
    """The scores of all samples by all members, streamed from the run folder and never all in memory."""

    @property
    def members(self) -> int: ...

    @property
    def samples(self) -> int:
        """N: the ids of the training samples are 0 .. N-1."""

    @property
    def seed(self) -> int:
        """The seed of all randomness in an assignment."""

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """Yield scores `[M, b]` in the order of ids, from the start at every call; negative: not a training sample."""


AssignFn = Callable[[Scores], Iterator[NDArray[np.bool_]]]
"""Maps scores to the sharpness-aware sets of all members, as boolean masks `[M, b]` in the order of ids."""


@dataclass(frozen=True, slots=True)
class DataPartition:
    """When and how the training samples are partitioned into sharpness-aware sets."""

    after: tuple[int, ...]  # numbers of completed epochs
    output: OutputFn  # -> [B] scores
    assign: AssignFn
    metadata: Mapping[str, Any] = field(default_factory=dict)  # rule and score, stored with the sets
    prefix_method: Mapping[str, Any] = field(default_factory=dict)  # a method that trains the same up to the partition


@dataclass(frozen=True, slots=True)
class Method:
    """How an ensemble is trained: an objective, an update, and optionally a data partition.

    `member_order` states when a member can start: `parallel`, at any time; `sequential`, after all previous members
    have finished, whose outputs then precede its own in the loss; `chained`, from the final state of the previous one.
    """

    objective: Objective
    update: Update = plain_gradient
    partition: DataPartition | None = None
    member_order: Literal["parallel", "sequential", "chained"] = "parallel"

    @property
    def is_joint(self) -> bool:
        """Whether all members train together, because the loss of each depends on the outputs of the others."""
        return self.objective.gather != "none" and self.member_order == "parallel"
