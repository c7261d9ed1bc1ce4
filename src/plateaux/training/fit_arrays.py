"""Train an ensemble on arrays in one call: write the recipe, store the data, and train.

run = fit(x, y, model="mlp")
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plateaux.config.components import Model
from plateaux.config.recipe import Recipe
from plateaux.core import registry
from plateaux.core.errors import DataError, RecipeError
from plateaux.core.progress import Progress, log_messages
from plateaux.data.sources import DataSplits, InMemorySource
from plateaux.data.tensor_names import DATA_FILE
from plateaux.storage.run import Run
from plateaux.training.from_arrays import from_arrays
from plateaux.training.train import train

VALIDATION_SPLIT = 0.1
NOT_STORED = "data_in_python"
SMALL = 10_000  # below this number of training samples, a batch has 32 samples instead of 128
NAMED = ("data", "model", "method")
ARGUMENTS = ("members", "seed")
TEST = 0.2  # the fraction of the samples that is held out by default
logger = logging.getLogger(__name__)


def fit(
    x: Any,
    y: Any = None,
    *,
    model: str | Model,
    out: str | Path | None = None,
    members: int = 5,
    method: str = "sam",
    test: Any = TEST,
    classes: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    progress: Progress = log_messages,
) -> Run:
    """Train an ensemble on arrays, tensors, pandas, or a data set; the same call resumes a run that was interrupted.

    It writes a recipe and calls `plateaux.train`, with the optimizer, schedule, and epochs of a recipe that names none,
    batches of 32 (128 from 10,000 training samples on), and a tenth of the training samples for validation. The run
    folder then contains the recipe and the data, so `plateaux train RUN`, `evaluate`, `calibrate`, `predict`, and
    `export` continue from it.

    Args:
        x: The inputs `[N, ...]`, a DataFrame, a data set with labels, or the result of `plateaux.from_arrays`.
        y: The labels `[N]`: class numbers or text. None: `x` is a data set with labels.
        model: The name of a model, or a function or class that builds an `nn.Module`; it receives `shape` and
            `classes` if it has these parameters.
        out: The run folder, or its URL. None: a new temporary folder, which is named at the end.
        members: The number of members.
        method: The name of the training method.
        test: The fraction of the samples to hold out as a test set, or the test set itself: `(x, y)` or a data set.
            None or 0: all samples are for training, also those for validation.
        classes: The number of classes; by default those in the labels. Needed for a torch `Dataset` without `classes`.
        epochs: The number of epochs; by default 30.
        seed: The seed of the members and of the validation samples. The test samples do not depend on it.
        settings: Other values of the recipe by section, as in `{"optimizer": {"lr": 0.01}, "method": {"rho": 0.1}}`.
        progress: Called with progress events.
    """
    data = (
        _check_data(x, y, test, classes) if isinstance(x, DataSplits) else from_arrays(x, y, test=test, classes=classes)
    )
    name, trust = _model_name(model)
    if name == "mlp" and isinstance(data.train, InMemorySource) and _are_tokens(data.train.x):
        raise DataError(
            "x has integers, which are token ids, but the model 'mlp' needs features: pass x.astype('float32'), or "
            "x.float() for a tensor."
        )
    recipe = build_recipe(
        data,
        name or str(getattr(model, "__name__", "custom")),
        members=members,
        method=method,
        epochs=epochs,
        seed=seed,
        settings=settings or {},
    )
    trust = (*trust, *(tracker.partition(":")[0] for tracker in recipe.run.trackers))  # the caller named them
    function = None if name or isinstance(model, str) else model
    folder = tempfile.mkdtemp(prefix="plateaux-") if out is None else out
    run = train(recipe, folder, data=data, model=function, trust=trust, progress=progress)
    if out is None:
        logger.warning("The run is %s, in a temporary folder: move it, or pass out=, to keep it", folder)
    return run


def build_recipe(
    data: DataSplits,
    model: str,
    *,
    members: int,
    method: str,
    epochs: int | None = None,
    seed: int,
    settings: Mapping[str, Any],
) -> Recipe:
    """Return the recipe that `fit` trains. A section of the settings replaces single keys of the defaults."""
    # The name of data that are not stored must not be that of another data set, which commands would read instead.
    name = NOT_STORED if data.name in registry.dataset.names() else data.name
    stored = {"name": "arrays", "path": DATA_FILE} if data.keep_in_run else {"name": name}
    tree: dict[str, Any] = {
        "members": members,
        "seed": seed,
        "data": {
            **stored,
            "batch_size": 32 if len(data.train) < SMALL else 128,
            "validation_split": VALIDATION_SPLIT if len(data.test) else 0.0,
        },
        "model": {"name": model},
        "method": {"name": method},
        "train": {} if epochs is None else {"epochs": epochs},
    }
    for name, value in settings.items():
        if name in ARGUMENTS or (isinstance(value, Mapping) and name in NAMED and "name" in value):
            argument = "model, method, or x and y" if name in NAMED else name
            raise RecipeError(f"settings has {name!r}: use the argument of fit instead ({argument}).")
        old = tree.get(name, {})
        tree[name] = {**old, **value} if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return Recipe.from_dict(tree)


def _check_data(data: DataSplits, y: Any, test: Any, classes: int | None) -> DataSplits:
    if y is not None or classes is not None or test != TEST:
        raise DataError(
            "x is a DataSplits, which has labels, classes, and test samples: leave out y, test, and classes."
        )
    return data


def _model_name(model: str | Model) -> tuple[str | None, tuple[str, ...]]:
    """Return the name of a model for the recipe and the module to trust; None if only this process can build it.

    Functions and classes of an importable module are named `package.module:function`, so that other processes and the
    command line can build the model.
    """
    if isinstance(model, str):
        return model, ()
    module, name = getattr(model, "__module__", None), getattr(model, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        return None, ()
    if getattr(sys.modules.get(module), name, None) is not model:
        return None, ()
    if module.startswith("plateaux.") and registry.model.is_registered(model):
        return name, ()
    return f"{module}:{name}", (module,)


def _are_tokens(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.int64
