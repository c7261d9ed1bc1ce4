"""Names in weights files: select a prefix, rename, and compare with the names of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from torch import Tensor

from plateaux.core.errors import RecipeError, suggest

WRAPPERS = ("module.", "_orig_mod.")  # prefixes added by DataParallel and torch.compile
COUNTER = "num_batches_tracked"  # of BatchNorm; files often omit it, and torch then resets it

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class NameComparison:
    """How the names and shapes of a file differ from those of a model."""

    missing: list[str]
    unexpected: list[str]
    mismatched: dict[str, str]  # the name with both shapes, by name
    num_matching: int

    @property
    def is_equal(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched) and self.num_matching > 0

    def describe(self, file: str | Path) -> str:
        """Return sentences on what differs, with the closest names."""
        lines = [f"{str(file)!r} does not match the model."]
        if self.missing:
            lines.append(f"{len(self.missing)} weights are missing: {_first_three(self.missing)}.")
        if self.unexpected:
            hint = suggest(self.unexpected[0], self.missing)
            more = f" ({self.unexpected[0]}: {hint})" if hint.startswith("did") else ""
            lines.append(f"{len(self.unexpected)} are not in the model: {_first_three(self.unexpected)}{more}.")
        if self.mismatched:
            shapes = list(self.mismatched.values())
            lines.append(f"{len(shapes)} have another shape or kind of numbers: {_first_three(shapes)}.")
        return " ".join(lines)


def compare_names(weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> NameComparison:
    """Compare the weights of a file with the state dict of a model."""
    missing = [name for name in state if name not in weights and not name.endswith(COUNTER)]
    unexpected = [name for name in weights if name not in state]
    mismatched = {
        name: f"{name} ({_describe(weights[name])} in the file, {_describe(state[name])} in the model)"
        for name in weights
        if name in state and _describe(weights[name]) != _describe(state[name]) and not name.endswith(COUNTER)
    }
    return NameComparison(missing, unexpected, mismatched, len(weights) - len(unexpected) - len(mismatched))


def suggest_renaming(
    found: NameComparison, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> tuple[str, str] | None:
    """Return a start of names in the file and in the model that probably mean the same; None: there is none.

    The last parts of the names and the shapes are equal.
    """
    for name in found.missing:
        end = name.rpartition(".")[2]
        others = [other for other in found.unexpected if other.rpartition(".")[2] == end]
        others = [other for other in others if weights[other].shape == state[name].shape]
        if others:
            return _without_common_end(next(iter(get_close_matches(name, others, n=1, cutoff=0.0))), name)
    return None


def select_prefix(weights: Weights, prefix: str, file: str | Path) -> Weights:
    """Return the weights under a prefix, without the prefix and without those that wrappers of a module add."""
    for wrapper in WRAPPERS:
        if weights and all(name.startswith(wrapper) for name in weights):
            weights = {name.removeprefix(wrapper): tensor for name, tensor in weights.items()}
    if not prefix:
        return weights
    start = prefix.removesuffix(".") + "."
    selected = {name.removeprefix(start): tensor for name, tensor in weights.items() if name.startswith(start)}
    if not selected:
        roots = {".".join(name.split(".")[: start.count(".")]) for name in weights}
        raise RecipeError(f"{str(file)!r} has no weights under {prefix!r}; {suggest(prefix.removesuffix('.'), roots)}")
    return selected


def find_prefixes(weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """Return the prefixes under which a file contains all weights of a model, with their shapes."""
    required = [name for name in state if not name.endswith(COUNTER)]
    if not required:
        return []
    ends = [name.removesuffix(required[0]) for name in weights if name.endswith(required[0])]
    prefixes = sorted(prefix for prefix in ends if prefix == "" or prefix.endswith("."))
    return [prefix for prefix in prefixes if all(_has(weights, prefix + name, state[name]) for name in required)]


def rename(weights: Weights, names: Mapping[str, str | None], file: str | Path) -> Weights:
    """Replace the start of names, the longest first; None removes the entries.

    >>> list(rename({"fc.weight": None, "loss.weight": None}, {"fc.": "head.", "loss.": None}, "a.pt"))
    ['head.weight']
    """
    unused = set(names)
    renamed: Weights = {}
    for name, tensor in weights.items():
        old = max((start for start in names if name.startswith(start)), key=len, default=None)
        unused.discard(old or "")
        new = name if old is None else None if (start := names[old]) is None else start + name.removeprefix(old)
        if new is None:
            continue
        if new in renamed:
            raise RecipeError(
                f"{str(file)!r}: two weights have the name {new!r} after renaming. Rename only one of them."
            )
        renamed[new] = tensor
    if unused:
        starts = {name.rpartition(".")[0] + "." for name in weights}
        name = min(unused)
        raise RecipeError(f"{str(file)!r} has no weights that start with {name!r}; {suggest(name, starts)}")
    return renamed


def _has(weights: Mapping[str, Tensor], name: str, tensor: Tensor) -> bool:
    return name in weights and weights[name].shape == tensor.shape


def _without_common_end(a: str, b: str) -> tuple[str, str]:
    """Return two names without the parts that both end with; a name is left with its last dot."""
    first, second = a.split("."), b.split(".")
    while len(first) > 1 and len(second) > 1 and first[-1] == second[-1]:
        first, second = first[:-1], second[:-1]
    return ".".join(first) + ".", ".".join(second) + "."


def _first_three(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _describe(tensor: Tensor) -> str:
    """Return the shape, and the kind of numbers if it is not the usual one: a conversion would lose information."""
    kind = "" if tensor.is_floating_point() else " complex" if tensor.is_complex() else " integer"
    return (" x ".join(map(str, tensor.shape)) or "scalar") + kind
