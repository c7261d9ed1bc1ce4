"""Which landscape plots there are, and their default number of samples; without torch, for the command line."""

from __future__ import annotations

PLOT_KINDS = ("slices", "paths", "plane")
DEFAULT_LIMIT = 512  # samples
