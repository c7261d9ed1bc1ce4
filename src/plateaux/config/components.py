"""Python objects that replace the names in a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from plateaux.core.errors import DataError, RecipeError

if TYPE_CHECKING:
    from torch import nn

    from plateaux.core.method import LossFn
    from plateaux.data.sources import DataSplits, Source

Model = Callable[..., "nn.Module"]


@dataclass(frozen=True, slots=True)
class Components:
    """Objects that the caller passes in Python instead of naming them in the recipe."""

    data: DataSplits | None = None
    model: Model | None = None
    loss: LossFn | None = None
    unlabeled: Source | None = None  # samples of the same shape as the data; their labels are ignored
    trust: tuple[str, ...] = ()  # modules from which a recipe may call functions, clusters it may connect to
    download: bool = False  # whether models and data sets of a hub may be downloaded
    # of a run, which has all weights: config.json by name of the model; None: the networks are not those of a run
    model_configs: Mapping[str, Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        if self.data is None and self.model is None and self.loss is None:
            return  # commands that read only the progress of a run must not import torch
        from torch import nn

        from plateaux.data.sources import DataSplits

        if self.data is not None and not isinstance(self.data, DataSplits):
            raise DataError(
                f"data= is a {type(self.data).__name__}. Expected: plateaux.DataSplits, which plateaux.from_tensors "
                "and plateaux.from_dataset return"
            )
        if isinstance(self.model, nn.Module):
            raise RecipeError(
                f"model= is a module, {type(self.model).__name__}(...). Expected: a function that builds one, because "
                "every member needs its own weights. Pass the class, or a function such as "
                "`def model(shape, classes): return MyNetwork(classes)`"
            )
        for name in ("model", "loss"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise RecipeError(
                    f"{name}= is a {type(value).__name__}. Expected: a function. To use a registered {name}, name it "
                    f"in the recipe: {name}.name"
                )

    @property
    def model_name(self) -> str | None:
        """The qualified name of the model that the caller passes, such as `networks:small_resnet`."""
        model = self.model.func if isinstance(self.model, partial) else self.model
        if model is None:
            return None
        named = model if hasattr(model, "__qualname__") else type(model)
        return f"{named.__module__}:{named.__qualname__}"

    def keywords(self) -> dict[str, Any]:
        """Return the arguments of `train` and `open_run` that pass these components on."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "model_configs"}


NO_COMPONENTS = Components()
