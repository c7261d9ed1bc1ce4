"""A hook of MkDocs that shows notebooks with their stored outputs. Nothing is executed, and nothing is fetched."""

from __future__ import annotations

import html
import json
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


class NotebookPage(File):
    """A notebook that is rendered as a page of Markdown."""

    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace each notebook by its Markdown."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        files.append(NotebookPage.generated(config, file.src_uri, content=to_markdown(file.content_string)))
    return files


def to_markdown(text: str) -> str:
    """Return the cells of a notebook and their outputs as Markdown."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += [_output(output, cell["metadata"].get("alt", "")) for output in cell["outputs"]]
    return "\n\n".join(part for part in parts if part)


def _output(output: dict[str, Any], alt: str) -> str:
    """Return one output: printed text, a picture, or a table."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "image/png" in data:
        picture = re.sub(r"\s", "", "".join(data["image/png"]))
        return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{picture}">'
    if "text/html" in data:
        table = "".join(line.strip() for line in "".join(data["text/html"]).splitlines())
        return table
    return f'```text title="Output"\n{"".join(data["text/plain"]).rstrip()}\n```'
