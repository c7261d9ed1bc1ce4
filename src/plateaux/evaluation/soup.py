"""Members put together anew: one network of several (soup), or a weighted ensemble chosen from several runs.

Both choose on held-out samples and record which: numbers on the same samples are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plateaux.config.builders.data import bn_update_batches, eval_batches, train_val_split
from plateaux.config.builders.model import architecture_hash
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import Recipe
from plateaux.config.schema import member_options, member_value
from plateaux.core import registry
from plateaux.core.callbacks import Say
from plateaux.core.errors import RunError
from plateaux.core.types import TensorTree
from plateaux.ensembles.log_probs import log_probs
from plateaux.ensembles.soup import check_barrier, greedy, interpolate, uniform
from plateaux.evaluation.evaluator import SELECTION, Evaluator, _held_out
from plateaux.evaluation.splits import EvalSplit
from plateaux.models.modes import update_bn
from plateaux.storage.import_weights import store_weights
from plateaux.storage.run import Run, RunLike
from plateaux.storage.run_info import RunInfo

MAX_BARRIER = 0.1  # nats that the loss may rise between two members
PROBE = 1000  # held-out samples that the rise is looked for on


def soup(
    root: RunLike,
    out: str | Path,
    *,
    strategy: Literal["uniform", "greedy"] = "uniform",
    split: str = "validation",
    accept: Literal["better", "as good"] = "better",
    members: Sequence[int] | None = None,
    max_barrier: float = MAX_BARRIER,
    components: Components = NO_COMPONENTS,
    device: str | None = None,
    say: Say = lambda _: None,
) -> Run:
    """Make a run of one network: the mean of the members' weights, of all or of those that help on held-out samples.

    Members that did not start from the same weights lie in different basins, and their mean lies between them: that is
    refused when the loss along the straight line from one to the other rises by more than `limit` nats.
    """
    panel = Evaluator(Run.open(root), members, components=components, device=device, say=say)
    if len({architecture_hash(panel.recipe, number, components) for number in panel.numbers}) > 1:
        raise RunError("A soup is of equal networks, and these members differ in architecture; choose some: --members")
    if panel.recipe.model.lora is not None:
        raise RunError(
            "A soup is a mean of weights, and the mean of two adapters' factors is not what they say on average; merge "
            "every member first (plateaux.models.lora.merge_lora), adopt the merged weights, and make a soup of those"
        )
    pot = SoupEvaluator(panel, _held_out(panel, split))
    trees = [panel.run.weights(number) for number in panel.numbers]
    same_start = panel.recipe.model.weights is not None
    for number, tree in zip(panel.numbers[1:], trees[1:], strict=True):
        barrier = interpolate(trees[0], tree, pot.loss, points=5).barrier
        say(f"between members {panel.numbers[0]} and {number} the loss rises by {barrier:.3f} nats")
        check_barrier(barrier, max_barrier, same_start)
    about: dict[str, Any] = {"kind": f"{strategy} soup", "of": str(root), "split": split, "ids": pot.ids.tolist()}
    about["fingerprint"] = pot.fingerprint
    if strategy == "greedy":
        found = greedy(trees, pot.accuracy, accept=accept)
        chosen = [panel.numbers[position] for position in found.chosen]
        about |= {"members": chosen, "scores": list(found.scores)}
        mixed = uniform(trees, found.weights)
    else:
        about |= {"members": list(panel.numbers)}
        mixed = uniform(trees)
    pot.load(mixed)
    state = pot.module.state_dict()
    mixed = {name: state[name].cpu() for name in mixed}  # with the statistics taken anew
    run = Run.begin(out, _alone(panel), RunInfo(panel.run.info.data))
    run.put_shared(panel.run.shared())
    store_weights(run, [mixed], [f"{about['kind']} of members {about['members']} of {root}"])
    run.store.put_json(SELECTION, about)
    return run


class SoupEvaluator:
    """One network that takes any weights, and is judged on held-out samples."""

    def __init__(self, panel: Evaluator, target: EvalSplit) -> None:
        self.panel = panel
        source, ids = target.open(panel.recipe, panel.data)
        self.ids = ids[: target.limit]
        self.data, self.source = panel.ready(source, self.ids)
        self.fingerprint = panel.known(target)["fingerprint"]
        module = panel.modules[0].module
        assert isinstance(module, nn.Module)
        self.module = module
        self.normed = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())

    def load(self, tree: TensorTree) -> None:
        """Put weights in, and take BatchNorm's statistics of them."""
        self.module.load_state_dict(tree, strict=False)
        if self.normed:
            recipe, panel = self.panel.recipe, self.panel
            data, source = panel.ready(panel.data.train, train_val_split(recipe, panel.data)[0])
            update_bn(self.module, bn_update_batches(recipe, replace(data, train=source), panel.device))

    def loss(self, tree: TensorTree) -> float:
        return self._judged(tree, self.ids[:PROBE])[0]

    def accuracy(self, tree: TensorTree) -> float:
        return self._judged(tree, self.ids)[1]

    @torch.no_grad()
    def _judged(self, tree: TensorTree, ids: Tensor) -> tuple[float, float]:
        self.load(tree)
        view, panel = self.panel.modules[0], self.panel
        loss = right = 0.0
        for batch in eval_batches(panel.recipe, self.data, self.source, ids, device=panel.device):
            log_p = log_probs(view(batch.x)[None])[0]
            loss -= float(log_p.gather(-1, batch.y[:, None]).double().sum())
            right += float((log_p.argmax(-1) == batch.y).sum())
        return loss / len(ids), right / len(ids)


def _alone(panel: Evaluator) -> Recipe:
    """Return the recipe of one such network; how the members were trained is not its story."""
    recipe, number = panel.run.recipe, panel.numbers[0]
    name = member_value("model.name", recipe.model.name, number, recipe.members)
    factory = panel.components.model or registry.model.get(name, allow=panel.components.trust)
    options = member_options(factory, recipe.model.options, number, recipe.members)
    kept_parts = ("backbone", "head", "image_size", "cache_features", "cache_dtype")
    stands = {part: getattr(recipe.model, part) for part in kept_parts if getattr(recipe.model, part) is not None}
    width = {"head_width": member_value("model.head_width", recipe.model.head_width, number, recipe.members)}
    model = {"name": name, "freeze": list(recipe.model.freeze), **stands, **width, **options}
    kept = {part: getattr(panel.recipe.train, part) for part in ("epochs", "precision", "memory_format")}
    data = recipe.data.model_dump(exclude_none=True)
    return Recipe.from_dict({"members": 1, "seed": recipe.seed, "data": data, "model": model, "train": kept})
