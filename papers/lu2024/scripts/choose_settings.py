# A record, not run at HEAD. It ran at commit 82053c7c6e4b: `git checkout 82053c7c6e4b`, then `python studies/choose_settings.py`.
"""Choose the settings of every method on held-out images: the highest accuracy of the ensemble, mean over repetitions.

    python studies/choose_settings.py runs/sharpbalance_tuning_mlp                    # the folder of the study
    python studies/choose_settings.py studies/results/sharpbalance_tuning_mlp.json    # or its results alone

Of equal settings the first of the study counts. Settings that not every repetition has are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plateaux.studies.results import ResultRow, results_from_study

ENSEMBLE = "ensemble (mean probability)"
Settings = Mapping[str, Any]


def held_out_accuracy(results: Sequence[ResultRow]) -> list[tuple[Settings, list[float]]]:
    """Return every condition with the accuracy of its ensemble on held-out images, by repetition."""
    rows = [
        each for each in results if (each.metric, each.split, str(each.row)) == ("accuracy", "validation", ENSEMBLE)
    ]
    found: list[tuple[Settings, list[float]]] = []
    for each in rows:
        numbers = next((numbers for settings, numbers in found if settings == each.condition), None)
        if numbers is None:
            found.append((each.condition, [each.value]))
        else:
            numbers.append(each.value)
    most = max((len(numbers) for _, numbers in found), default=0)
    return [(settings, numbers) for settings, numbers in found if len(numbers) == most]


def choose(found: Sequence[tuple[Settings, Sequence[float]]]) -> dict[str, Settings]:
    """Return the settings with the highest mean accuracy for every method."""
    methods = dict.fromkeys(str(settings["method"]) for settings, _ in found)
    return {
        method: max((pair for pair in found if pair[0]["method"] == method), key=lambda pair: _mean(pair[1]))[0]
        for method in methods
    }


def table(found: Sequence[tuple[Settings, Sequence[float]]]) -> str:
    """Return all conditions with their accuracy in percent as Markdown; the chosen ones are bold."""
    chosen = choose(found).values()
    factors = list(dict.fromkeys(factor for settings, _ in found for factor in settings))
    lines = [f"| {' | '.join(factors)} | held-out accuracy % | by repetition |", f"|{'---|' * len(factors)}---:|---|"]
    for settings, numbers in found:
        mark = "**" if any(settings == each for each in chosen) else ""
        cells = [str(settings.get(factor, "")) for factor in factors]
        each = ", ".join(f"{100 * number:.2f}" for number in numbers)
        lines.append(f"| {' | '.join(cells)} | {mark}{100 * _mean(numbers):.2f}{mark} | {each} |")
    return "\n".join(lines)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the folder of the study, or its results.json")
    print(table(held_out_accuracy(results_from_study(parser.parse_args().study))))


if __name__ == "__main__":
    main()
