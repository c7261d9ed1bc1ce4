"""The members of a run, ready to be asked about samples: by a forward pass, or from what is kept of an earlier one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations
from math import comb
from random import Random
from typing import Any

import torch

from plateaux.config.builders.data import build_data, eval_batches
from plateaux.config.builders.training import build_executor
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import fingerprint
from plateaux.core.callbacks import Say, Seen, nothing
from plateaux.core.errors import RecipeError, RunError
from plateaux.core.executor import Executor, all_reduce_max
from plateaux.core.member import MemberModule
from plateaux.core.metric import Metric
from plateaux.core.outputs import NoFeaturesError, OutputFn, features
from plateaux.core.runtime import DTYPES, FORMATS, autocast, configure_runtime, get_device, local_processes
from plateaux.core.stats.estimates import mean_of_paired
from plateaux.core.types import Estimate, TensorTree
from plateaux.data.sources import DataSplits, Source
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.evaluation import prediction_cache
from plateaux.evaluation.loading import data_splits_info, load_members
from plateaux.evaluation.metric_loop import BatchOutputs, MemberSubset, accumulate, run_members
from plateaux.evaluation.prediction_cache import CacheDtype, PredictionCache, PredictionWriter
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.row_names import (
    MEAN_OF_PAIRS,
    MEAN_PROBABILITY,
    PART,
    TOGETHER,
    _with_mean,
    row_name,
    with_member_ids,
)
from plateaux.evaluation.splits import EvalSplit, eval_split
from plateaux.models.backbone import BackboneWithHead
from plateaux.storage.feature_cache import prepare_features, through_backbone
from plateaux.storage.run import Run
from plateaux.storage.run_info import DataInfo

SELECTION = "selection.json"  # of a soup: the samples its members were chosen on
SUBSETS = 30  # at most so many ensembles of one size are averaged


class Evaluator:
    """Members of a run, ready to be asked about samples; nothing is read or built before it is needed."""

    def __init__(
        self,
        run: Run,
        members: Sequence[int] | None = None,
        *,
        components: Components = NO_COMPONENTS,
        device: str | None = None,
        executor: Mapping[str, Any] | None = None,
        cache_logits: CacheDtype = "float32",
        say: Say = nothing,
    ) -> None:
        self.run, self.components, self.cache_logits, self.say = run, components, cache_logits, say
        self.recipe = run.resolved_recipe()
        self.numbers = run.trained_members() if members is None else _numbers(members, self.recipe.members)
        if executor is not None:
            self.recipe = self.recipe.replaced(executor=dict(executor))
        self.executor: Executor = SINGLE_PROCESS if executor is None else build_executor(self.recipe, components)
        configure_runtime(processes=local_processes(), threads=self.recipe.executor.threads)
        if all_reduce_max(self.executor, int(not self.executor.local_members(len(self.numbers)))):
            raise RecipeError(
                f"{len(self.numbers)} members cannot be spread over so many processes; use fewer, or spread the "
                "samples: --set executor.data_parallel=N"
            )
        self.device = get_device(device or self.executor.device)
        self.data_info = run.info.data if components.data is None else DataInfo.from_splits(components.data)

    def close(self) -> None:
        """Give back what the executor holds, if it holds anything."""
        self.executor.close()

    @cached_property
    def data(self) -> DataSplits:
        return build_data(self.recipe, self.components)

    @cached_property
    def hashes(self) -> list[str]:
        """The hashes of the members' weights."""
        return [self.run.weights_hash(number) for number in self.numbers]

    @cached_property
    def weight_sources(self) -> list[str]:
        """Which weights each member's are: the last, the best, an average."""
        return [self.run.progress(number).weights_source for number in self.numbers]

    @cached_property
    def modules(self) -> list[MemberModule]:
        held = [self.numbers[row] for row in self.executor.local_members(len(self.numbers))]
        facts = data_splits_info(self.run) if self.components.data is None else self.components.data
        modules = [module.to(self.device).eval() for module in load_members(self.run, facts, held, self.components)]
        layout = FORMATS[self.recipe.train.memory_format]
        modules = [module.to(memory_format=layout) for module in modules]  # type: ignore[call-overload]
        return [
            MemberModule(module, forward=lambda: autocast(self.recipe.train.precision, self.device))
            for module in modules
        ]

    def evaluate(
        self,
        target: EvalSplit,
        metrics: Mapping[str, Metric],
        *,
        ensemble_sizes: bool = False,
        limit: int | None = None,
        no_cache: bool = False,
        seen: Seen = nothing,
    ) -> list[MetricResult]:
        """Return what the measures find about these members on these samples."""
        everyone = tuple(range(len(self.numbers)))
        casts = (
            [everyone, *(cast for cast in _nested_subsets(len(everyone)) if cast != everyone)]
            if ensemble_sizes
            else [everyone]
        )
        try:
            sums, about = self.accumulate(target, metrics, casts, samples=limit, fresh=no_cache, seen=seen)
            if ensemble_sizes and any(measure.output == features for measure in metrics.values()):
                self.say("measures of features have no curve over sizes")
        except NoFeaturesError as problem:
            rest = {name: measure for name, measure in metrics.items() if measure.output is not features}
            if not rest:
                raise
            self.say(f"{', '.join(metrics.keys() - rest.keys())} is left out: {problem}")
            return self.evaluate(target, rest, ensemble_sizes=ensemble_sizes, limit=limit, no_cache=no_cache, seen=seen)
        found = []
        for name, measure in metrics.items():
            rows = {cast: measure.compute(sums[cast, name]) for cast in casts if (cast, name) in sums}
            if everyone not in rows:
                self.say(f"{name} takes {measure.min_members} members, and there is {len(everyone)}: left out")
                continue
            numbered = _with_mean(with_member_ids(rows[everyone], self.numbers))
            found.append(self.result(name, target.name, numbered, measure, about))
            if ensemble_sizes and measure.output is not features:
                found.append(self.result(f"{name} by size", target.name, _curve(rows), measure, about))
        return found

    def accumulate(
        self,
        target: EvalSplit,
        measures: Mapping[str, Metric],
        casts: Sequence[MemberSubset],
        *,
        samples: int | None = None,
        fresh: bool = False,
        seen: Seen = nothing,
    ) -> tuple[dict[tuple[MemberSubset | None, str], TensorTree], dict[str, Any]]:
        """Return the measures' sums for every cast, and what is to be known of the samples."""
        offers = list(dict.fromkeys(measure.output for measure in measures.values()))
        executor, heard, about, total = self.run_members(target, offers, samples=samples, fresh=fresh)
        done = 0

        def count(more: int) -> None:
            nonlocal done
            done += more
            seen(done, total)

        return accumulate(executor, heard, measures, casts, samples=total, seen=count), about

    def run_members(
        self, target: EvalSplit, offers: Sequence[OutputFn], *, samples: int | None = None, fresh: bool = False
    ) -> tuple[Executor, Iterator[BatchOutputs], dict[str, Any], int]:
        """Return what members say about the samples: from what is kept, or by a forward pass."""
        known = self._described_all(target, samples)
        shelf = self._cache(known)
        lacks = fresh or not self._may_cache or not shelf.has(self.hashes, offers)
        if not all_reduce_max(self.executor, int(lacks)):  # all processes read, or none
            ids, dtype = shelf.ids(), shelf.dtype(self.hashes)
            self._check_not_selected_on(known, ids)
            self.say(f"{target.name}: from kept {dtype} logits of {len(ids):,} samples, no forward pass")
            about = {**_described(known, len(ids)), "logits": f"kept, {dtype}"}
            return SINGLE_PROCESS, shelf.read(self.hashes, offers), about, len(ids)
        source, ids = self._opened(target, known)
        data, source = self.ready(source, ids)
        batches = eval_batches(self.recipe, data, source, ids, device=self.device, shard=self.executor.shard)
        heard = run_members(self.executor, self.modules, batches, offers)
        if self.cache_logits != "no" and self._may_cache:
            kind = {"float32": torch.float32, "float16": DTYPES["fp16"]}[self.cache_logits]
            heard = PredictionWriter(
                shelf, self.hashes, kind, len(ids), self.say, prediction_cache.MAX_CACHE_BYTES
            ).record(heard, self.executor)
        return self.executor, heard, {**_described(known, len(ids)), "logits": "fresh"}, len(ids)

    def caches(self, target: EvalSplit, measures: Mapping[str, Metric], samples: int | None) -> bool:
        """Say whether all that these measures ask for is kept from an earlier walk."""
        offers = list(dict.fromkeys(measure.output for measure in measures.values()))
        return self._may_cache and self._cache(self._described_all(target, samples)).has(self.hashes, offers)

    def opened(self, target: EvalSplit, samples: int | None) -> tuple[dict[str, Any], torch.Tensor]:
        """Return what is to be known of the samples, and their ids, once they were found to be the right ones."""
        known = self._described_all(target, samples)
        return {name: value for name, value in known.items() if name != "split"}, self._opened(target, known)[1]

    def _described_all(self, target: EvalSplit, samples: int | None) -> dict[str, Any]:
        first = target.limit or samples
        return {"split": target.name, **target.metadata, **self.known(target), **({"first": first} if first else {})}

    def ready(self, source: Source, ids: torch.Tensor) -> tuple[DataSplits, Source]:
        """Return samples as members take them: as they are, or as features of the trunk where these are kept."""
        module = self.modules[0].module
        if not (self.recipe.model.cache_features and isinstance(module, BackboneWithHead) and source.has_content_hash):
            return self.data, source
        found = through_backbone(self.recipe, self.data, source, module.backbone, device=self.device, ids=ids)
        prepare_features([found], self.executor, ids=ids)
        return replace(self.data, mean=(), std=()), found

    def _cache(self, known: Mapping[str, Any]) -> PredictionCache:
        looks = {"mean": self.data_info.mean, "std": self.data_info.std, "precision": self.recipe.train.precision}
        return PredictionCache(self.run.store, {**known, **looks})

    def _opened(self, target: EvalSplit, known: Mapping[str, Any]) -> tuple[Source, torch.Tensor]:
        source, ids = target.open(self.recipe, self.data)
        ids = ids[: known.get("first")]
        self.check_same_data(target, source, known)
        self._check_not_selected_on(known, ids)
        return source, ids

    def result(
        self, name: str, on: str, rows: Mapping[str, Estimate], measure: Metric, about: Mapping[str, Any]
    ) -> MetricResult:
        """Return one measurement, with all that is to be known of it."""
        names = [f"member {number}" for number in self.numbers]
        weights = dict(zip(names, self.weight_sources, strict=True))
        hashes = dict(zip(names, self.hashes, strict=True))
        facts = (measure.group, measure.percent, measure.definition)
        return MetricResult(name, on, rows, measure.higher_is_better, weights, about, hashes, *facts)

    def write(self, found: MetricResult) -> None:
        """Keep a measurement in the run folder; the same question is the same object."""
        name = "".join(c if c.isalnum() or c in "_-" else "_" for c in found.metric)
        self.run.store.put_json(
            f"metrics/{name}-{fingerprint(found.question())}.json", found.to_dict(), skip_unchanged=True
        )

    @property
    def _may_cache(self) -> bool:
        """Whether other calls can be told apart: not where Python hands over a network, or samples without a hash."""
        sources = [] if self.components.data is None else [self.components.data.train, self.components.data.test]
        return self.components.model is None and all(source.has_content_hash for source in sources)

    def check_same_data(self, target: EvalSplit, source: Source, known: Mapping[str, Any]) -> None:
        """Refuse samples of the run's own sets that are not those it was made with."""
        if target.family in ("test", "train", "validation") and source.fingerprint() != known["fingerprint"]:
            raise RunError(
                f"The {target.family} samples are not those this run was made with (fingerprint "
                f"{source.fingerprint()} and not {known['fingerprint']}). Put the data back, or hand the new ones over "
                "in Python: plateaux.Components"
            )

    def _check_not_selected_on(self, known: Mapping[str, Any], ids: torch.Tensor) -> None:
        """Refuse samples that the weights were chosen on, as a greedy soup's were."""
        if not self.run.store.has(SELECTION):
            return
        chosen = self.run.store.get_json(SELECTION)
        same = chosen.get("fingerprint") == known["fingerprint"] and chosen.get("kind") == "greedy soup"
        if same and bool(torch.isin(ids, torch.tensor(chosen["ids"], dtype=ids.dtype)).any()):
            raise RunError(
                f"The members of {self.run.store.root} were chosen on these samples ({chosen['split']}); numbers on "
                "them would flatter. Choose others, such as --split test"
            )

    def known(self, target: EvalSplit) -> dict[str, str]:
        """Return the fingerprint of the samples, from the run's own record where it has one."""
        if target.family in ("train", "validation"):
            return {"fingerprint": self.data_info.train.fingerprint}
        if target.labeled:
            return {"fingerprint": self.data_info.test.fingerprint}
        return {"fingerprint": target.open(self.recipe, self.data)[0].fingerprint()}


def _described(known: Mapping[str, Any], samples: int) -> dict[str, Any]:
    return {**{name: value for name, value in known.items() if name != "split"}, "samples": samples}


def _numbers(members: Sequence[int], total: int) -> list[int]:
    if not members or len(set(members)) < len(members) or not set(members) <= set(range(total)):
        raise RecipeError(
            f"members {list(members)}: give different numbers from 0 to {total - 1}, such as {[0, total - 1]}"
        )
    return list(members)


def _nested_subsets(members: int) -> list[MemberSubset]:
    """Return ensembles of every size: all there are, or SUBSETS of them by a seeded draw."""
    found: list[MemberSubset] = []
    for size in range(1, members + 1):
        if comb(members, size) <= SUBSETS:
            found += combinations(range(members), size)
            continue
        chance, drawn = Random(size), set[MemberSubset]()
        while len(drawn) < SUBSETS:
            drawn.add(tuple(sorted(chance.sample(range(members), size))))
        found += sorted(drawn)
    return found


def _curve(rows: Mapping[MemberSubset, Mapping[str, Estimate]]) -> dict[str, Estimate]:
    """Return the mean over ensembles of each size, of the row that stands for all members."""
    found: dict[str, Estimate] = {}
    for size in sorted({len(cast) for cast in rows}):
        each = [_main(found_) for cast, found_ in rows.items() if len(cast) == size]
        for part in dict.fromkeys(part for one in each for part in one):
            name = f"{size} member{'s' * (size > 1)}"
            found[row_name(name, part) if part else name] = mean_of_paired([one[part] for one in each if part in one])
    return found


def _main(rows: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """Return the row of an ensemble: by mean probability, of all together, or the mean of pairs."""
    for wanted in (MEAN_PROBABILITY, TOGETHER, MEAN_OF_PAIRS, "member 0"):
        found = {name.partition(PART)[2]: v for name, v in rows.items() if name.partition(PART)[0] == wanted}
        if found:
            return found
    return {}


def _held_out(panel: Evaluator, on: str) -> EvalSplit:
    target = eval_split(panel.recipe, panel.data_info, on)
    if target.family == "train":
        raise RecipeError("Nothing is chosen on the samples it was trained on; hold some out: --split validation")
    return target
