"""SharpBalance in a custom loop: the stored partition, and the same weights as `plateaux train`."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import GIVEN, recipe, weights
from reference import partition_rules as reference
from torch import Tensor

from plateaux.config.builders.data import build_data, build_loader
from plateaux.config.builders.model import build_member
from plateaux.config.builders.training import build_lr_scheduler
from plateaux.core.errors import DataError, DivergedError, RecipeError, RunError
from plateaux.core.types import derive_seed
from plateaux.optim import SampleSharpness, SharpnessAware
from plateaux.storage.run import sam_set_path, sharpness_path
from plateaux.training.sharpbalance_partition import SharpBalancePartition
from plateaux.training.train import train
from tests.optim.custom_loops import same_bits

CPU = torch.device("cpu")


@pytest.mark.parametrize("rule", ["paper", "released_boost"])
@pytest.mark.parametrize("net", ["mlp", "dropout"])
def test_a_custom_loop_ends_at_the_weights_of_plateaux_train(rule: str, net: str, tmp_path: Path) -> None:
    method = {"name": "sharpbalance", "rho": 0.2, "partition_epoch": 2, "rule": rule}
    row = recipe("deep_ensemble", net, method=method, train={"epochs": 4}, samples=21)
    run = train(row, tmp_path / "run", **GIVEN.keywords())

    data = build_data(row, GIVEN)
    ids = torch.arange(21)
    loss_fn = torch.nn.CrossEntropyLoss(reduction="sum")
    partition = SharpBalancePartition(tmp_path / "partition", members=3, samples=21, rule=rule, seed=row.seed)
    nets, optimizers, schedulers, loaders = [], [], [], []
    for member in range(3):
        net_ = build_member(row, data, member, GIVEN).train()
        sgd = torch.optim.SGD(net_.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        nets.append(net_)
        optimizers.append(SharpnessAware(sgd, rho=0.2, model=net_))
        loaders.append(build_loader(row, data, member, shared=False, device=CPU, ids=ids))
        schedulers.append(build_lr_scheduler(row, optimizers[-1], loaders[-1].steps())[0])

    for epoch in range(4):
        if epoch == 2:
            x, y = data.train.fetch(ids)
            for member in range(3):
                sharpness = SampleSharpness(nets[member], loss_fn)
                parts = [sharpness(x[rows].float(), y[rows]) for rows in ids.split(8)]  # type: ignore[index]
                partition.add_scores(member, parts)
            partition.build()
        for member in range(3):
            net_, optimizer = nets[member], optimizers[member]
            for batch in loaders[member].epoch(epoch):
                optimizer.zero_grad()
                is_sam = partition.sam_set(member)(batch.index) if epoch >= 2 else torch.ones(len(batch)).bool()
                with optimizer.perturbed(mask=is_sam) as parts_of_batch:
                    for rows in parts_of_batch:
                        start = rows.start or 0 if isinstance(rows, slice) else int(rows[0])
                        seed = derive_seed(batch.seed, "from", start) if start else batch.seed
                        torch.manual_seed(derive_seed(seed, "forward", member))  # dropout as in the engine
                        assert isinstance(batch.x, Tensor)
                        (loss_fn(net_(batch.x[rows]), batch.y[rows]) / len(batch)).backward()
                optimizer.step()
                schedulers[member].step()

    for member, expected in enumerate(weights(run)):
        found = {name: value.detach() for name, value in nets[member].state_dict().items()}
        assert same_bits(found, {name: expected[name] for name in found})
        stored = run.store.get_array(sam_set_path(2, member))[1]
        assert np.array_equal(partition._store.get_array(f"sam_sets/{member}.safetensors")[1], stored)
        scores = partition._store.get_array(f"scores/{member}.safetensors")[1]
        np.testing.assert_allclose(scores, run.store.get_array(sharpness_path(2, member))[1], 1e-5)


def scores_of(members: int, samples: int) -> Any:
    return np.random.default_rng(3).gamma(1.0, size=(members, samples)).astype(np.float32)


def test_sets_are_exact_for_any_chunks(tmp_path: Path) -> None:
    scores = scores_of(3, 101)
    whole, chunked = (SharpBalancePartition(tmp_path / name, members=3, samples=101) for name in ("a", "b"))
    for member in range(3):
        whole.add_scores(member, scores[member])
        chunked.add_scores(member, (torch.from_numpy(part) for part in np.array_split(scores[member], 7)))
    assert whole.build() == chunked.build()
    for member, expected in enumerate(reference.paper(scores, 0.4)):
        for partition in (whole, chunked):
            found = partition.sam_set(member)(torch.arange(101)).nonzero().flatten().tolist()
            assert set(found) == expected


def test_a_partition_is_read_by_other_processes_and_after_a_restart(tmp_path: Path) -> None:
    scores = scores_of(2, 30)

    def opened() -> SharpBalancePartition:
        return SharpBalancePartition(tmp_path / "p", members=2, samples=30)

    opened().add_scores(1, scores[1])
    assert opened().missing() == [0]
    with pytest.raises(RunError, match=r"Members \[0\] have no scores"):
        opened().build()
    opened().add_scores(0, scores[0])
    with pytest.raises(RunError, match="call build"):
        opened().sam_set(0)
    opened().build()
    assert opened().is_built
    assert opened().sam_set(0)(torch.arange(30)).sum() == 12
    opened().add_scores(0, scores[0])  # new scores need a new partition
    with pytest.raises(RunError, match="call build"):
        opened().sam_set(0)


def test_memory_does_not_grow_with_the_number_of_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = np.linspace(0, 1, 5000, dtype=np.float32)
    monkeypatch.setattr("plateaux.training.partition.CHUNK_SAMPLES", 5000)
    peaks = []
    for chunks in (1, 4, 24):  # the first one warms up
        partition = SharpBalancePartition(tmp_path / str(chunks), members=2, samples=5000 * chunks)
        tracemalloc.start()
        for member in range(2):
            partition.add_scores(member, (chunk for _ in range(chunks)))
        partition.build()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < peaks[1] + 4e5  # the scores of 100,000 more samples take 0.8 MB


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([1.0, float("nan"), 2.0], "member 0 for sample 1 is NaN or infinite"),
        ([1.0, float("inf"), 2.0], "member 0 for sample 1 is NaN or infinite"),
        ([1.0, 2.0], "scores for 2 samples"),
        ([1.0, 2.0, 3.0, 4.0], "more than 3 samples"),
    ],
)
def test_invalid_scores_are_rejected_and_not_stored(scores: list[float], message: str, tmp_path: Path) -> None:
    partition = SharpBalancePartition(tmp_path / "p", members=2, samples=3)
    with pytest.raises(DataError, match=message):
        partition.add_scores(0, torch.tensor(scores))
    assert partition.missing() == [0, 1]


def test_samples_that_only_some_members_score_are_rejected(tmp_path: Path) -> None:
    partition = SharpBalancePartition(tmp_path / "p", members=2, samples=3)
    partition.add_scores(0, [1.0, -1.0, 2.0])
    partition.add_scores(1, [1.0, 1.0, 2.0])
    with pytest.raises((DataError, DivergedError), match="excluded by others"):
        partition.build()
    assert not partition.is_built


def test_a_folder_of_another_partition_and_unknown_members_are_rejected(tmp_path: Path) -> None:
    partition = SharpBalancePartition(tmp_path / "p", members=2, samples=3)
    for member in range(2):
        partition.add_scores(member, [1.0, 3.0, 2.0])
    partition.build()
    with pytest.raises(RunError, match="belongs to another partition"):
        SharpBalancePartition(tmp_path / "p", members=2, samples=4).build()
    with pytest.raises(RunError, match="belongs to another partition"):
        SharpBalancePartition(tmp_path / "p", members=2, samples=3, top_k=0.9).sam_set(0)
    with pytest.raises(RunError, match="no member 2"):
        partition.add_scores(2, [1.0, 2.0, 3.0])
    with pytest.raises(RecipeError, match="Unknown partition rule"):
        SharpBalancePartition(tmp_path / "p", members=2, samples=3, rule="papers")
