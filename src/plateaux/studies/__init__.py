"""Studies: grids of recipes, their runner, their results, and comparisons between conditions.

Single runs belong in `training` and `evaluation`. Rendered reports belong in `reports`."""
