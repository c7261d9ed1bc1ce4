"""Reports on runs and studies in HTML, Markdown, JSON, and CSV, and their templates.

Numbers are computed in `evaluation` and `studies`. Reports only read and show them."""
