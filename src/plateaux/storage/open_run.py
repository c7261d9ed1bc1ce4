"""Open a run with the objects of the caller, and compare their code with that of the training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from plateaux.config.code import changed_code, code_hashes
from plateaux.config.components import Components
from plateaux.config.experiment import Experiment
from plateaux.core.errors import RunError
from plateaux.storage.run import Run, RunLike

if TYPE_CHECKING:
    from torch import nn

    from plateaux.config.components import Model
    from plateaux.core.method import LossFn
    from plateaux.data.sources import DataSplits, Source


def open_run(
    path: RunLike,
    *,
    data: DataSplits | None = None,
    model: Model | None = None,
    loss: LossFn | None = None,
    unlabeled: Source | None = None,
    trust: Sequence[str] = (),
    download: bool = False,
    accept_changes: bool = False,
) -> Run:
    """Open a run that was trained before, with the objects that were passed to `train` in Python.

    The code of models, methods, and losses, and the data, must be those of the training; otherwise the first use
    raises an error that names what has changed.

    Args:
        path: The run folder, or its URL.
        data: The data that the run was trained with. Data of `plateaux.from_arrays` are read from the run folder.
        model: The model that the run was trained with.
        loss: The loss that the run was trained with.
        unlabeled: The unlabeled samples that the run was trained with.
        trust: Modules whose functions the recipe may call.
        download: Allow downloads: of names `hf:user/name`, and of pretrained weights of timm.
        accept_changes: Use code that has changed since the training; its first use records the change in the run.
    """
    run = Run.open(path, Components(data, model, loss, unlabeled, tuple(trust), download))
    return replace(run, accept_changes=accept_changes)


def check_code(run: Run, networks: Iterable[nn.Module] = ()) -> None:
    """Raise RunError if code that the weights depend on has changed since the training, or record the change."""
    if run.components.model is not None and run.info.model is None:
        raise RunError(f"The recipe of {run} names its model, {run.recipe.model.name!r}; open the run without model=")
    hashes = code_hashes(run.recipe, run.components, networks)
    changed = changed_code(run.info.code, hashes)
    if not changed:
        return
    if not run.accept_changes:
        raise RunError(
            f"The code of the {' and the '.join(changed)} is not that of the training of {run}. Restore it, or record "
            "the change: plateaux.open_run(path, ..., accept_changes=True)"
        )
    code = {**run.info.code, **{name: hashes[name] for name in changed}}
    info = run.info.with_changes(replace(run.info, code=code))
    run.update_info({"code": code, "accepted_changes": info.to_dict()["accepted_changes"]})


def check_task(run: Run) -> None:
    """Raise RunError if the labels of a run are no classes: answers computed from its logits would be meaningless."""
    labels, classes = run.info.inputs and run.info.inputs.labels, run.info.data.classes
    if classes < 2 or (labels and (labels.shape or "int" not in labels.dtype)):
        found = f", {labels.dtype} of shape {['N', *labels.shape]}" if labels else ""
        raise RunError(
            f"The labels of {run} are not classes ({classes} outputs{found}). Only classification is supported: "
            "integer class numbers of shape [N], and at least 2 classes"
        )


def resolved(run: Run) -> Experiment:
    """Return the experiment of a run with the autotuned precision and memory format."""
    recipe = run.resolved_recipe()
    return run.experiment if recipe is run.recipe else run.experiment.replaced(train=dict(recipe.train))


def without_stored_data(run: Run) -> Run:
    """Return a run without data in memory that its folder contains; they are read from there when used."""
    if run.components.data is None or not run.components.data.keep_in_run:
        return run
    return replace(run, experiment=Experiment(run.recipe, replace(run.components, data=None)))
