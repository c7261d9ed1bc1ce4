"""The recipe: its schema, its search space, the built-in recipes, and plugin specifications.

Reading and writing run folders belongs in `storage`."""
