"""Functions that build the objects a recipe describes: models, data, methods, optimizers.

The objects themselves belong in `data`, `models`, `optim`, and `methods`."""
