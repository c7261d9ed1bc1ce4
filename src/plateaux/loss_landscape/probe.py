"""The contract of a probe, and probes by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from plateaux.config.specs import build_all, build_one
from plateaux.core import registry
from plateaux.core.types import Estimate
from plateaux.loss_landscape.loss_surface import LossSurface


@dataclass(frozen=True, slots=True)
class Probe:
    """A question about one member's landscape.

    `ask` returns numbers by name: "" is the answer itself, others stand beside it (`layer conv1`, `largest`). A
    Value's `error` is that of the sample of data, its `draws` that of the random directions drawn. `passes` says what
    asking costs on so many samples: forward-and-backward passes of one sample each, a Hessian-vector product counting
    four, a forward pass alone a third.
    """

    run: Callable[[LossSurface], Mapping[str, Estimate]]
    passes: Callable[[int], float]
    samples: int = 1024  # it asks for so many unless told otherwise
    scale_invariant: Literal["same", "moves"] = "moves"  # what becomes of it when neighbouring layers are rescaled
    higher_is_better: bool | None = False
    default: bool = True  # asked where nothing is named
    definition: str = ""  # what must be known to compare the number with somebody else's


def get_probes(words: Sequence[str], *, trust: tuple[str, ...] = ()) -> dict[str, Probe]:
    """Return probes by name; `all` stands for the usual ones."""
    found: dict[str, Probe] = {}
    for word in words:
        if word == "all":
            found |= {name: made for name, made in build_all(registry.probe).items() if made.default}
        else:
            found[word] = build_one(word, registry.probe, Probe, trust)
    return found
