"""Data partition: scores in the run folder, assignment of samples, and training with the SAM sets."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import GIVEN, distance, recipe, trained, weights
from laws.meshes import mesh
from reference import partition_rules as reference

import plateaux
from plateaux.config.builders.data import build_data
from plateaux.config.builders.training import build_method
from plateaux.core.errors import Interrupted, RecipeError, RunError
from plateaux.deploy.load_predictor import load_predictor
from plateaux.storage.run import Run, partition_summary_path, sam_set_path, sharpness_path
from plateaux.training.partition import SharpnessScorer, assign_samples, load_sam_set
from plateaux.training.planning import pending_jobs
from plateaux.training.train import train

THREE = {"train": {"epochs": 4}, "data": {"validation_split": 4}}


def balanced(**options: Any) -> Any:
    method = {"name": "sharpbalance", "rho": 0.2, "partition_epoch": 2, **options.pop("method", {})}
    return recipe("deep_ensemble", "mlp", method=method, **{**THREE, **options})


@pytest.fixture(scope="module")
def partitioned(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(
        balanced(run={"keep_checkpoints": "last"}), tmp_path_factory.mktemp("partitioned") / "run", **GIVEN.keywords()
    )


def test_scores_are_squared_gradient_norms(tmp_path: Path) -> None:
    row = balanced(method={"rule": "none", "partition_epoch": 3}, lr_scheduler=())
    halfway = train(row, tmp_path / "halfway", **GIVEN.keywords())
    metadata, scores = halfway.store.get_array(sharpness_path(3, 1))
    assert metadata["score"] == "gradient_norm"
    assert metadata["fingerprint"] == halfway.info.data.train.fingerprint
    assert (scores < 0).sum() == 4  # the validation samples
    # Up to the data partition, a member trains with SAM.
    options = {**THREE, "train": {"epochs": 3}, "lr_scheduler": ()}
    sam = recipe("deep_ensemble", "mlp", method={"name": "sam", "rho": 0.2}, **options)
    member = load_predictor(train(sam, tmp_path / "sam", **GIVEN.keywords()).store.root).ensemble.members[1]
    x, y = build_data(sam, GIVEN).train.fetch(torch.arange(len(scores)))
    for sample in np.flatnonzero(scores >= 0)[:5]:
        member.zero_grad()
        torch.nn.functional.cross_entropy(member(x[sample : sample + 1].float()), y[sample : sample + 1]).backward()
        squared = sum(float(p.grad.double().square().sum()) for p in member.parameters())
        assert scores[sample] == pytest.approx(squared, rel=1e-5)


def test_samples_are_scored_in_evaluation_mode(tmp_path: Path) -> None:
    """The score of a sample must not depend on the other samples of its batch."""
    options = {"data": {"validation_split": 4}, "train": {"epochs": 3}, "lr_scheduler": ()}
    method = {"name": "sharpbalance", "rho": 0.2, "rule": "none", "partition_epoch": 2}
    run = train(recipe("deep_ensemble", "conv_bn", method=method, **options), tmp_path / "run", **GIVEN.keywords())
    scores = run.store.get_array(sharpness_path(2, 1))[1]
    options["train"] = {"epochs": 2}
    sam = recipe("deep_ensemble", "conv_bn", method={"name": "sam", "rho": 0.2}, **options)
    trained = train(sam, tmp_path / "sam", **GIVEN.keywords())
    member = load_predictor(plateaux.open_run(trained.store.root, trust=GIVEN.trust)).ensemble.members[1]
    x, y = build_data(sam, GIVEN).train.fetch(torch.arange(len(scores)))
    for sample in np.flatnonzero(scores >= 0)[:5]:
        member.zero_grad()
        torch.nn.functional.cross_entropy(member(x[sample : sample + 1].float()), y[sample : sample + 1]).backward()
        squared = sum(float(p.grad.double().square().sum()) for p in member.parameters())
        assert scores[sample] == pytest.approx(squared, rel=1e-4)


def test_sam_sets_equal_those_of_the_reference_implementation(partitioned: Run) -> None:
    scores = np.stack([partitioned.store.get_array(sharpness_path(2, n))[1] for n in range(3)])
    expected = reference.paper(scores, 0.4)
    for number in range(3):
        sam_set = load_sam_set(partitioned, build_method(partitioned.recipe).partition, number, 2)
        assert sam_set is not None
        assert set(sam_set(torch.arange(scores.shape[1])).nonzero().flatten().tolist()) == expected[number]
    assert load_sam_set(partitioned, build_method(partitioned.recipe).partition, 0, 1) is None
    summary = partitioned.store.get_json(partition_summary_path(2))
    trained_on = (scores[0] >= 0).sum()
    assert summary["share"] == pytest.approx([len(sam_set) / trained_on for sam_set in expected])
    assert summary["rule"] == "paper"
    assert len(summary["rank_correlation"]) == 3


@pytest.mark.parametrize("name", ["scores", "sam_sets"])
def test_files_of_other_samples_are_rejected(name: str, tmp_path: Path) -> None:
    run = train(balanced(), tmp_path / "run", **GIVEN.keywords())
    partition = build_method(run.recipe).partition
    assert partition is not None
    file = (sharpness_path if name == "scores" else sam_set_path)(2, 1)
    metadata, values = run.store.get_array(file)
    values = np.array(values)
    with run.store.array_writer(file, values.dtype, len(values), {**metadata, "fingerprint": "another"}) as write:
        write(values)
    with pytest.raises(RunError, match="belongs to other samples"):
        assign_samples(run, partition, 2) if name == "scores" else load_sam_set(run, partition, 1, 3)


@pytest.mark.slow
def test_rule_all_is_sam_and_rule_none_is_sgd_bit_for_bit(tmp_path: Path) -> None:
    for rule, method in (("all", {"name": "sam", "rho": 0.2}), ("none", {"name": "deep_ensemble"})):
        warmup = "sam" if rule == "all" else "plain"
        mine = trained(balanced(method={"rule": rule, "warmup": warmup}), tmp_path / rule)
        other = trained(recipe("deep_ensemble", "mlp", method=method, **THREE), tmp_path / f"{rule} plain")
        assert distance(mine, other) == 0, rule
    assert distance(trained(balanced(), tmp_path / "paper"), other) > 1e-4


@pytest.mark.process
def test_one_process_a_pool_and_a_mesh_end_at_the_same_weights(partitioned: Run, tmp_path: Path) -> None:
    pool = train(balanced(executor={"processes": 2}), tmp_path / "pool", **GIVEN.keywords())
    assert distance(weights(pool), weights(partitioned)) == 0
    row = balanced(executor={"name": "mesh"})
    mesh(3).run("laws.meshes:train_here", row.to_dict(), str(tmp_path / "mesh"), "")
    assert distance(weights(Run.open(tmp_path / "mesh")), weights(partitioned)) == 0


def test_samples_can_be_partitioned_repeatedly(tmp_path: Path) -> None:
    run = train(balanced(method={"partition_epoch": 1, "repartition_every": 2}), tmp_path / "run", **GIVEN.keywords())
    assert [run.store.has(partition_summary_path(epoch)) for epoch in range(5)] == [False, True, False, True, False]
    once = train(balanced(method={"partition_epoch": 1}), tmp_path / "once", **GIVEN.keywords())
    assert distance(weights(run), weights(once)) > 1e-6


def test_samples_can_be_partitioned_before_the_first_step(tmp_path: Path) -> None:
    run = train(balanced(method={"partition_epoch": 0}), tmp_path / "run", **GIVEN.keywords())
    assert run.store.has(partition_summary_path(0))


@pytest.mark.parametrize("score", ["last_layer", "loss"])
def test_cheaper_scores_can_be_used(score: str, tmp_path: Path) -> None:
    run = train(balanced(method={"score": score}), tmp_path / "run", **GIVEN.keywords())
    assert run.store.get_array(sharpness_path(2, 0))[0]["score"] == score


def test_a_single_member_warns_and_trains_with_plain_gradients(tmp_path: Path) -> None:
    row = balanced(members=1, method={"warmup": "plain"})
    with pytest.warns(UserWarning, match="with a single member"):
        mine = trained(row, tmp_path / "one")
    plain = trained(recipe("deep_ensemble", "mlp", members=1, **THREE), tmp_path / "plain")
    assert distance(mine, plain) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": {"partition_epoch": 4}}, "between 0 and 3"),
        ({"method": {"repartition_every": 0}}, "repartition_every = 0: Input should be greater than or equal to 1"),
        ({"method": {"rule": "papr"}}, "paper"),
        ({"method": {"top_k": 1.5}}, r"top_k = 1\.5: Input should be less than or equal to 1"),
        ({"method": {"top_k": [0.1, 0.2, 0.3]}}, "only rho may differ"),
        ({"train": {"epochs": 4, "early_stopping_patience": 2}}, "need all members at the data partition"),
    ],
)
def test_invalid_options_are_rejected_before_anything_is_written(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=message):
        train(balanced(**change), tmp_path / "run", **GIVEN.keywords())
    assert not (tmp_path / "run").exists()


def test_members_cannot_be_added_after_a_partition(tmp_path: Path) -> None:
    train(balanced(members=2), tmp_path / "run", **GIVEN.keywords())
    with pytest.raises(RunError, match="cannot be added or removed"):
        train(balanced(members=3), tmp_path / "run", **GIVEN.keywords())


def test_a_member_retrained_after_the_partition_has_the_same_weights(partitioned: Run, tmp_path: Path) -> None:
    run = train(balanced(), tmp_path / "run", **GIVEN.keywords())
    shutil.rmtree(tmp_path / "run/members/1")
    assert distance(weights(train(balanced(), run.store.root, **GIVEN.keywords())), weights(partitioned)) == 0


def test_missing_sam_sets_are_detected(tmp_path: Path) -> None:
    row = balanced(run={"keep_checkpoints": "last"})
    run = train(row, tmp_path / "run", **GIVEN.keywords())
    progress = run.store.get_json("members/0/progress.json")
    run.store.put_json("members/0/progress.json", {**progress, "finished": False})
    (run.store.root / partition_summary_path(2)).unlink()
    with pytest.raises(RunError, match="trained past the data partition"):
        pending_jobs(run)


def test_members_may_have_different_rho(tmp_path: Path) -> None:
    train(balanced(method={"rho": [0.0, 0.1, 0.2]}), tmp_path / "run", **GIVEN.keywords())


def test_scoring_can_be_interrupted_and_resumed(
    partitioned: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = {"stop": True}
    real_score = SharpnessScorer.score

    def interruptible_score(self: SharpnessScorer, *args: Any) -> None:
        real_score(replace(self, is_stopped=lambda: request["stop"]), *args)

    monkeypatch.setattr(SharpnessScorer, "score", interruptible_score)
    with pytest.raises(Interrupted, match="while scoring"):
        train(balanced(), tmp_path / "run", **GIVEN.keywords())
    request["stop"] = False
    assert distance(weights(train(balanced(), tmp_path / "run", **GIVEN.keywords())), weights(partitioned)) == 0


def test_several_members_give_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(balanced(), tmp_path / "run", **GIVEN.keywords())
