"""A measurement in shards is the whole one: the same tables, the same sums, whoever asked whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import GIVEN, patches, recipe

import plateaux
from plateaux.config.components import Components
from plateaux.core.metric import Metric
from plateaux.core.progress import WorkDone
from plateaux.core.types import Estimate, TensorTree
from plateaux.data.sources import DataSplits
from plateaux.distributed.executors.ray import RayExecutor
from plateaux.evaluation import ray_evaluator
from plateaux.evaluation.evaluator import RunSums
from plateaux.evaluation.options import EvalOptions
from plateaux.evaluation.ray_evaluator import EvalShard
from plateaux.storage.run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("spread") / "run"
    plateaux.train(recipe("deep_ensemble", data={"test_samples": 600}), out, **GIVEN.keywords())
    return out


@pytest.fixture(autouse=True)
def _in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of two places that is this process."""

    def map_(
        _: RayExecutor, jobs: Sequence[Sequence[Any]], ask: Any, answer: Any, parcel: Any
    ) -> Iterator[tuple[Any, Any]]:
        for some in jobs:
            yield some[0], answer(parcel, some[0], *[ask(parcel, job) for job in some])

    monkeypatch.setattr(RayExecutor, "map_reduce", map_)
    monkeypatch.setattr(RayExecutor, "max_workers", lambda _: 2)


def numbers(found: list[Any]) -> dict[tuple[str, str], float]:
    return {(each.metric, name): value.value for each in found for name, value in each.rows.items()}


@pytest.mark.parametrize("samples", [None, 300])
def test_shards_add_up_to_what_one_walk_finds(run: Path, samples: int | None) -> None:
    options = EvalOptions(ensemble_sizes=True, limit=samples, no_cache=True, cache_logits="off")
    here = numbers(plateaux.evaluate(run, metrics="all", options=options, **GIVEN.keywords()))
    events: list[Any] = []
    on_ray = replace(options, executor={"name": "ray"})
    there = plateaux.evaluate(run, metrics="all", options=on_ray, progress=events.append, **GIVEN.keywords())
    assert numbers(there) == pytest.approx(here, rel=1e-12, abs=1e-15, nan_ok=True)
    assert events[-1] == WorkDone(samples or 600, samples or 600)
    assert len(events) > 1
    assert there[0].data["logits"] == "computed on a cluster"
    assert not list(run.glob("predictions/*"))


def test_some_members_and_data_from_python_are_asked_too(tmp_path: Path) -> None:
    data: DataSplits = patches(samples=19, test_samples=300)
    components = Components(data=data, trust=("cases",))
    plateaux.train(recipe("deep_ensemble", "conv"), tmp_path / "run", **components.keywords())
    asked: dict[str, Any] = {"metrics": ["accuracy", "nll"], **components.keywords()}
    options = EvalOptions(members=[0, 2], no_cache=True, cache_logits="off")
    here = numbers(plateaux.evaluate(tmp_path / "run", options=options, **asked))
    on_ray = replace(options, executor={"name": "ray"})
    there = numbers(plateaux.evaluate(tmp_path / "run", options=on_ray, **asked))
    assert there == pytest.approx(here, rel=1e-12)


def test_members_are_asked_in_blocks_where_samples_are_few(run: Path) -> None:
    panel = ray_evaluator.RayEvaluator(Run.open(run), components=GIVEN, options=EvalOptions(executor={"name": "ray"}))
    assert [len(each) for each in panel._shards(200)] == [3]
    assert [len(each) for each in panel._shards(600)] == [2, 2, 2]
    assert [each[0].stop for each in panel._shards(10_000)] == [2304, 4608, 6912, 9216, 10_000]


def test_tables_stay_below_the_bound(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_evaluator, "MAX_SHARD_BYTES", 1)
    panel = ray_evaluator.RayEvaluator(Run.open(run), components=GIVEN, options=EvalOptions(executor={"name": "ray"}))
    assert {each[0].stop - each[0].start for each in panel._shards(1024)} == {256}


def test_rows_to_keep_are_laid_where_they_belong() -> None:
    def finish(_: TensorTree) -> dict[str, Estimate]:
        return {}

    kept = {"rows": Metric(lambda *_: {}, finish, reduce="cat"), "sum": Metric(lambda *_: {}, finish)}
    whole: RunSums = {}
    for start in (2, 0):
        shard = EvalShard((0,), start, start + 2)
        found = {(None, "rows"): {"r": torch.tensor([start, start + 1])}, (None, "sum"): {"s": torch.tensor(1.0)}}
        ray_evaluator.merge(whole, found, kept, shard, 4)
    assert whole[None, "rows"]["r"].tolist() == [0, 1, 2, 3]
    assert float(whole[None, "sum"]["s"]) == 2.0


def test_features_of_different_widths_lie_stack_padded() -> None:
    table = ray_evaluator._stack_padded([torch.ones(1, 2, 3), torch.ones(2, 2, 5)])
    assert table.shape == (3, 2, 5)
    assert table[0].sum() == 6
