"""The definition of a probe, and the lookup of probes by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from plateaux.config.specs import build_all, build_one
from plateaux.core import registry
from plateaux.core.types import Estimate
from plateaux.loss_landscape.loss_surface import LossSurface


@dataclass(frozen=True, slots=True)
class Probe:
    """A measure of the loss landscape around one member.

    `run` returns estimates by name: "" is the main value; other names are additional values (`layer conv1`,
    `largest`). The `stderr` of an `Estimate` is the standard error from the sample of data, and its `mc_stderr` is the
    Monte Carlo standard error from random draws. `passes` returns the cost for a number of samples, in
    forward-and-backward passes of one sample: a Hessian-vector product counts four, a forward pass alone one third.
    """

    run: Callable[[LossSurface], Mapping[str, Estimate]]
    passes: Callable[[int], float]
    samples: int = 1024  # unless the caller sets a limit
    scale_invariant: bool = (
        False  # unchanged if adjacent layers are rescaled and the network computes the same function
    )
    higher_is_better: bool | None = False
    default: bool = True  # part of `all`
    definition: str = ""  # the conventions needed to compare the value with other implementations


def get_probes(specs: Sequence[str], *, trust: tuple[str, ...] = ()) -> dict[str, Probe]:
    """Return probes by name, such as `worst_l2(steps=50)`; `all` stands for every probe with `default=True`."""
    probes: dict[str, Probe] = {}
    for spec in specs:
        if spec == "all":
            probes |= {name: probe for name, probe in build_all(registry.probe).items() if probe.default}
        else:
            probes[spec] = build_one(spec, registry.probe, Probe, trust)
    return probes
