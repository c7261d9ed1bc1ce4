# A record, not run at HEAD. A part of the scripts of commit 2683183843f3: `git checkout 2683183843f3`, studies/_joint_results.py.
"""What the study of joint methods says: its numbers in tables, the comparisons, and the evidence for claim 9.

Everything here is computed from the numbers alone, so that the tables need no runs. `choose` selects lambda and the
method for BMA on held-out images, which no method was trained on and on which nothing else is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plateaux.core.stats.intervals import Interval, paired_t_interval, t_interval
from plateaux.studies.claims.claim import Case, Evidence
from plateaux.studies.claims.contrasts import mean_with_interval

LAMBDAS = (0.0, 0.1, 1.0, 3.0, 10.0)  # the paper's; `diversity_weight` is half of it
BASE = "deep ensemble"
PAPERS = "SED 0.1"
SED = tuple(f"SED {lam:g}" for lam in LAMBDAS)
USE_UNLABELED = ("A2D", "DivDis")  # trained with images of a set that is to be detected
NAMES = (BASE, "diverse hyper-parameters", *USE_UNLABELED, *SED)
CLAIM = "09-sed-differs-and-detects"
OUT = ("Tiny-ImageNet", "CIFAR-10", "textures", "MNIST", "Fashion-MNIST")
ALL = (*OUT, "C-1", "C-5")
HELD_OUT = "held-out"
Numbers = dict[str, float]

TABLES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "Diversity: #unique of five, PDS and disagreement (Table 1)": (
        NAMES,
        ("#unique, test", "#unique, C-1", "#unique, C-5", "#unique, Tiny-ImageNet", "#unique, textures", "PDS, test",
         "PDS, C-1", "PDS, C-5", "disagreement, test", "disagreement, C-1", "disagreement, C-5"),
    ),
    "Accuracy on test and corrupted images (Table 2)": (
        NAMES,
        tuple(f"accuracy of {who}, {on}" for who in ("the oracle", "the prediction ensemble", "the uniform soup")
              for on in ("test", "C-1", "C-5")),
    ),
    "OOD detection: AUROC of BMA (Table 3)": (NAMES, tuple(f"AUROC BMA, {name}" for name in ALL)),
    "OOD detection: AUROC of PDS (Table 3)": (NAMES, tuple(f"AUROC PDS, {name}" for name in ALL)),
    "OOD detection on held-out images: AUROC, for the selection of lambda and of the method for BMA": (
        NAMES, (f"AUROC BMA, {HELD_OUT}", f"AUROC PDS, {HELD_OUT}"),
    ),
    "Diversity and OOD detection by lambda (Figure 3)": (
        SED, ("PDS, C-1", "AUROC PDS, C-1", "PDS, Tiny-ImageNet", "AUROC PDS, Tiny-ImageNet"),
    ),
    "Ensembles of some of the five members: AUROC of PDS on C-1 (Figure 4)": (
        NAMES, tuple(f"AUROC PDS of {size}, C-1" for size in range(2, 6)),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """The numbers of all runs, by `method/repetition`."""

    runs: Mapping[str, Numbers]

    def numbers(self, method: str, what: str) -> list[float]:
        """Return a number in every repetition that is complete for all methods."""
        repetitions = sorted({int(name.rpartition("/")[2]) for name in self.runs})
        complete = [r for r in repetitions if all(HELD_OUT_KEY in self.runs.get(f"{name}/{r}", {}) for name in NAMES)]
        return [self.runs[f"{method}/{repetition}"][what] for repetition in complete]

    def mean(self, method: str, what: str) -> float:
        return _mean(self.numbers(method, what))

    def differences(self, mine: tuple[str, str], other: tuple[str, str]) -> list[float]:
        """Return the differences of two numbers, paired by repetition."""
        return [a - b for a, b in zip(self.numbers(*mine), self.numbers(*other), strict=True)]


HELD_OUT_KEY = f"AUROC PDS, {HELD_OUT}"


def choose(found: Found) -> tuple[str, str]:
    """Return SED with its selected lambda, and the method for BMA: both by their mean AUROC on held-out images."""
    without = [name for name in NAMES if name not in USE_UNLABELED]
    sed = max(SED[1:], key=lambda name: found.mean(name, f"AUROC PDS, {HELD_OUT}"))
    return sed, max(without, key=lambda name: found.mean(name, f"AUROC BMA, {HELD_OUT}"))


def evidence(found: Found) -> Evidence:
    """Return what the study says of claim 9: means over all sets, paired by repetition."""
    sed, bma = choose(found)
    detection = [found.differences((sed, f"AUROC PDS, {on}"), (bma, f"AUROC BMA, {on}")) for on in ALL]
    diversity = [found.differences((sed, f"#unique, {on}"), (BASE, f"#unique, {on}")) for on in ALL]
    first, second = (
        mean_with_interval([_mean(each) for each in zip(*rows, strict=True)]) for rows in (detection, diversity)
    )
    first = first.model_copy(update={"what": f"{sed} and BMA of {bma}"})
    return Evidence(claim=CLAIM, cases={"as stated": Case(primary=(first,), also=(second,))})


def tables(found: Found) -> dict[str, str]:
    """Return all tables as Markdown: mean over repetitions, and half the width of its 95 % t interval."""
    made = {}
    for title, (methods, columns) in TABLES.items():
        lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
        for name in methods:
            cells = [_cell(t_interval(found.numbers(name, what)), what) for what in columns]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        made[title] = "\n".join(lines)
    lines = ["| statement | here | numbers | paired difference, 95 % interval |", "|---|---|---|---|"]
    made["Comparisons"] = "\n".join([*lines, *("| " + " | ".join(each) + " |" for each in comparisons(found))])
    return made


def markdown(found: Found) -> str:
    """Return all tables with their titles."""
    return "\n\n".join(f"**{title}**\n\n{table}" for title, table in tables(found).items())


def comparisons(found: Found) -> list[tuple[str, str, str, str]]:
    """Return every statement with its verdict: reproduced if the interval of the paired difference is above zero."""
    return [*_diversity(found), *_accuracy(found), *_detection(found), *_lambda_and_size(found)]


def _diversity(found: Found) -> list[tuple[str, str, str, str]]:
    what = "#unique, C-1"
    rows = [
        _compared(
            found, f"{name} has more distinct predictions (#unique) on C-1 than the deep ensemble", name, BASE, what
        )
        for name in (*USE_UNLABELED, *SED[1:])
    ]
    # SED at lambda 0 also trains two of five heads per step: what differs from it is the effect of the term.
    for name in SED[1:]:
        words = f"{name} has more distinct predictions (#unique) on C-1 than SED without its diversity term"
        rows.append(_compared(found, words, name, SED[0], what))
    return rows


def _accuracy(found: Found) -> list[tuple[str, str, str, str]]:
    return [
        _compared(
            found,
            f"the prediction ensemble of {name} is more accurate on {on} than that of the deep ensemble",
            name,
            BASE,
            f"accuracy of the prediction ensemble, {on}",
        )
        for on in ("C-1", "C-5")
        for name in SED[1:]
    ]


def _detection(found: Found) -> list[tuple[str, str, str, str]]:
    sed, bma = choose(found)
    rows = []
    for name in dict.fromkeys((sed, PAPERS)):
        words = f"{name} with PDS detects better than BMA of {bma}, mean over all sets"
        rows.append(_means_compared(found, words, name, bma))
    for on in ALL:
        pds = f"AUROC PDS, {on}"
        for name in dict.fromkeys((sed, PAPERS)):
            lam = "the selected lambda" if name == sed else "the paper's lambda"
            words = f"{name} ({lam}) with PDS detects {on} better than BMA of {bma}, the selected method"
            rows.append(_compared(found, words, name, bma, pds, f"AUROC BMA, {on}"))
        words = f"{sed} with PDS detects {on} better than the deep ensemble with PDS"
        rows.append(_compared(found, words, sed, BASE, pds))
    return rows


def _lambda_and_size(found: Found) -> list[tuple[str, str, str, str]]:
    rows = [
        _compared(found, f"{what} is higher at lambda 10 than at 0", SED[-1], SED[0], what)
        for what in ("PDS, C-1", "AUROC PDS, C-1")
    ]
    for name in SED[1:]:
        words = f"PDS of five members of {name} detects C-1 better than PDS of two"
        rows.append(_compared(found, words, name, name, "AUROC PDS of 5, C-1", "AUROC PDS of 2, C-1"))
    return [*rows, ("SED reaches .977 on iNaturalist, 77.3 % on ImageNet-C", "not testable here", "other data", "")]


def _compared(
    found: Found, words: str, name: str, other: str, what: str, than: str | None = None
) -> tuple[str, str, str, str]:
    return _row(words, found.numbers(name, what), found.numbers(other, than or what))


def _means_compared(found: Found, words: str, name: str, other: str) -> tuple[str, str, str, str]:
    """Compare PDS of one method with BMA of another by their means over all sets, in every repetition."""
    here, there = (
        [_mean(each) for each in zip(*(found.numbers(method, f"AUROC {score}, {on}") for on in ALL), strict=True)]
        for method, score in ((name, "PDS"), (other, "BMA"))
    )
    return _row(words, here, there)


def _row(words: str, here: Sequence[float], there: Sequence[float]) -> tuple[str, str, str, str]:
    apart = paired_t_interval(here, there)
    opposite = "not reproduced: opposite"
    verdict = "reproduced" if apart.low > 0 else opposite if apart.high < 0 else "inconclusive"
    numbers = f"{_mean(here):.3f} and {_mean(there):.3f}"
    return words, verdict, numbers, f"{apart.value:+.3f}, {apart.low:+.3f} to {apart.high:+.3f}"


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else float("nan")


def _cell(interval: Interval, what: str) -> str:
    scale, digits = (100, 1) if what.startswith(("accuracy", "disagreement")) else (1, 3)
    half = (interval.high - interval.value) * scale
    return f"{interval.value * scale:.{digits}f}" + (f" ± {half:.{digits}f}" if half == half else "")
