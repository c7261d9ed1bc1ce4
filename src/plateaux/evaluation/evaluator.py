"""Evaluation of a run's members on a split: by forward passes, or from cached logits."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plateaux.config.builders.data import eval_batches
from plateaux.config.recipe import fingerprint
from plateaux.config.specs import user_code
from plateaux.core.errors import RecipeError, RunError
from plateaux.core.executor import Collectives, all_reduce_max
from plateaux.core.metric import Metric
from plateaux.core.outputs import NoFeaturesError, OutputFn, features, logits
from plateaux.core.progress import Progress, WorkDone, log_messages
from plateaux.core.ranges import StoredInt
from plateaux.core.row_names import RowName, with_mean_of_members, with_member_ids
from plateaux.core.runtime import DTYPES
from plateaux.core.types import Batch, Estimate, TensorTree
from plateaux.data.sources import Source
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.evaluation import prediction_cache
from plateaux.evaluation.class_mask import check_maskable, mask_classes, with_class_numbers
from plateaux.evaluation.ensemble_sizes import mean_by_size, subsets_of_every_size
from plateaux.evaluation.finite import has_finite_weights, require_finite
from plateaux.evaluation.loaded_run import LoadedRun
from plateaux.evaluation.metric_loop import BatchOutputs, MemberSubset, accumulate, compute_rows, run_members
from plateaux.evaluation.prediction_cache import CacheMode, PredictionCache, PredictionWriter
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.run_warnings import Found, result_warnings
from plateaux.evaluation.splits import EvalSplit, ResizedSource, eval_split
from plateaux.storage.json_shapes import read_shape
from plateaux.storage.run import RunLike

CLASSES = "classes"  # name of a metric that is not shown
SELECTION = "selection.json"  # of a soup: the samples that its members were selected on
RunSums = dict[tuple[MemberSubset | None, str], TensorTree]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvalStream:
    """The outputs of all members on a split, batch by batch."""

    executor: Collectives  # reduces what is computed from the batches
    batches: Iterator[BatchOutputs]
    metadata: dict[str, Any]  # describes the samples
    samples: int


class Evaluator(LoadedRun):
    """Computes metrics of a run's members and writes the results to the run folder."""

    _opened: tuple[EvalSplit, tuple[Source, torch.Tensor]] | None = None

    def __init__(
        self,
        run: RunLike,
        *,
        members: Sequence[int] | None = None,
        limit: int | None = None,
        device: str | None = None,
        executor: Mapping[str, Any] | None = None,
        cache_logits: CacheMode = "float32",
    ) -> None:
        super().__init__(run, members=members, device=device, executor=executor)
        self.limit, self.cache_logits = limit, cache_logits
        self.warnings: dict[str, Found] = {}  # about the results on test and validation samples, by split

    def evaluate(
        self,
        split: EvalSplit,
        metrics: Mapping[str, Metric],
        *,
        ensemble_sizes: bool = False,
        progress: Progress = log_messages,
    ) -> list[MetricResult]:
        """Return the results of the metrics on one split."""
        if split.classes is not None:
            check_maskable(metrics, split.name)
        everyone = tuple(range(len(self.numbers)))
        subsets = [everyone]
        if ensemble_sizes:
            subsets += [subset for subset in subsets_of_every_size(len(everyone)) if subset != everyone]
        is_checked = split.name in ("test", "validation") and any(m.output == logits for m in metrics.values())
        measured = {**metrics, CLASSES: Metric(_count_classes, lambda _: {})} if is_checked else metrics
        try:
            sums, metadata = self.accumulate(split, measured, subsets, progress=progress)
        except NoFeaturesError as problem:
            rest = {name: metric for name, metric in metrics.items() if metric.output != features}
            if not rest:
                raise
            logger.warning("%s is skipped: %s", ", ".join(metrics.keys() - rest.keys()), problem)
            return self.evaluate(split, rest, ensemble_sizes=ensemble_sizes, progress=progress)
        if ensemble_sizes and any(metric.output == features for metric in metrics.values()):
            logger.warning("metrics of features are not computed for other ensemble sizes")
        results = []
        for name, metric in metrics.items():
            rows = {
                subset: with_class_numbers(compute_rows(metric, sums[subset, name]), split.classes)
                for subset in subsets
                if (subset, name) in sums
            }
            if everyone not in rows:
                logger.warning(
                    "%s is skipped: it needs at least %d members, and there is %d",
                    name,
                    metric.min_members,
                    len(everyone),
                )
                continue
            named = with_mean_of_members(with_member_ids(rows[everyone], self.numbers))
            results.append(self.result(name, split.name, named, metric, metadata))
            if ensemble_sizes and metric.output != features:
                results.append(self.result(f"{name} by size", split.name, mean_by_size(rows), metric, metadata))
        if (everyone, CLASSES) in sums:
            counts, totals = (sums[everyone, CLASSES][name].tolist() for name in ("counts", "totals"))
            members = dict(zip(self.numbers, totals, strict=True))
            self.warnings[split.name] = result_warnings(split.name, results, counts, members)
        return results

    def accumulate(
        self,
        split: EvalSplit,
        metrics: Mapping[str, Metric],
        subsets: Sequence[MemberSubset],
        *,
        progress: Progress = log_messages,
    ) -> tuple[RunSums, dict[str, Any]]:
        """Return the sums of every metric for every subset of members, and a description of the samples."""
        outputs = list(dict.fromkeys(metric.output for metric in metrics.values()))
        stream = self.run_members(split, outputs)
        done = 0

        def count(samples: int) -> None:
            nonlocal done
            done += samples
            progress(WorkDone(done, stream.samples))

        sums = accumulate(stream.executor, stream.batches, metrics, subsets, samples=stream.samples, on_batch=count)
        return sums, stream.metadata

    def run_members(self, split: EvalSplit, outputs: Sequence[OutputFn]) -> EvalStream:
        """Return the outputs of all members on the samples: from the cache, or by forward passes."""
        identity = self.split_identity(split)
        cache = self._cache(identity)
        logger.debug("%s: cached logits are looked up in %s", split.name, self.run.store.root / cache.folder)
        needs_forward = not self._may_cache(split) or not cache.has(self.hashes, outputs)
        if not all_reduce_max(self.executor, int(needs_forward)):  # all processes read the cache, or none
            ids, dtype = cache.ids(), cache.dtype(self.hashes)
            self._check_not_selected_on(identity, ids)
            logger.info("%s: using cached %s logits of %s samples", split.name, dtype, f"{len(ids):,}")
            metadata = {**_describe(identity, len(ids)), "logits": f"cached, {dtype}"}
            cached = cache.read(self.hashes, outputs)
            hint = (
                f"These are cached logits: delete {cache.folder} in the run folder, or use --cache-logits off "
                '(cache_logits="off")'
            )
            stream = require_finite(cached, SINGLE_PROCESS, self.numbers, split.name, lambda _: hint)
            return EvalStream(SINGLE_PROCESS, stream, metadata, len(ids))
        source, ids = self._open(split, identity)
        data, source = self.model_inputs(source, ids)
        batches = eval_batches(self.recipe, data, source, ids, device=self.device, shard=self.executor.shard)
        stream = mask_classes(run_members(self.executor, self.modules, batches, outputs), split.classes)
        stream = require_finite(stream, self.executor, self.numbers, split.name, self._explain_nonfinite)
        if self._may_cache(split):
            precision = torch.float32 if self.cache_logits == "float32" else DTYPES["fp16"]
            writer = PredictionWriter(cache, self.hashes, precision, len(ids), prediction_cache.MAX_CACHE_BYTES)
            stream = writer.record(stream, self.executor)
        return EvalStream(self.executor, stream, {**_describe(identity, len(ids)), "logits": "computed"}, len(ids))

    def split_identity(self, split: EvalSplit) -> dict[str, Any]:
        """Return what identifies the samples of a split."""
        first = split.limit or self.limit
        limit = {"first": first} if first else {}
        source = None if split.is_own else self.open_split(split)[0]
        resized = {"resized": source.resizing} if isinstance(source, ResizedSource) and source.resizing else {}
        return {"split": split.name, **split.metadata, "fingerprint": self.split_fingerprint(split), **limit, **resized}

    def split_fingerprint(self, split: EvalSplit) -> str:
        """Return the fingerprint of the samples, from the run folder where it is recorded."""
        if not split.is_own:
            return self.open_split(split)[0].fingerprint()
        is_train = split.family in ("train", "validation")
        return (self.data_info.train if is_train else self.data_info.test).fingerprint

    def open_split(self, split: EvalSplit) -> tuple[Source, torch.Tensor]:
        """Return the samples of a split and their ids; the last split stays open, because opening may read files."""
        if self._opened is None or self._opened[0] is not split:
            self._opened = (split, split.open(self.recipe, self.data))
        return self._opened[1]

    def result(
        self, name: str, split: str, rows: Mapping[RowName, Estimate], metric: Metric, metadata: Mapping[str, Any]
    ) -> MetricResult:
        """Return one result with the weights, data, and definition that it depends on."""
        names = [str(RowName.member(number)) for number in self.numbers]
        weights = dict(zip(names, self.weight_sources, strict=True))
        hashes = dict(zip(names, self.hashes, strict=True))
        facts = (metric.group, metric.percent, metric.definition, user_code(name, self.components.trust))
        return MetricResult(name, split, rows, metric.higher_is_better, weights, metadata, hashes, *facts)

    def write(self, result: MetricResult) -> None:
        """Write a result to the run folder. An equal evaluation has the same file name."""
        name = "".join(c if c.isalnum() or c in "_-" else "_" for c in result.metric)
        file = f"metrics/{name}-{fingerprint(result.identity())}.json"
        self.run.store.put_json(file, result.to_dict(), skip_unchanged=True)

    def held_out_split(self, name: str) -> EvalSplit:
        """Return a split that the members were not trained on."""
        split = eval_split(self.recipe, self.data_info, name)
        if split.family == "train":
            raise RecipeError(
                "split = 'train': the members were trained on these samples, so a selection on them overfits. Use "
                "validation or test"
            )
        return split

    def _cache(self, identity: Mapping[str, Any]) -> PredictionCache:
        inputs = {"mean": self.data_info.mean, "std": self.data_info.std}
        samples = {name: value for name, value in identity.items() if name != "resized"}  # part of the fingerprint
        return PredictionCache(self.run.store, {**samples, **inputs, "precision": self.recipe.train.precision})

    def _open(self, split: EvalSplit, identity: Mapping[str, Any]) -> tuple[Source, torch.Tensor]:
        source, ids = self.open_split(split)
        ids = ids[: identity.get("first")]
        self.check_same_data(split, source, identity)
        self._check_not_selected_on(identity, ids)
        return source, ids

    def _may_cache(self, split: EvalSplit) -> bool:
        """Whether to read and write the cache. It cannot identify a Python model, or samples without a hash."""
        if self.cache_logits == "off":
            return False
        data = self.components.data
        sources = [] if data is None else [data.train, data.test]
        if not split.is_own:
            sources.append(self.open_split(split)[0])
        return self.components.model is None and all(source.has_content_hash for source in sources)

    def check_same_data(self, split: EvalSplit, source: Source, identity: Mapping[str, Any]) -> None:
        """Raise an error if the samples of the run's own splits have changed since training."""
        if split.is_own and split.family != "corrupted" and source.fingerprint() != identity["fingerprint"]:
            raise RunError(
                f"The {split.family} samples have changed since this run was trained (fingerprint "
                f"{source.fingerprint()}, recorded {identity['fingerprint']}). Restore the data, or give new "
                'samples a name: plateaux.evaluate(run, split={"new": (x, y)})'
            )

    def _explain_nonfinite(self, bad: Sequence[int]) -> str:
        """Return the cause of NaN predictions of these members, and what to do."""
        held = [self.numbers[row] for row in self.executor.local_members(len(self.numbers))]
        modules = dict(zip(held, self.modules, strict=True))
        damaged = [number for number in bad if number in modules and not has_finite_weights(modules[number].module)]
        rest = ",".join(str(number) for number in self.numbers if number not in bad)
        without = f", or leave them out: --members {rest}" if rest else ""
        if damaged:
            return f"The weights of {', '.join(map(str, damaged))} contain NaN or infinity. Train them again{without}"
        return f'The networks overflow on these samples. Evaluate with train.precision = "fp32"{without}'

    def _check_not_selected_on(self, identity: Mapping[str, Any], ids: torch.Tensor) -> None:
        """Raise an error for samples that the weights were selected on, as those of a greedy soup are."""
        if not self.run.store.has(SELECTION):
            return
        store = self.run.store
        selection = read_shape(_SoupSelection, store.get_json(SELECTION), store.root / SELECTION, "restore it")
        is_same = selection.fingerprint == identity["fingerprint"] and selection.kind == "greedy soup"
        if is_same and bool(torch.isin(ids, torch.tensor(selection.ids, dtype=ids.dtype)).any()):
            raise RunError(
                f"The members of {self.run.store.root} were selected on these samples ({selection.split}), so "
                "results on them are optimistically biased. Use other samples, such as --split test"
            )


@dataclass(frozen=True, slots=True)
class _SoupSelection:
    """What is read from the record of the samples that a soup was selected on."""

    kind: str
    fingerprint: str
    split: str
    ids: tuple[StoredInt, ...]


def _count_classes(outputs: torch.Tensor, batch: Batch) -> TensorTree:
    """Return the number of samples of each class, and the sum of each member's outputs, which tells equal members."""
    y, classes = batch.y, outputs.shape[2] if outputs.ndim > 2 else 0
    is_class = y.ndim == 1 and not y.is_floating_point()
    y = y[(y >= 0) & (y < classes)] if is_class else y.new_zeros(0, dtype=torch.int64)
    return {"counts": torch.bincount(y, minlength=classes), "totals": outputs.double().flatten(1).sum(1)}


def _describe(identity: Mapping[str, Any], samples: int) -> dict[str, Any]:
    return {**{name: value for name, value in identity.items() if name != "split"}, "samples": samples}
