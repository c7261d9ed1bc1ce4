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

from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from plateaux.core.errors import RecipeError
from plateaux.core.types import Batch, Inputs, Tree, Value

Forward = Callable[[], AbstractContextManager[Any]]
"""Opens the context of one forward pass: its random state and its precision."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one layer saw in one forward pass."""

    inputs: Tensor
    output: Tensor


class View:
    """One member as seen inside an offer: call it, or record what its layers see."""

    def __init__(
        self,
        module: Callable[..., Any],
        *,
        forward: Forward = nullcontext,
        own: Tree | None = None,
        buffers: Tree | None = None,
        bound: Tree | None = None,
        kind: Hashable = None,
    ) -> None:
        self.module = module
        self.forward = forward
        self.own = own or {}  # the member's own weights and buffers: what vmap stacks
        self.buffers = buffers or {}
        self.bound = bound  # tensors that stand in for the module's own: how vmap sees a member
        self.kind = kind  # only members of one kind may be stacked

    def __call__(self, x: Inputs, params: Tree | None = None) -> Tensor:
        """Return the model's output, or its `.logits`; `params` stand in for the member's own weights."""
        stand_in = {**(self.bound or {}), **(params or {})}
        with self.forward():
            if stand_in:
                assert isinstance(self.module, nn.Module)
                out = functional_call(self.module, stand_in, *_arguments(x))
            else:
                args, kwargs = _arguments(x)
                out = self.module(*args, **kwargs)
        return out if isinstance(out, Tensor) else out.logits

    def aside(self, x: Inputs) -> Tensor:
        """Return the output for other samples; buffers, such as BatchNorm's running statistics, do not move."""
        copies = {name: buffer.clone() for name, buffer in self.buffers.items()}
        if not copies:
            return self(x)
        module = getattr(self.module, "_orig_mod", self.module)  # a compiled network has other names for its parts
        return View(module, forward=self.forward, bound={**(self.bound or {}), **copies})(x)

    def record(self, x: Inputs, layers: Sequence[str]) -> tuple[Tensor, Mapping[str, Seen]]:
        """Return the output, and what each named layer saw on the way to it."""
        assert isinstance(self.module, nn.Module)
        seen: dict[str, Seen] = {}

        def watch(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
                seen[name] = Seen(args[0], output)

            return hook

        handles = [self.module.get_submodule(name).register_forward_hook(watch(name)) for name in layers]
        try:
            return self(x), seen
        finally:
            for handle in handles:
                handle.remove()


def _arguments(x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((x,), {}) if isinstance(x, Tensor) else ((), dict(x))


Offer = Callable[[View, Batch], Tensor]
"""What ONE member says about a batch. `offer.batched = False` marks one that cannot run under vmap."""

Settle = Callable[[Tensor, Batch], Tensor]
"""What follows for ALL rows: the table `[R, B, ...]` to losses `[R, B]`."""

Present = Callable[[int, int], Sequence[int]]
"""Who takes part in a step: the number of members and the batch's key to their positions."""


def logits(view: View, batch: Batch) -> Tensor:
    """The model's output for every sample."""
    return view(batch.x)


class NoFeatures(RecipeError):
    """A network without a last layer whose inputs could be taken for features."""


def features(view: View, batch: Batch) -> Tensor:
    """What the last layer sees of every sample, `[B, D]`."""
    return logits_and_features(view, batch)[1]


features.batched = False  # type: ignore[attr-defined]  # hooks do not run inside vmap's functional call


def logits_and_features(view: View, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return both from one forward pass; the last layer is the nn.Linear whose output the network returns."""
    assert isinstance(view.module, nn.Module)
    layers = [name for name, part in view.module.named_modules() if isinstance(part, nn.Linear)]
    out, seen = view.record(batch.x, layers)
    for each in seen.values():
        if same_memory(each.output, out) and each.inputs.ndim == 2:
            return out, each.inputs
    raise NoFeatures(
        f"Features are what the last nn.Linear sees, and this {type(view.module).__name__} does not end in one; "
        "leave out measures of features (cka)"
    )


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors are one."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


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

    settle: Settle
    offer: Offer = logits
    sees: Literal["own", "all", "whole"] = "own"
    samplewise: bool = True
    wants: tuple[str, ...] = ()
    present: Present | None = None  # None: everyone, in every step


Rows = slice | Tensor
"""Some samples of a batch: a run of them, or their positions."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A gradient that an update asks for."""

    at: Tree | None = None  # the weights to take it at; None: where the member stands
    weight: Tensor | None = None  # [B] weight of every sample; None: all one
    part: Rows | None = None  # only these samples of the batch; the mean is then over them
    over: int | None = None  # the mean is over so many samples of the batch held here instead
    keep: bool = False  # the forward pass is kept: another weighting of its losses is asked for next
    again: bool = False  # of the pass that was kept: no new one is run
    local: bool = False  # this worker's samples only: not averaged over the data axis
    agree: Tree | None = None  # no gradient: this tree of mine, averaged over the data axis


@dataclass(frozen=True, slots=True)
class Moment:
    """What an update may know of the step it is in."""

    size: int  # samples of the batch held here
    lr: float  # the optimiser's rate now
    peak_lr: float  # its rate before any schedule
    careful: Tensor | None = None  # [B] bits from the last meeting; None: there was none yet


Update = Callable[[Tree, Moment], Generator[Ask, Tree, Tree]]
"""How gradients become a step, for ONE member: asks for gradients one by one, returns the direction."""


def plain(params: Tree, moment: Moment) -> Generator[Ask, Tree, Tree]:
    """Go where the gradient says."""
    gradient = yield Ask()
    return gradient


class Scores(Protocol):
    """Everyone's scores of every sample, as they lie in the run folder: streamed, never all in memory."""

    @property
    def members(self) -> int: ...

    @property
    def samples(self) -> int:
        """N: ids 0 .. N-1 of the whole training source."""

    @property
    def key(self) -> int:
        """The only randomness a decision may use."""

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """Yield scores `[M, b]` (float32) in the order of ids, anew at every call; below zero: not trained on."""


Decide = Callable[[Scores], Iterator[NDArray[np.bool_]]]
"""What follows from the scores: bits `[M, b]` in the order of ids, row i what member i is to be careful about."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A rare meeting: when, what each brings, and what is decided."""

    after: tuple[int, ...]  # completed epochs at which members meet
    offer: Offer  # -> [B] scores
    decide: Decide
    about: Mapping[str, Any] = field(default_factory=dict)  # rule and scores in plain words: recorded with the notes
    before: Mapping[str, Any] = field(default_factory=dict)  # the method of a recipe that trains the same until then


@dataclass(frozen=True, slots=True)
class Method:
    """How an ensemble is trained: an objective, an update, and maybe a meeting.

    `turn` says when a member may begin: at `any` time; `after` all before it have finished, whose rows then stand
    before its own on its table; `onward` from where the one before it ended.
    """

    objective: Objective
    update: Update = plain
    rendezvous: Rendezvous | None = None
    turn: Literal["any", "after", "onward"] = "any"

    @property
    def together(self) -> bool:
        """Whether members take every step side by side, because each sees what the others say of it."""
        return self.objective.sees != "own" and self.turn == "any"


@dataclass(frozen=True, slots=True)
class Measure:
    """A question about predictions that is answered in one pass, shared with all measures of the same offer.

    `settle` turns the table `[M, B, ...]` and its batch into sums (or rows to keep, `merge="cat"`); `finish` turns the
    merged sums into named numbers. Members are named by their position in the table: the walk knows their numbers.
    """

    settle: Callable[[Tensor, Batch], Tree]
    finish: Callable[[Tree], Mapping[str, Value]]
    offer: Offer = logits
    merge: Literal["sum", "cat"] = "sum"
    better: Literal["higher", "lower", "neither"] = "higher"
    asks: Literal["good", "sure", "different"] = "good"  # how good, how sure, how different the predictions are
    usual: bool = True  # asked for by "all"; not what makes a large table, or is not for every run
    percent: bool = False  # shown in percent
    least: int = 1  # so many members it takes
    convention: str = ""  # what must be known to compare the number with somebody else's


Tell = Callable[[Mapping[str, Any]], None]
"""Takes news of the work under way: plain values by name."""


class CarryOut(Protocol):
    """Carries out one job; can be sent to another process."""

    def __call__(self, job: Any, tell: Tell, *, device: str | None = None, processes: int = 1) -> None: ...


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that did not end well: by its own fault, or because its process died."""

    job: Any
    problem: Exception
    died: bool = False


class Executor(Protocol):
    """Where members live: three verbs and `launch`. Nothing else changes between one process and a mesh."""

    parks: bool  # members rest on disk between their turns
    device: str | None  # where this process works; None: wherever it is told to
    far: bool  # jobs are carried out in other places: they leave records, and one that is lost may live on for a moment

    def rows(self, members: int) -> range:
        """Say which of so many members are held here."""

    def groups(self, kinds: Sequence[Hashable], *, together: bool) -> list[list[int]]:
        """Say which members' rows are computed in one go, by position; equal kinds are equal networks."""

    def each(self, offer: Offer, views: Sequence[View], batches: Sequence[Batch]) -> Tensor:
        """Run the offer for every member given; one row each."""

    def gather(self, rows: Tensor, *, whole: bool = False, alone: bool = False) -> Tensor:
        """Bring everyone's rows: own rows attached, others detached; `alone`, no rows of other members."""

    def average(self, tree: Tree) -> Tree:
        """Add up a tree, already weighted by this copy's share, over the copies that saw other samples."""

    def shard(self, batch: int) -> slice:
        """Say which samples of a batch this copy works on."""

    def agree(self, wish: int) -> int:
        """Return the strongest wish of any process: all get the same answer."""

    def prepare(self, module: nn.Module) -> None:
        """Make a network fit to live here, before its first step."""

    def writes(self) -> bool:
        """Say whether this process writes for the members it holds."""

    def launch(self, jobs: Sequence[Any], carry_out: CarryOut, tell: Tell) -> list[Failure]:
        """Carry out the jobs; executors import nothing above them, so they are given the function."""

    def close(self) -> None:
        """Give back what is held between launches."""


def finite(tensors: Sequence[Tensor]) -> bool:
    """Say whether every entry of every tensor is a number."""
    return not tensors or bool(torch.isfinite(torch.stack(torch._foreach_norm(list(tensors)))).all())
