"""A Griffe extension: show the examples of docstrings, lines from `>>>` to the next blank line, as code.

Without it, Markdown turns them into nested quotations.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


def fence_examples(text: str) -> str:
    """Return a docstring with its examples in fenced code blocks."""
    return EXAMPLE.sub(lambda example: f"\n```pycon\n{example.group()}\n```", text)


class Examples(griffe.Extension):
    """Fence the examples of every docstring, before other extensions parse it."""

    def on_object(self, *, obj: griffe.Object, loader: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fence_examples(obj.docstring.value)
