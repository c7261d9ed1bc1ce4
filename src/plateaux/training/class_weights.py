"""Class weights that balance the classes of the training samples."""

from __future__ import annotations

import torch

from plateaux.config.builders.data import eval_batches, train_val_split
from plateaux.config.experiment import Experiment
from plateaux.core.errors import DataError


def balance_classes(experiment: Experiment) -> Experiment:
    """Replace `loss.class_weights = "balanced"` by numbers: the inverse frequencies of the classes, with mean one."""
    recipe = experiment.recipe
    if recipe.loss.options.get("class_weights") != "balanced":
        return experiment
    data = experiment.data
    counts = torch.zeros(data.classes, dtype=torch.float64)
    for batch in eval_batches(recipe, data, data.train, train_val_split(recipe, data)[0]):
        if batch.y.ndim != 1 or batch.y.is_floating_point():
            raise DataError(
                f'loss.class_weights = "balanced" counts class numbers, but the labels of {data.name!r} have shape '
                f"{list(batch.y.shape)} and dtype {batch.y.dtype}: give one weight for each class instead"
            )
        counts += torch.bincount(batch.y.cpu(), minlength=data.classes)
    weights = torch.where(counts > 0, 1 / counts.clamp_min(1), 0.0)  # a class without samples needs no weight
    weights *= len(weights) / weights.sum()
    return experiment.replaced(loss={"class_weights": [float(f"{weight:.6g}") for weight in weights.tolist()]})
