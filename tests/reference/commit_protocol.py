"""All interleavings of several writers of one member, in a model where every request is one atomic step.

A writer reads the progress and its version, lists the objects, claims the member by replacing the progress, deletes the
listed objects that the progress does not name, and then repeats: upload an object, replace the progress by one that
names it, delete what that released. A writer may stop at any step for any time, or for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

Objects = frozenset[str]


@dataclass(frozen=True)
class Rules:
    """What the writers do; the default is the protocol of `plateaux.storage.member_writer`."""

    lists_before_claim: bool = True
    unique_names: bool = True  # of the objects of each writer
    conditional_commit: bool = True  # the progress is replaced only if it has the version that was read
    claims: bool = True


@dataclass(frozen=True)
class Writer:
    """Where a writer is, and what it knows."""

    step: str = "read"
    count: int = 0  # commits that it knows of
    version: int = -1
    named: Objects = frozenset()
    listed: Objects = frozenset()
    doomed: tuple[str, ...] = ()  # still to be deleted


@dataclass(frozen=True)
class State:
    """The store and all writers."""

    objects: Objects
    version: int
    named: Objects
    writers: tuple[Writer, ...]


def explore(writers: int, commits: int, rules: Rules = Rules()) -> tuple[int, State | None]:
    """Return the number of reachable states, and one in which the progress names a missing object, if there is any."""
    start = State(frozenset(), 0, frozenset(), (Writer(),) * writers)
    seen, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        if not state.named <= state.objects:
            return len(seen), state
        for number, writer in enumerate(state.writers):
            after = advance(state, number, writer, commits, rules)
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
    return len(seen), None


def advance(state: State, number: int, writer: Writer, commits: int, rules: Rules) -> State | None:
    """Return the state after the next request of one writer; None: it has ended."""

    def go(step: str, *, to: State = state, **changes: object) -> State:
        changed = replace(writer, step=step, **changes)
        return replace(to, writers=(*state.writers[:number], changed, *state.writers[number + 1 :]))

    doomed = tuple(sorted(writer.listed - writer.named))
    match writer.step:
        case "read":
            count = max((int(name.split("-")[1]) for name in state.named), default=0)
            first = "upload" if not rules.claims else "list" if rules.lists_before_claim else "claim"
            return go(first, count=count, version=state.version, named=state.named)
        case "list":
            step = "claim" if rules.lists_before_claim else "collect"
            return go(step, listed=state.objects, doomed=tuple(sorted(state.objects - writer.named)))
        case "claim":
            if state.version != writer.version:
                return go("stopped")
            claimed = replace(state, version=state.version + 1, named=writer.named)
            step = "collect" if rules.lists_before_claim else "list"
            return go(step, to=claimed, version=state.version + 1, listed=frozenset(), doomed=doomed)
        case "collect":
            if not writer.doomed:
                return go("upload")
            return go(
                "collect", to=replace(state, objects=state.objects - {writer.doomed[0]}), doomed=writer.doomed[1:]
            )
        case "upload" if writer.count < commits:
            name = object_name(number, writer.count + 1, rules)
            return go("commit", to=replace(state, objects=state.objects | {name}), count=writer.count + 1)
        case "commit":
            if rules.conditional_commit and state.version != writer.version:
                return go("stopped")
            named = frozenset({object_name(number, writer.count, rules)})
            released = (writer.named if rules.unique_names else state.objects) - named
            committed = replace(state, version=state.version + 1, named=named)
            return go("collect", to=committed, version=state.version + 1, named=named, doomed=tuple(sorted(released)))
    return None


def object_name(writer: int, count: int, rules: Rules) -> str:
    return f"{writer if rules.unique_names else 'any'}-{count}"
