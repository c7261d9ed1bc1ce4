"""The members of a trained run, ready for forward passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from plateaux.config.builders.model import build_members, shared_param_names
from plateaux.config.builders.training import build_executor
from plateaux.core.errors import RecipeError, RunError
from plateaux.core.executor import Collectives, all_reduce_max
from plateaux.core.member import MemberModule
from plateaux.core.process_info import local_processes
from plateaux.core.runtime import FORMATS, autocast, configure_runtime, get_device
from plateaux.data.data_check import check_columns, check_evaluation_data
from plateaux.data.sources import DataSplits, InMemorySource, Source
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.models.backbone import BackboneWithHead
from plateaux.storage.feature_cache import prepare_features, through_backbone
from plateaux.storage.open_run import check_code, check_task
from plateaux.storage.run import Run, RunLike
from plateaux.storage.stored_data import build_run_data


class LoadedRun:
    """Members of a run with their data. Weights and data are loaded when they are first needed."""

    def __init__(
        self,
        run: RunLike,
        *,
        members: Sequence[int] | None = None,
        device: str | None = None,
        executor: Mapping[str, Any] | None = None,
    ) -> None:
        self.run = run = Run.open(run)
        check_task(run)
        check_code(run)  # also if all logits are cached, and no network is loaded
        self.components = components = run.components
        self.recipe = run.resolved_recipe()
        self.numbers = run.trained_members() if members is None else _check_ids(members, self.recipe.members)
        self.executor: Collectives = SINGLE_PROCESS
        if executor is not None:
            if (name := executor.get("name")) not in ("local", "mesh"):
                raise RecipeError(
                    f'executor = {name!r}: evaluation runs in this process or, with "mesh", in those of torchrun. On a '
                    "cluster, start `plateaux evaluate` on one of its machines"
                )
            self.recipe = self.recipe.replaced(executor=dict(executor))
            self.executor = build_executor(self.recipe, components)
        configure_runtime(processes=local_processes(), threads=self.recipe.executor.threads)
        if all_reduce_max(self.executor, int(not self.executor.local_members(len(self.numbers)))):
            raise RecipeError(
                f"{len(self.numbers)} members cannot be distributed over more processes than members; use fewer "
                "processes, or distribute the samples: --set executor.data_parallel=N"
            )
        self.device = get_device(device or self.executor.device)
        self.data_info = run.info.data
        if components.data is not None:
            check_evaluation_data(components.data, run.info.data.shape, run.info.data.classes)
            check_columns(components.data, () if run.info.preprocessing is None else run.info.preprocessing.columns)

    @cached_property
    def data(self) -> DataSplits:
        return build_run_data(self.run)

    @cached_property
    def hashes(self) -> list[str]:
        """The hashes of the members' weights."""
        return [self.run.weights_hash(number) for number in self.numbers]

    @cached_property
    def weight_sources(self) -> list[str]:
        """Which weights each member has: the last, the best, or an average."""
        return [self.run.progress(number).weights_source for number in self.numbers]

    @cached_property
    def modules(self) -> list[MemberModule]:
        """The members held by this process, in evaluation mode."""
        held = [self.numbers[row] for row in self.executor.local_members(len(self.numbers))]
        modules = [module.to(self.device).eval() for module in load_members(self.run, held)]
        layout = FORMATS[self.recipe.train.memory_format]
        modules = [module.to(memory_format=layout) for module in modules]  # type: ignore[call-overload]
        return [
            MemberModule(module, forward=lambda: autocast(self.recipe.train.precision, self.device))
            for module in modules
        ]

    def model_inputs(self, source: Source, ids: torch.Tensor) -> tuple[DataSplits, Source]:
        """Return the samples as the members take them: images, or cached features of a shared backbone."""
        module = self.modules[0].module
        if not (self.recipe.model.cache_features and isinstance(module, BackboneWithHead) and source.has_content_hash):
            return self.data, source
        features = through_backbone(self.recipe, self.data, source, module.backbone, device=self.device, ids=ids)
        prepare_features([features], self.executor, ids=ids)
        return replace(self.data, mean=(), std=()), features


def _check_ids(members: Sequence[int], total: int) -> list[int]:
    if not members or len(set(members)) < len(members) or not set(members) <= set(range(total)):
        raise RecipeError(
            f"members = {list(members)}: give distinct member ids from 0 to {total - 1}, such as {[0, total - 1]}"
        )
    return list(members)


def load_members(run: Run, numbers: Sequence[int]) -> list[torch.nn.Module]:
    """Return the networks of some members with the weights of the run folder."""
    check_task(run)
    components = run.components
    if run.info.model is not None and components.model is None:
        name = run.info.model.replace(":", ".").rpartition(".")[2]
        raise RunError(
            f"{run} was trained with {run.info.model!r}, a model that was passed in Python. Pass it again, as in "
            f"plateaux.open_run(path, model={name if name.isidentifier() else '...'})"
        )
    # The weights come from the run folder, so the file of pretrained weights may be gone.
    recipe = run.recipe.replaced(model={"weights": None, "sparsity": 0.0})
    components = replace(components, model_configs=run.info.model_configs or {})
    data = components.data or data_splits_info(run)
    modules = build_members(recipe, data, numbers, components)
    check_code(run, modules)
    shared = run.shared()
    for number, module in zip(numbers, modules, strict=True):
        names = shared_param_names(recipe, module)
        missing, unexpected = module.load_state_dict({**run.weights(number), **shared}, strict=False)
        if unexpected or set(missing) - names:
            raise RunError(
                f"The weights of member {number} do not match the model {run.recipe.model.name!r}: "
                f"missing {sorted(missing)[:3]}, unexpected {sorted(unexpected)[:3]}. Pass the model that the run was "
                "trained with: plateaux.open_run(path, model=...)"
            )
    return modules


def data_splits_info(run: Run) -> DataSplits:
    """Return the classes, shape, and normalization of the run's data, without samples."""
    info = run.info.data
    empty = InMemorySource(torch.empty(0), torch.empty(0))
    return DataSplits(
        name=info.name,
        train=empty,
        test=empty,
        classes=info.classes,
        shape=info.shape,
        mean=info.mean,
        std=info.std,
        labels=info.labels,
    )
