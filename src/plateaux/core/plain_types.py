"""Estimates and seeds: the part of `core.types` that does not import torch, for code that must start fast."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its standard errors, if there are any.

    `stderr` is due to the finite number of samples, `mc_stderr` to the random numbers of a Monte-Carlo estimate.
    """

    value: float
    stderr: float | None = None
    mc_stderr: float | None = None


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on all parts and their order.

    >>> derive_seed(0, "order", 1) == derive_seed(0, "order", 1) != derive_seed(0, "order", 2)
    True
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
