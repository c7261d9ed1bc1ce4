"""Reference moments of real Wishart matrices and phi in exact fractions."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from math import comb


@cache
def traces(powers: tuple[int, ...], n: int, d: int) -> Fraction:
    """Return E[tr W^p1 tr W^p2 ...] for W = A^T A, A of n rows and d columns with entries N(0, 1/d).

    One factor is taken off by Stein's lemma, E[A_ij f(A)] = (1/d) E[df/dA_ij].
    """
    if not powers:
        return Fraction(1)
    m, rest = powers[0], powers[1:]
    if m == 0:
        return d * traces(rest, n, d)

    def after(*more: int, without: int | None = None) -> Fraction:
        left = [power for at, power in enumerate(rest) if at != without]
        return traces(tuple(sorted([*more, *left], reverse=True)), n, d)

    total = (n + m - 1) * after(m - 1)
    total += sum((after(a, m - 1 - a) for a in range(1, m)), Fraction(0))
    total += sum((2 * power * after(m + power - 1, without=at) for at, power in enumerate(rest)), Fraction(0))
    return total / d


def coefficients(i: int, j: int, eta: Fraction, rho: Fraction) -> list[Fraction]:
    """Return those of (1 - eta x - eta rho x^2)^i x^j, the constant first."""
    found = [Fraction(1)]
    for _ in range(i):
        longer = [Fraction(0)] * (len(found) + 2)
        for at, value in enumerate(found):
            longer[at] += value
            longer[at + 1] -= eta * value
            longer[at + 2] -= eta * rho * value
        found = longer
    return [Fraction(0)] * j + found


def narayana(m: int, r: Fraction) -> Fraction:
    """Return the m-th moment of the Marchenko-Pastur law."""
    if m == 0:
        return Fraction(1)
    return sum((Fraction(comb(m - 1, k - 1) * comb(m, k - 1), k) * r**k for k in range(1, m + 1)), Fraction(0))


def leading_phi(i: int, j: int, *, r: float, eta: float, rho: float) -> Fraction:
    """Return phi(i, j) to leading order."""
    terms = enumerate(coefficients(i, j, Fraction(eta), Fraction(rho)))
    return sum((value * narayana(m, Fraction(r)) for m, value in terms), Fraction(0))


def exact_phi(i: int, j: int, *, n: int, d: int, eta: float, rho: float) -> Fraction:
    """Return phi(i, j) at finite size."""
    terms = enumerate(coefficients(i, j, Fraction(eta), Fraction(rho)))
    return sum((value * traces((m,), n, d) / d for m, value in terms), Fraction(0))
