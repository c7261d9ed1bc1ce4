"""Studies: grids of recipes, their runner, their results, and comparisons between conditions.

Single runs belong in `training` and `evaluation`. Rendered reports belong in `reports`."""

from plateaux.core.imports import attach_stub

__all__, __getattr__, __dir__ = attach_stub(__name__, __file__)
