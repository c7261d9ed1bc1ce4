"""Claims from papers: their definition, the evidence from studies, the verdict, and the page that lists them.

The claims themselves are TOML files in the folder `claims` of the project."""
