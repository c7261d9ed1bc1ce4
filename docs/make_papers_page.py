"""Write docs/results/reproduce.md: every table and figure of the papers with its command, status, and cost.

python docs/make_papers_page.py            # write the page
python docs/make_papers_page.py --check    # exit code 1 if the page is out of date

Runs, passes and bytes are those of `plateaux study NAME --dry-run`. Device hours assume the speed that Lu et al. report
for their GPU, divided by the operations of a network relative to ResNet-18 on images of 32 pixels.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from _generated import write_or_check

from plateaux.config.builders.model import build_members
from plateaux.config.recipe import Recipe
from plateaux.core.formatting import format_size
from plateaux.studies.builtin import builtin_studies
from plateaux.studies.cost_estimate import CostEstimate, count_operations, first_sample
from plateaux.studies.runner import StudyRunner
from plateaux.studies.study import Study

PAGE = Path(__file__).parent / "results" / "reproduce.md"
MINUTES = 84.48  # Table 8 of Lu et al.: 200 epochs of ResNet-18 on CIFAR-10 with SharpBalance, about SAM
REFERENCE_RATE = 400 * 50_000 / (60 * MINUTES)  # images per second, forward and backward
REFERENCE_OPERATIONS = 2 * 0.5564e9  # of a forward pass of ResNet-18 on an image of 32 pixels
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
Lu et al. report {MINUTES} minutes for 200 epochs of ResNet-18 on CIFAR-10 with the two passes of SAM (Table 8), that is
2 x 200 x 50,000 / (60 x {MINUTES}) = {REFERENCE_RATE:,.0f} images per second on their GPU. Device hours below are
passes x training images, and the forward passes of the evaluation at a third each, divided by that speed, times
the operations of the network relative to ResNet-18 on images of 32 pixels: an estimate, not a measurement. For your
device, give its speed: `--dry-run --images-per-second 10000`. Bytes are the weights that are kept."""

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


class ScaledEstimate(CostEstimate):
    """Costs at the speed of a reference GPU, scaled by the operations of each network."""

    def _throughput(self, recipe: Recipe, samples: int) -> float:
        key = str(recipe.to_dict()["model"]) + str(recipe.data.name)
        if key not in self.throughputs:
            tree = recipe.to_dict()
            tree["model"] |= {"weights": None, "backbone": None, "head": "own", "cache_features": False}
            (module,) = build_members(Recipe.from_dict(tree), self._data(recipe), [0])
            operations = count_operations(module, first_sample(self._data(recipe)))
            self.throughputs[key] = REFERENCE_RATE * REFERENCE_OPERATIONS / operations
        return self.throughputs[key]


def row(name: str, study: Study) -> str:
    with tempfile.TemporaryDirectory() as folder:
        costs = ScaledEstimate(StudyRunner(study, Path(folder) / "study")).all()
    hours = sum(cost.device_seconds for cost in costs) / 3600
    size, passes = sum(cost.bytes for cost in costs), sum(cost.passes for cost in costs)
    products = ", ".join(study.produces)
    cells = (products, f"`{name}`", f"{len(costs):,}", f"{passes:,.0f}", f"{hours:,.0f}")
    return f"| {' | '.join(cells)} | {format_size(size) if size else 'none'} |"


def page() -> str:
    lines = INTRODUCTION.splitlines()
    studies = {name: file for name, file in builtin_studies().items() if file.parent.name == "papers"}
    for paper, title in PAPERS.items():
        lines += ["", f"## {title}", "", "| produces | study | runs | passes | device hours | weights |"]
        lines += ["|---|---|---:|---:|---:|---:|"]
        for name in sorted(name for name in studies if name.startswith(f"{paper}_")):
            lines.append(row(name, Study.load(name)))
        lines += ["", *(f"- {what}: {command}; {status}." for what, command, status in OTHER[paper])]
    return "\n".join([*lines, "", ARITHMETIC])


if __name__ == "__main__":
    os.environ["PLATEAUX_DATA"] = tempfile.gettempdir() + "/no-data"  # published sizes, on every machine
    sys.exit(write_or_check({PAGE: page()}))
