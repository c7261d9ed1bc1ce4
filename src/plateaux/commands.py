"""What a command of another package shares with those of Plateaux: output, progress, files, and the style of figures.

An entry point of the group `plateaux.commands` adds a command: a function with typer options, whose errors are printed
like those of Plateaux.
"""

from plateaux.cli.common import AsJson, print_result, progress_bar
from plateaux.core.formatting import format_duration
from plateaux.core.imports import optional_import
from plateaux.core.progress import Progress, WorkDone, log_messages
from plateaux.loss_landscape.plot_style import COLORS, RC_PARAMS
from plateaux.storage.atomic import write_atomic

__all__ = [
    "COLORS",
    "RC_PARAMS",
    "AsJson",
    "Progress",
    "WorkDone",
    "format_duration",
    "log_messages",
    "optional_import",
    "print_result",
    "progress_bar",
    "write_atomic",
]
