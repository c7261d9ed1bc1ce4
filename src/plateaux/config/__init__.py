"""The recipe: its schema, its search space, the recipes that come with the package, and plug-in specifications.

Reading and writing run folders belongs in `storage`."""
