"""A recipe and the objects of the caller, with what they describe: methods, data, and executor, each built once."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import Recipe

if TYPE_CHECKING:
    from plateaux.core.executor import Executor
    from plateaux.core.method import LossFn, Method
    from plateaux.data.sources import DataSplits


class Experiment:
    """What a run trains. Pickled, it is only the recipe and the objects of the caller: a worker builds its own."""

    def __init__(self, recipe: Recipe, components: Components = NO_COMPONENTS) -> None:
        self.recipe, self.components = recipe, components
        self._methods: dict[int, Method] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Experiment, (self.recipe, self.components)

    def replaced(self, **sections: Any) -> Experiment:
        """Return the experiment with other settings; data that were built are kept if its settings are the same."""
        changed = Experiment(self.recipe.replaced(**sections), self.components)
        same = changed.recipe.data == self.recipe.data and changed.recipe.seed == self.recipe.seed
        if same and "data" in self.__dict__:
            changed.__dict__["data"] = self.data
        return changed

    @cached_property
    def data(self) -> DataSplits:
        """The data set, with the label noise of the recipe."""
        from plateaux.config.builders.data import build_data

        return build_data(self.recipe, self.components)

    @cached_property
    def training_data(self) -> DataSplits:
        """The data set, with the unlabeled samples if the method needs them."""
        from plateaux.config.builders.data import with_unlabeled

        return with_unlabeled(self.data, self.method(), self.recipe, self.components)

    def method(self, number: int = 0) -> Method:
        """Return the method of one member."""
        from plateaux.config.builders.training import build_method

        if number not in self._methods:
            self._methods[number] = build_method(self.recipe, number, self.components)
        return self._methods[number]

    def loss(self, number: int = 0) -> LossFn:
        """Return the loss of one member."""
        from plateaux.config.builders.training import build_loss

        return build_loss(self.recipe, number, self.components)

    def executor(self) -> Executor:
        """Return a new executor, which the caller closes."""
        from plateaux.config.builders.training import build_executor

        return build_executor(self.recipe, self.components)
