"""The papers on which Plateaux rests: their theory, claims, studies, and recipes.

A folder holds everything about one paper. It lies next to `src` in the repository, and inside the installed package.
"""

from pathlib import Path

PAPERS = ("lu2024", "sed2024", "rethinking2025", "comparison")  # the last compares methods of all papers
_HERE = Path(__file__).resolve().parent
ROOT = _HERE if (_HERE / PAPERS[0]).is_dir() else _HERE.parents[1]
RECIPES, STUDIES, CLAIMS = (
    tuple(ROOT / paper / kind for paper in PAPERS if (ROOT / paper / kind).is_dir())
    for kind in ("recipes", "studies", "claims")
)
