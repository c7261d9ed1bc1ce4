"""A hook of MkDocs that adds the pages and pictures of `papers/` to the site; links work on GitHub and on the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of every paper, and their pictures."""
    for pattern in ("*.md", "[a-z]*/*.md", "[a-z]*/images/**/*.svg"):
        for path in sorted((ROOT / "papers").glob(pattern)):
            files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite links between `docs`, which is the root of the site, and `papers`, which lies below that root."""
    if page.file.src_uri.startswith("papers/"):
        page.meta.setdefault("hide", ["toc"])  # their tables need the width
        return re.sub(r"\]\(((?:\.\./)+)docs/", r"](\1", markdown)
    return re.sub(r"\]\(((?:\.\./)*)\.\./papers/", r"](\1papers/", markdown)
