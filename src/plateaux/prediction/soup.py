"""Model soups: a run of one network whose weights are the mean of several members.

Members are selected on held-out samples, and the run records which: results on the same samples are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plateaux.config.builders.data import bn_update_batches, eval_batches, train_val_split
from plateaux.config.builders.model import architecture_hash
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.config.schema import member_options, member_value
from plateaux.core import registry
from plateaux.core.errors import RunError
from plateaux.core.tensor_tree import is_finite
from plateaux.core.types import TensorTree
from plateaux.ensembles.log_probs import log_probs
from plateaux.ensembles.soup_weights import check_barrier, greedy, interpolate, uniform
from plateaux.evaluation.evaluator import SELECTION, Evaluator
from plateaux.evaluation.splits import EvalSplit
from plateaux.models.modes import update_bn
from plateaux.storage.import_weights import store_weights
from plateaux.storage.run import Run, RunLike
from plateaux.storage.run_info import RunInfo
from plateaux.storage.stored_data import copy_data

MAX_BARRIER = 0.1  # nats that the loss may rise between two members
BARRIER_SAMPLES = 1000  # held-out samples that the barrier is measured on
logger = logging.getLogger(__name__)


def soup(
    run: RunLike,
    out: str | Path,
    *,
    strategy: Literal["uniform", "greedy"] = "uniform",
    split: str = "validation",
    accept: Literal["better", "as good"] = "better",
    max_barrier: float = MAX_BARRIER,
    members: Sequence[int] | None = None,
    device: str | None = None,
) -> Run:
    """Create a run of one network: the mean of the weights of all members, or of those that help.

    Members that were trained from different initializations are usually separated by a loss barrier, so their mean is
    worse than any of them. This is refused if the loss on the line between two members rises too much.

    Args:
        run: A run, its folder, or its URL.
        out: The run folder to create.
        strategy: "uniform" averages all members, "greedy" adds members while they help on the held-out split.
        split: The held-out samples for the greedy strategy and the loss barrier.
        accept: Whether the greedy strategy adds a member that is "better" only, or also one that is "as good".
        max_barrier: The largest rise of the loss between two members, in nats.
        members: Ids of the members to average. None: all trained members.
        device: "cpu", "cuda", "cuda:1", ... None: the best available device.
    """
    evaluator = Evaluator(run, members=members, device=device)
    if len({architecture_hash(evaluator.recipe, number, evaluator.components) for number in evaluator.numbers}) > 1:
        raise RunError("The members differ in architecture; a soup needs equal networks. Choose some: --members 0,2")
    if evaluator.recipe.model.lora is not None:
        raise RunError(
            "A soup of LoRA members is not supported: the mean of two products of factors is not the product of the "
            "means. Merge every member first (plateaux.models.lora.merge_lora), import the merged weights, and make "
            "a soup of those"
        )
    network = SoupEvaluator(evaluator, evaluator.held_out_split(split))
    trees = [evaluator.run.weights(number) for number in evaluator.numbers]
    for number, tree in zip(evaluator.numbers, trees, strict=True):
        if not is_finite([values for values in tree.values() if values.is_floating_point()]):
            raise RunError(
                f"The weights of member {number} of {evaluator.run.store.root} contain NaN or infinity, so their mean "
                "would too. Train it again, or leave it out: --members"
            )
    same_start = evaluator.recipe.model.weights is not None
    for number, tree in zip(evaluator.numbers[1:], trees[1:], strict=True):
        barrier = interpolate(trees[0], tree, network.loss, points=5).barrier
        logger.info("loss barrier between members %d and %d: %.3f nats", evaluator.numbers[0], number, barrier)
        check_barrier(barrier, max_barrier, same_start)
    name = Path(str(evaluator.run.store.root)).resolve().name  # a run folder does not name folders of this machine
    selection: dict[str, Any] = {"kind": f"{strategy} soup", "of": name, "split": split}
    selection |= {"ids": network.ids.tolist(), "fingerprint": network.fingerprint}
    if strategy == "greedy":
        chosen = greedy(trees, network.accuracy, accept=accept)
        members = [evaluator.numbers[position] for position in chosen.chosen]
        selection |= {"members": members, "scores": list(chosen.scores)}
        mean = uniform(trees, chosen.weights)
    else:
        selection |= {"members": list(evaluator.numbers)}
        mean = uniform(trees)
    network.load(mean)
    state = network.module.state_dict()
    mean = {name: state[name].cpu() for name in mean}  # with updated BatchNorm statistics
    info = evaluator.run.info
    described = RunInfo(
        info.data,
        model=info.model,
        inputs=info.inputs,
        preprocessing=info.preprocessing,
        model_configs=info.model_configs,
        code=info.code,
    )
    made = Run.begin(out, Experiment(_single_member_recipe(evaluator), evaluator.components), described)
    copy_data(evaluator.run, made)
    origin = f"{selection['kind']} of members {selection['members']} of {name}"
    store_weights(made, [mean], [origin], shared=evaluator.run.shared())
    made.store.put_json(SELECTION, selection)
    return made


class SoupEvaluator:
    """One network that is evaluated on held-out samples with any weights."""

    def __init__(self, evaluator: Evaluator, split: EvalSplit) -> None:
        self.evaluator = evaluator
        source, ids = split.open(evaluator.recipe, evaluator.data)
        self.ids = ids[: split.limit]
        self.data, self.source = evaluator.model_inputs(source, self.ids)
        self.fingerprint = evaluator.split_fingerprint(split)
        module = evaluator.modules[0].module
        assert isinstance(module, nn.Module)
        self.module = module
        self.has_batchnorm = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())

    def load(self, weights: TensorTree) -> None:
        """Load weights and update the BatchNorm statistics for them."""
        self.module.load_state_dict(weights, strict=False)
        if self.has_batchnorm:
            recipe, evaluator = self.evaluator.recipe, self.evaluator
            train_ids = train_val_split(recipe, evaluator.data)[0]
            data, source = evaluator.model_inputs(evaluator.data.train, train_ids)
            update_bn(self.module, bn_update_batches(recipe, replace(data, train=source), evaluator.device))

    def loss(self, weights: TensorTree) -> float:
        return self._evaluate(weights, self.ids[:BARRIER_SAMPLES])[0]

    def accuracy(self, weights: TensorTree) -> float:
        return self._evaluate(weights, self.ids)[1]

    @torch.no_grad()
    def _evaluate(self, weights: TensorTree, ids: Tensor) -> tuple[float, float]:
        """Return the mean loss and the accuracy."""
        self.load(weights)
        member, evaluator = self.evaluator.modules[0], self.evaluator
        loss = correct = 0.0
        for batch in eval_batches(evaluator.recipe, self.data, self.source, ids, device=evaluator.device):
            log_p = log_probs(member(batch.x)[None])[0]
            loss -= float(log_p.gather(-1, batch.y[:, None]).double().sum())
            correct += float((log_p.argmax(-1) == batch.y).sum())
        return loss / len(ids), correct / len(ids)


def _single_member_recipe(evaluator: Evaluator) -> Recipe:
    """Return a recipe for one such network, without the method that trained the members."""
    recipe, number = evaluator.run.recipe, evaluator.numbers[0]
    name = member_value("model.name", recipe.model.name, number, recipe.members)
    factory = evaluator.components.model or registry.model.get(name, allow=evaluator.components.trust)
    options = member_options(factory, recipe.model.options, number, recipe.members)
    keys = ("backbone", "head", "image_size", "image_interpolation", "cache_features", "cache_dtype")
    backbone = {key: getattr(recipe.model, key) for key in keys if getattr(recipe.model, key) is not None}
    width = {"head_width": member_value("model.head_width", recipe.model.head_width, number, recipe.members)}
    model = {"name": name, "freeze": list(recipe.model.freeze), **backbone, **width, **options}
    train = {key: getattr(evaluator.recipe.train, key) for key in ("epochs", "precision", "memory_format")}
    data = recipe.data.model_dump(exclude_none=True)
    return Recipe.from_dict({"members": 1, "seed": recipe.seed, "data": data, "model": model, "train": train})
