"""Studies: grids of recipes, their runner, their results, and comparisons between conditions.

Single runs belong in `training` and `evaluation`. Rendered reports belong in `reports`."""

from plateaux.studies.result_rows import ResultRow, results_from_study
from plateaux.studies.runner import StudyRunner
from plateaux.studies.study import Study

__all__ = ["ResultRow", "Study", "StudyRunner", "results_from_study"]
