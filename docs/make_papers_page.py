"""Write docs/results/reproduce.md: every table and figure of the papers with its command, status, and cost.

python docs/make_papers_page.py            # write the page
python docs/make_papers_page.py --check    # exit code 1 if the page is out of date

All numbers are those of `plateaux study NAME --dry-run --images-per-second N`. N is the speed that Lu et al. report for
their GPU, divided by the operations of the first run's network relative to ResNet-18 on CIFAR-10.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from _generated import write_or_check

from plateaux.core.formatting import format_size
from plateaux.studies.builtin import builtin_studies
from plateaux.studies.cost_estimate import CostEstimate
from plateaux.studies.runner import StudyRunner
from plateaux.studies.study import Study

PAGE = Path(__file__).parent / "results" / "reproduce.md"
MINUTES = 84.48  # Table 8 of Lu et al.: 200 epochs of ResNet-18 on CIFAR-10 with SharpBalance, 1 % more than SAM
REFERENCE_RATE = 400 * 50_000 / (60 * MINUTES)  # images per second, forward and backward
REFERENCE = "lu2024_figure7"  # the study whose first network has that speed
PAPERS = {
    "lu2024": "SharpBalance (Lu et al. 2024)",
    "sed2024": "Scalable Ensemble Diversification (2024)",
    "rethinking2025": "Rethinking Sharpness (2025)",
}
OTHER = {
    "lu2024": (
        ("Figures 1 (b), 2, 9, 10, 11", "`plateaux theory --out theory`", "run here: [Theory](theory.md)"),
        ("Figure 14", "`plateaux landscape RUN --probes rank_agreement`, RUN of `lu2024_figure7`", "run small"),
        ("Figures 1 (a), 6", "drawings", "[how SharpBalance works](../guides/sharpbalance.md)"),
    ),
    "sed2024": (("Figure 2", "`plateaux report RUN --sample-images`", "examples, not a result"),),
    "rethinking2025": (),
}


INTRODUCTION = f"""# Reproduce the papers

Every table and figure of the three papers, with the command that repeats its experiment at full size. A study is one
set of runs, and its file lists all tables and figures that come from it: `plateaux study lu2024_table3` finds the study
that produces Table 3. The tables that it prints have the paper's numbers next to the measured ones.

```bash
plateaux study lu2024_figure7 --smoke     # at a tiny size: no result
plateaux study lu2024_figure7 --dry-run   # its cost; needs no data
plateaux study lu2024_figure7 --executor ray --address auto
plateaux report runs/lu2024_figure7       # its figures
```

**Status.** Nothing in these tables was run at full size, which needs GPUs. All of them have the status
*smoke test*: run end to end with `--smoke`, on generated files, which checks recipes, data layouts, metrics, tables
and figures, not results. What was found at a small size is in [Claims](claims.md).

**Cost.** A pass is one forward and one backward pass of a member over its training images; SAM takes two per epoch.
Lu et al. report {MINUTES} minutes for 200 epochs of ResNet-18 on CIFAR-10 with SharpBalance, 1 % more than with SAM
(Table 8). With the two passes of SAM, that is 2 x 200 x 50,000 / (60 x {MINUTES}) = {REFERENCE_RATE:,.0f} images per
second on their GPU. The column images/s is this speed for the network of the study's first run, by its operations on
one sample relative to ResNet-18: an estimate, not a measurement. Device hours are passes x training images, and the
forward passes of the evaluation at a third each, divided by that speed; other networks of the study count by their
operations. Bytes are the weights that are kept. A dry run with the speed of the row prints the same numbers, unless
data sets of another size are on your machine. For your device, measure the speed of the first network there and give
it instead:

```bash
plateaux study {REFERENCE} --dry-run --images-per-second {REFERENCE_RATE:.0f}
```"""

ARITHMETIC = """## The arithmetic of three studies

- **SharpBalance, Figure 7**: 3 data sets x 3 methods x 3 ensembles = 27 runs of 3 members and 200 epochs. A deep
  ensemble takes 3 x 200 = 600 passes. SharpBalance takes 3 x (100 x 2 + 1 + 100 x 1.5) = 1,053: SAM up to the
  partition, one pass for scores, then SAM on a part of the samples, half of them until it is known. SAM shares the
  first half with it, which is trained once, and takes 3 x 100 x 2 = 600 more. The sum is
  9 x (600 + 1,053 + 600) = 20,277.
- **SED, Table 1**: nine conditions, of which the members of a single model and of deep ensembles of 5 and of 50 are
  shared: 6 runs and 1,650 passes of heads over cached features. The cost is that of the frozen network, which 4
  augmentations of 1,281,167 images and the evaluation sets of about 3.1 million images pass once, for all runs; images
  of ImageNet-C count twice, as test images and as OOD sets. A head has 1.4 million weights for 17 billion
  multiplications of the network, so that 1,650 passes of heads cost as much as 0.13 passes of whole networks.
  Hours are a lower bound: they count operations, and 80,073 steps of an epoch in batches of 16 take longer than theirs.
- **Rethinking, Table 1**: 6 controls x 10 members x 100 epochs: 3 x 1,000 passes without and 3 x 2,000 with SAM, 9,000
  passes over 50,000 images, and 100 forward passes over them for the SAM-sharpness of every member.
"""


def first_operations(estimate: CostEstimate) -> float:
    """Return the operations of the network of the first run."""
    return estimate.network_operations(estimate.runner.runs[0].recipe)


def row(name: str, reference: float) -> str:
    """Return the line of a study; `reference` are the operations of the network that has the reference speed."""
    study = Study.load(name)
    with tempfile.TemporaryDirectory() as folder:
        estimate = CostEstimate(StudyRunner(study, Path(folder) / "study"))
        rate = round(REFERENCE_RATE * reference / first_operations(estimate))
        estimate.images_per_second = rate
        costs = estimate.all()
    hours = sum(cost.device_seconds for cost in costs) / 3600
    size, passes = sum(cost.bytes for cost in costs), sum(cost.passes for cost in costs)
    products = ", ".join(study.produces)
    cells = (products, f"`{name}`", f"{len(costs):,}", f"{passes:,.0f}", f"{rate:,}", f"{hours:,.0f}")
    return f"| {' | '.join(cells)} | {format_size(size) if size else 'none'} |"


def page() -> str:
    lines = INTRODUCTION.splitlines()
    studies = {name: file for name, file in builtin_studies().items() if file.parent.name == "papers"}
    with tempfile.TemporaryDirectory() as folder:
        reference = first_operations(CostEstimate(StudyRunner(Study.load(REFERENCE), Path(folder) / "study")))
    for paper, title in PAPERS.items():
        lines += ["", f"## {title}", "", "| produces | study | runs | passes | images/s | device hours | weights |"]
        lines += ["|---|---|---:|---:|---:|---:|---:|"]
        for name in sorted(name for name in studies if name.startswith(f"{paper}_")):
            lines.append(row(name, reference))
        lines += ["", *(f"- {what}: {command}; {status}." for what, command, status in OTHER[paper])]
    return "\n".join([*lines, "", ARITHMETIC])


if __name__ == "__main__":
    os.environ["PLATEAUX_DATA"] = tempfile.gettempdir() + "/no-data"  # published sizes, on every machine
    sys.exit(write_or_check({PAGE: page()}))
