"""A meeting, whole: scores in the folder, a decision from there, notes that members train by."""

from __future__ import annotations

import json
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
from reference import partition_rules as twin

from plateaux.config.builders.data import build_data
from plateaux.config.builders.training import build_method
from plateaux.core.errors import Interrupted, RecipeError, RunError
from plateaux.evaluation.loading import load
from plateaux.storage.run import Run, partition_summary_path, sam_set_path, sharpness_path
from plateaux.training.partition import SharpnessScorer, assign_samples, load_sam_set
from plateaux.training.planning import pending_jobs
from plateaux.training.train import train

THREE = {"train": {"epochs": 4}, "data": {"validation_split": 4}}


def balanced(**options: Any) -> Any:
    method = {"name": "sharpbalance", "rho": 0.2, "partition_epoch": 2, **options.pop("method", {})}
    return recipe("deep_ensemble", "mlp", method=method, **{**THREE, **options})


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(balanced(run={"keep_checkpoints": "last"}), tmp_path_factory.mktemp("met") / "run", **GIVEN.keywords())


def test_scores_are_the_squared_norms_of_the_members_gradients(tmp_path: Path) -> None:
    row = balanced(method={"rule": "none", "partition_epoch": 3}, lr_scheduler=())
    halfway = train(row, tmp_path / "halfway", **GIVEN.keywords())
    about, scores = halfway.store.get_array(sharpness_path(3, 1))
    assert about["score"] == "gradient_norm"
    assert about["fingerprint"] == halfway.info.data.train.fingerprint
    assert (scores < 0).sum() == 4  # those kept for validation
    # Until its meeting a member trains as SAM's does.
    options = {**THREE, "train": {"epochs": 3}, "lr_scheduler": ()}
    sam = recipe("deep_ensemble", "mlp", method={"name": "sam", "rho": 0.2}, **options)
    member = load(train(sam, tmp_path / "sam", **GIVEN.keywords()).store.root).members[1]
    x, y = build_data(sam, GIVEN).train.fetch(torch.arange(len(scores)))
    for sample in np.flatnonzero(scores >= 0)[:5]:
        member.zero_grad()
        torch.nn.functional.cross_entropy(member(x[sample : sample + 1].float()), y[sample : sample + 1]).backward()
        squared = sum(float(p.grad.double().square().sum()) for p in member.parameters())
        assert scores[sample] == pytest.approx(squared, rel=1e-5)


def test_notes_are_what_the_slow_twin_decides(met: Run) -> None:
    scores = np.stack([met.store.get_array(sharpness_path(2, n))[1] for n in range(3)])
    wanted = twin.paper(scores, 0.4)
    for number in range(3):
        look = load_sam_set(met, build_method(met.recipe).partition, number, 2)
        assert look is not None
        assert set(look(torch.arange(scores.shape[1])).nonzero().flatten().tolist()) == wanted[number]
    assert load_sam_set(met, build_method(met.recipe).partition, 0, 1) is None
    summary = met.store.get_json(partition_summary_path(2))
    trained_on = (scores[0] >= 0).sum()
    assert summary["share"] == pytest.approx([len(careful) / trained_on for careful in wanted])
    assert summary["rule"] == "paper"
    assert len(summary["rank_correlation"]) == 3


@pytest.mark.parametrize("name", ["scores", "notes"])
def test_what_is_about_other_samples_is_refused(name: str, tmp_path: Path) -> None:
    run = train(balanced(), tmp_path / "run", **GIVEN.keywords())
    rendezvous = build_method(run.recipe).partition
    assert rendezvous is not None
    file = (sharpness_path if name == "scores" else sam_set_path)(2, 1)
    about, values = run.store.get_array(file)
    values = np.array(values)
    with run.store.array_writer(file, values.dtype, len(values), {**about, "fingerprint": "another"}) as write:
        write(values)
    with pytest.raises(RunError, match="about other samples"):
        assign_samples(run, rendezvous, 2) if name == "scores" else load_sam_set(run, rendezvous, 1, 3)


def test_all_careful_is_sam_and_none_is_plain_descent_bit_for_bit(tmp_path: Path) -> None:
    for rule, method in (("all", {"name": "sam", "rho": 0.2}), ("none", {"name": "deep_ensemble"})):
        for step in ("split", "shared"):
            warmup = "sam" if rule == "all" else "plain"
            mine = trained(balanced(method={"rule": rule, "step": step, "warmup": warmup}), tmp_path / rule / step)
            other = trained(recipe("deep_ensemble", "mlp", method=method, **THREE), tmp_path / rule / f"{step} plain")
            assert distance(mine, other) == 0, (rule, step)
    assert distance(trained(balanced(), tmp_path / "paper"), other) > 1e-4


def test_one_process_a_pool_of_two_and_a_mesh_of_three_end_at_the_same_weights(met: Run, tmp_path: Path) -> None:
    pool = train(balanced(executor={"processes": 2}), tmp_path / "pool", **GIVEN.keywords())
    assert distance(weights(pool), weights(met)) == 0
    row = balanced(executor={"name": "mesh"})
    mesh(3).run("laws.meshes:train_here", row.to_dict(), str(tmp_path / "mesh"), "")
    assert distance(weights(Run.open(tmp_path / "mesh")), weights(met)) == 0


def test_members_meet_again(tmp_path: Path) -> None:
    run = train(balanced(method={"partition_epoch": 1, "repartition_every": 2}), tmp_path / "run", **GIVEN.keywords())
    assert [run.store.has(partition_summary_path(epoch)) for epoch in range(5)] == [False, True, False, True, False]
    once = train(balanced(method={"partition_epoch": 1}), tmp_path / "once", **GIVEN.keywords())
    assert distance(weights(run), weights(once)) > 1e-6


def test_members_can_meet_before_their_first_step(tmp_path: Path) -> None:
    run = train(balanced(method={"partition_epoch": 0}), tmp_path / "run", **GIVEN.keywords())
    assert run.store.has(partition_summary_path(0))


@pytest.mark.parametrize("score", ["last_layer", "loss"])
def test_cheap_scores_decide_too(score: str, tmp_path: Path) -> None:
    run = train(balanced(method={"score": score}), tmp_path / "run", **GIVEN.keywords())
    assert run.store.get_array(sharpness_path(2, 0))[0]["score"] == score


def test_a_single_member_is_warned_and_descends_plainly(tmp_path: Path) -> None:
    row = balanced(members=1, method={"warmup": "plain"})
    with pytest.warns(UserWarning, match="meets nobody"):
        mine = trained(row, tmp_path / "one")
    plain = trained(recipe("deep_ensemble", "mlp", members=1, **THREE), tmp_path / "plain")
    assert distance(mine, plain) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": {"partition_epoch": 4}}, "between 0 and 3"),
        ({"method": {"repartition_every": 0}}, "at least 1 epoch"),
        ({"method": {"rule": "papr"}}, "paper"),
        ({"method": {"top_k": 1.5}}, "0 to 1"),
        ({"method": {"top_k": [0.1, 0.2, 0.3]}}, "only rho may differ"),
        ({"train": {"epochs": 4, "early_stopping_patience": 2}}, "none can stop early"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_before_anything_is_written(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=words):
        train(balanced(**change), tmp_path / "run", **GIVEN.keywords())
    assert not (tmp_path / "run").exists()


def test_none_can_join_after_a_meeting(tmp_path: Path) -> None:
    train(balanced(members=2), tmp_path / "run", **GIVEN.keywords())
    with pytest.raises(RunError, match="none can join or leave"):
        train(balanced(members=3), tmp_path / "run", **GIVEN.keywords())


def test_a_member_trained_again_after_the_meeting_ends_where_it_was(met: Run, tmp_path: Path) -> None:
    run = train(balanced(), tmp_path / "run", **GIVEN.keywords())
    shutil.rmtree(tmp_path / "run/members/1")
    assert distance(weights(train(balanced(), run.store.root, **GIVEN.keywords())), weights(met)) == 0


def test_lost_notes_are_missed(tmp_path: Path) -> None:
    row = balanced(run={"keep_checkpoints": "last"})
    run = train(row, tmp_path / "run", **GIVEN.keywords())
    progress = json.loads((tmp_path / "run/members/0/progress.json").read_text())
    (tmp_path / "run/members/0/progress.json").write_text(json.dumps({**progress, "finished": False}))
    (run.store.root / partition_summary_path(2)).unlink()
    with pytest.raises(RunError, match="gone past the meeting"):
        pending_jobs(run)


def test_a_radius_each_is_fine(tmp_path: Path) -> None:
    train(balanced(method={"rho": [0.0, 0.1, 0.2]}), tmp_path / "run", **GIVEN.keywords())


def test_a_polite_stop_while_scoring_goes_on_later(met: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = {"stop": True}
    original = SharpnessScorer.score

    def impatient(self: SharpnessScorer, *args: Any) -> None:
        original(replace(self, stop=lambda: wish["stop"]), *args)

    monkeypatch.setattr(SharpnessScorer, "score", impatient)
    with pytest.raises(Interrupted, match="while scoring"):
        train(balanced(), tmp_path / "run", **GIVEN.keywords())
    wish["stop"] = False
    assert distance(weights(train(balanced(), tmp_path / "run", **GIVEN.keywords())), weights(met)) == 0


def test_no_warning_without_a_reason(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(balanced(), tmp_path / "run", **GIVEN.keywords())
