"""Run the notebooks of docs/gallery and store their outputs: python docs/make_gallery.py [NAME ...].

Needs `pip install nbclient ipykernel`, and the extras that the notebooks name, with MLflow for text.ipynb.
"""

from __future__ import annotations

import base64
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

GALLERY = Path(__file__).resolve().parent / "gallery"
# Not stored.
SETUP = """
import warnings
warnings.simplefilter("ignore")
"""


def run(path: Path) -> None:
    """Run one notebook in an empty folder, and store its outputs without times and names of the machine."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SETUP))
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}, record_timing=False).execute()
    notebook.cells.pop(0)
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(codes, 1):
        cell.execution_count = number
        cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, path)
    pictures = [
        each["data"]["image/png"] for cell in codes for each in cell.outputs if "image/png" in each.get("data", {})
    ]
    path.with_suffix(".png").write_bytes(base64.b64decode(re.sub(r"\s", "", pictures[0])))  # the thumbnail of the index


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in GALLERY.glob("*.ipynb")):
        run(GALLERY / f"{name}.ipynb")
