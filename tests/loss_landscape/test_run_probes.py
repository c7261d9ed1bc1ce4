"""The walk over landscapes: which samples, which mode, what is recorded, and what is left when it is stopped."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import recipe, weights
from torch import nn

import plateaux
from plateaux import Components, Run
from plateaux.config.builders.data import build_data
from plateaux.core import tensor_tree
from plateaux.core.errors import Interrupted, RecipeError, RunError
from plateaux.core.member import MemberModule
from plateaux.core.types import Batch, Estimate
from plateaux.data.sources import DataSplits, InMemorySource
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.results import MetricResult
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.probe import Probe, get_probes
from plateaux.loss_landscape.run_probes import ProbeSession, ProgressMeter, probe_landscape
from plateaux.loss_landscape.session import ProbeBatch, ProbeSettings, make_loss_surface, probe_mode, sample_ids
from plateaux.training.checks import check
from plateaux.training.train import train

GIVEN = Components(trust=("cases", "toy_probes"))
VARIED = {"data": {"crop": 2, "flip": True}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a run of two perceptrons, and one of two convolutional nets with BatchNorm on varied images."""
    root = tmp_path_factory.mktemp("runs")
    train(recipe(members=2, samples=40), root / "mlp", components=GIVEN)
    train(recipe("deep_ensemble", "conv_bn", members=2, samples=40, **VARIED), root / "conv", components=GIVEN)
    return {name: root / name for name in ("mlp", "conv")}


def asked(root: Path, *probes: str, **options: Any) -> list[MetricResult]:
    return probe_landscape(root, probes=probes, components=GIVEN, **options)


# Names.


def test_probes_are_named_as_measures_are() -> None:
    assert get_probes(["toy_probes:loss"], trust=("toy_probes",))["toy_probes:loss"].samples == 8
    (name,) = found = get_probes(["toy_probes:loss(scale=2; samples=4)"], trust=("toy_probes",))
    assert found[name].samples == 4
    for wrong, words in (
        ("toy_probes:loss(scale=2", "is no probe; write a name, or options in brackets: worst_l2"),
        ("toy_probes:loss(2)", "options are written name=value, several with semicolons: worst_l2"),
        ("toy_probes:loss(scales=2)", "did you mean 'scale'"),
    ):
        with pytest.raises(RecipeError, match=words):
            get_probes([wrong], trust=("toy_probes",))


def test_a_factory_that_makes_no_probe_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import toy_probes

    monkeypatch.setattr(toy_probes, "nothing", lambda: None, raising=False)
    with pytest.raises(RecipeError, match=r"returned NoneType; it must return plateaux\.Probe"):
        get_probes(["toy_probes:nothing"], trust=("toy_probes",))


def test_all_are_the_usual_ones() -> None:
    found = get_probes(["all"])
    assert all(each.default for each in found.values())
    assert set(found) <= set(plateaux.probe.names())


# The sample.


def test_a_sample_is_drawn_by_the_seed_without_replacement_and_fewer_are_the_first_of_more() -> None:
    ids = torch.arange(100, 200)
    some = sample_ids(ids, 7, 20)
    assert len(set(some.tolist())) == 20
    assert set(some.tolist()) <= set(ids.tolist())
    assert torch.equal(some[:5], sample_ids(ids, 7, 5))
    assert not torch.equal(some, sample_ids(ids, 8, 20))
    assert sorted(sample_ids(ids, 7, 1000).tolist()) == ids.tolist()


def test_the_first_of_a_sample_are_cut_out_of_its_batches() -> None:
    whole = Batch(torch.arange(10.0)[:, None], torch.arange(10), torch.arange(10))
    sample = ProbeBatch(whole.index, (whole.take(slice(0, 4)), whole.take(slice(4, 8)), whole.take(slice(8, 10))))
    for count, sizes in ((10, [4, 4, 2]), (99, [4, 4, 2]), (8, [4, 4]), (6, [4, 2]), (1, [1])):
        few = sample.first(count)
        assert [len(batch) for batch in few.batches] == sizes
        assert torch.equal(torch.cat([batch.index for batch in few.batches]), few.ids)
    assert sample.first(8).metadata()["samples"] == 8
    assert sample.first(8).metadata()["ids"] != sample.first(9).metadata()["ids"]


def test_answers_are_those_of_the_members_on_the_drawn_samples(runs: dict[str, Path]) -> None:
    (found,) = asked(runs["mlp"], "toy_probes:loss(samples=12)")
    run, data = Run.open(runs["mlp"]), build_data(recipe(samples=40), GIVEN)
    ids = sample_ids(torch.arange(40), run.recipe.seed, 12)
    x, y = data.train.fetch(ids)
    for number, module in enumerate(plateaux.load(runs["mlp"], data=GIVEN.data, model=GIVEN.model).members):
        losses = F.cross_entropy(module(x), y, reduction="none").detach()
        row = found.rows[f"member {number}"]
        assert row.value == pytest.approx(float(losses.mean()), rel=1e-5)
        assert row.stderr == pytest.approx(float(losses.std() / 12**0.5), rel=1e-4)
        assert found.rows[f"member {number} · samples"].value == 12
    own = [found.rows[f"member {number}"].value for number in (0, 1)]
    mean = found.rows["mean of members"]
    assert mean.value == pytest.approx(sum(own) / 2)
    assert mean.stderr == pytest.approx(abs(own[0] - own[1]) / 2)


def test_probes_take_so_many_samples_as_they_ask_for_unless_told(runs: dict[str, Path]) -> None:
    found = asked(runs["mlp"], "toy_probes:loss", "toy_probes:climb")
    assert [each.data["samples"] for each in found] == [8, 16]
    alike = asked(runs["mlp"], "toy_probes:loss", "toy_probes:climb", limit=12)
    assert [each.data["samples"] for each in alike] == [12, 12]
    assert alike[0].data["ids"] == alike[1].data["ids"] != found[0].data["ids"]
    everything = asked(runs["mlp"], "toy_probes:loss", limit=1000)
    assert everything[0].data["samples"] == 40


def test_what_must_be_known_is_recorded_with_the_number(runs: dict[str, Path]) -> None:
    (found,) = asked(runs["conv"], "toy_probes:loss", split="test", members=[1])
    assert found.split == "test"
    facts = {"batchnorm": "eval", "augmentation": "none", "unit_logits": False, "precision": "fp32", "samples": 3}
    assert facts.items() <= found.data.items()
    assert found.definition == "the mean over samples; when neighbouring layers are rescaled it stays the same"
    assert found.group == "sharpness"
    assert list(found.rows) == ["member 1", "member 1 · samples"]
    assert found.hashes.keys() == found.weights.keys() == {"member 1"}
    (plain,) = asked(runs["mlp"], "toy_probes:loss", batchnorm="train")
    assert plain.data["batchnorm"] == "none"


def test_a_number_is_written_once_and_the_same_question_is_the_same_object(runs: dict[str, Path]) -> None:
    (found,) = asked(runs["mlp"], "toy_probes:loss(scale=3)")
    asked(runs["mlp"], "toy_probes:loss(scale=3)")
    asked(runs["mlp"], "toy_probes:loss(scale=3)", limit=5)
    files = list((runs["mlp"] / "metrics").glob("toy_probes_loss_scale_3_*.json"))
    assert len(files) == 2
    assert json.loads(json.dumps(found.to_dict())) in [json.loads(file.read_text()) for file in files]


# Modes.


def test_batch_statistics_and_unit_logits_change_the_number_and_are_recorded(runs: dict[str, Path]) -> None:
    still, moving, unit = (
        asked(runs["conv"], "toy_probes:loss(samples=14)", **options)[0]
        for options in ({}, {"batchnorm": "train"}, {"normalize_logits": True})
    )
    assert (moving.data["batchnorm"], moving.data["batch"]) == ("train", 7)
    assert unit.data["unit_logits"] is True
    assert len({each.rows["member 0"].value for each in (still, moving, unit)}) == 3


def test_samples_are_varied_as_in_training(runs: dict[str, Path]) -> None:
    (plain,), (varied,), (again,) = (
        asked(runs["conv"], "toy_probes:loss", augment=augment, split=on)
        for augment, on in ((False, "train"), (True, "train"), (True, "train"))
    )
    assert varied.data["augmentation"] == {"crop": 2, "flip": True}
    assert varied.rows == again.rows
    assert varied.rows["member 0"].value != plain.rows["member 0"].value
    assert asked(runs["conv"], "toy_probes:loss", augment=True, split="test")[0].data["samples"] == 3
    told: list[str] = []
    (same,) = asked(runs["mlp"], "toy_probes:loss", augment=True, say=told.append)
    assert same.data["augmentation"] == "none"
    assert any("varies nothing" in words for words in told)


def test_a_network_is_posed_and_put_back_layer_by_layer() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    net[1].eval()
    with probe_mode(net, "eval"):
        assert not any(part.training for part in net.modules())
    with probe_mode(net, "train"):
        assert [part.training for part in net.modules()] == [True, False, True, False]
    with probe_mode(nn.Sequential(nn.Linear(2, 2)), "train") as _, probe_mode(net[2], "train"):
        assert not net[2].training  # no BatchNorm: nothing to put back
    assert [part.training for part in net.modules()] == [True, True, False, True]


def test_what_a_network_draws_comes_from_the_members_key(untouched_randomness: None) -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(super().forward(x), training=True)

    sample = ProbeBatch(torch.arange(3), (Batch(torch.ones(3, 2), torch.zeros(3).long(), torch.arange(3)),))
    with torch.random.fork_rng():
        net = Noisy(2, 4).train()
    pulses: list[int] = []
    ground = make_loss_surface(net, sample, ProbeSettings(), seed=1, number=0, on_forward=lambda: pulses.append(1))
    assert torch.equal(ground.all_losses(), ground.all_losses())
    assert len(pulses) == 2


# News, problems, the end.


def test_the_time_is_told_before_the_walk_and_progress_only_grows(runs: dict[str, Path]) -> None:
    told: list[str] = []
    seen: list[tuple[int, int]] = []
    asked(
        runs["mlp"], "toy_probes:climb", "toy_probes:loss(samples=16)", seen=lambda *n: seen.append(n), say=told.append
    )  # fmt: skip
    assert told[0].startswith("2 probes of 2 members on train samples: about ")
    assert told[1].startswith("toy_probes:climb: ")
    done = [each for each, _ in seen]
    assert done == sorted(set(done))
    assert seen[-1][0] == seen[-1][1] == int(2 * (16 * (1 + 4 / 3) + 16 / 3))


def test_a_long_question_moves_by_the_clock_and_never_past_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    seen: list[tuple[int, int]] = []
    meter = ProgressMeter(200.0, lambda *n: seen.append(n))
    with meter.track(100.0, 0.1):
        for now[0] in (1.0, 1.0, 3.0, 99.0):
            meter.on_forward()
    assert seen == [(10, 200), (30, 200), (95, 200), (100, 200)]


def test_a_probe_that_cannot_be_asked_is_left_out_with_its_reason(runs: dict[str, Path]) -> None:
    told: list[str] = []
    (found,) = asked(runs["mlp"], "toy_probes:refuses", "toy_probes:loss", say=told.append)
    assert found.metric == "toy_probes:loss"
    assert "toy_probes:refuses is left out: this network has no summit; ask another" in told
    with pytest.raises(RecipeError, match="no summit"):
        asked(runs["mlp"], "toy_probes:refuses")


def test_ctrl_c_leaves_what_is_finished(runs: dict[str, Path]) -> None:
    for file in (runs["mlp"] / "metrics").glob("*.json"):
        file.unlink()
    with pytest.raises(Interrupted, match=r"asking toy_probes:stopped.*1 of 2 members.*1 of 3 probes"):
        asked(runs["mlp"], "toy_probes:loss", "toy_probes:stopped", "toy_probes:climb")
    left = [json.loads(file.read_text()) for file in sorted((runs["mlp"] / "metrics").glob("*.json"))]
    assert [each["metric"] for each in left] == ["toy_probes:loss", "toy_probes:stopped"]
    assert list(left[1]["rows"]) == list(left[1]["hashes"]) == ["member 0"]
    with pytest.raises(Interrupted, match="0 of 2 members"):
        asked(runs["mlp"], "toy_probes:stopped(after=0)")


def test_members_are_left_as_they_were(runs: dict[str, Path], tmp_path: Path) -> None:
    import toy_probes

    probe: Probe = toy_probes.climb()
    module = plateaux.load(runs["conv"], data=GIVEN.data, model=GIVEN.model).members[0]
    before = tensor_tree.clone(module.state_dict())
    x, y = build_data(recipe("deep_ensemble", "conv_bn", samples=9), GIVEN).train.fetch(torch.arange(9))
    assert isinstance(x, torch.Tensor)
    with probe_mode(module, "train"):
        probe.run(LossSurface(MemberModule(module), [Batch(x, y, torch.arange(9))]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_other_data_than_the_run_was_made_with_are_refused(runs: dict[str, Path]) -> None:
    run = Run.open(runs["mlp"])
    x = torch.randn(40, *run.info.data.shape)
    strange = DataSplits(
        "blobs", InMemorySource(x, torch.arange(40) % 2), InMemorySource(x, torch.arange(40) % 2), 3, tuple(x.shape[1:])
    )
    panel = Evaluator(run, components=Components(data=strange, trust=GIVEN.trust))
    panel.data_info = run.info.data
    with pytest.raises(RunError, match="not those this run was made with"):
        ProbeSession(panel, "train", ProbeSettings(), most=4)


# While training.


PROBE = {"probes": ["toy_probes:climb", "toy_probes:loss", "toy_probes:refuses"], "every": 2, "samples": 12}


@pytest.mark.parametrize(("net", "manner"), [("conv_bn", "loop"), ("conv_bn", "offload"), ("mlp", "vmap")])
def test_probes_asked_in_training_change_no_bit(net: str, manner: str, tmp_path: Path) -> None:
    row = recipe("sam", net, members=2, train={"epochs": 3}, executor={"mode": manner})
    plain = weights(train(row, tmp_path / "plain", components=GIVEN))
    probed = train(row.replaced(probe=PROBE), tmp_path / "probed", components=GIVEN)
    for one, other in zip(plain, weights(probed), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    lines = [line for line in probed.log(1) if "probe" in line]
    assert [(line["epoch"], line["probe"]) for line in lines] == [
        (epoch, name) for epoch in (2, 3) for name in PROBE["probes"]
    ]
    assert "no summit" in lines[2]["problem"]
    assert lines[0]["rows"][""].keys() == {"value", "stderr", "mc_stderr"}
    assert lines[0]["data"]["samples"] == 12


def test_the_last_record_is_what_the_walk_finds_of_the_finished_member(tmp_path: Path) -> None:
    run = train(recipe("deep_ensemble", "conv_bn", members=2, probe=PROBE), tmp_path / "run", components=GIVEN)
    found = {each.metric: each for each in asked(tmp_path / "run", "toy_probes:climb", "toy_probes:loss", limit=12)}
    for number in (0, 1):
        for line in run.log(number):
            if "rows" in line:
                walked = found[line["probe"]]
                assert line["rows"][""]["value"] == walked.rows[f"member {number}"].value
                assert line["data"].items() <= walked.data.items()


def test_records_survive_a_stop_and_a_resume(tmp_path: Path) -> None:
    row = recipe(members=1, train={"epochs": 4}, probe={**PROBE, "every": 1}, run={"checkpoint_every_epochs": 2})
    whole = train(row, tmp_path / "whole", components=GIVEN)

    def stop(event: Any) -> None:
        if getattr(event, "completed_epoch", None) == 3:
            raise Interrupted("enough")

    with pytest.raises(Interrupted):
        train(row, tmp_path / "cut", components=GIVEN, progress=stop)
    rest = train(row, tmp_path / "cut", components=GIVEN)
    for one, other in zip(weights(whole), weights(rest), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    kept = [[line for line in run.log(0) if "probe" in line] for run in (whole, rest)]
    assert kept[0] == kept[1]
    assert [line["epoch"] for line in kept[0] if line["probe"] == "toy_probes:loss"] == [1, 2, 3, 4]


def test_a_run_may_go_on_with_other_probes(tmp_path: Path) -> None:
    row = recipe(members=1)
    train(row, tmp_path / "run", components=GIVEN)
    again = train(row.replaced(probe=PROBE), tmp_path / "run", components=GIVEN)
    assert not [line for line in again.log(0) if "probe" in line]


def test_curves_of_probes_reach_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[int, Any]] = []
    monkeypatch.setattr("plateaux.training.tensorboard.TensorBoardLogger.__init__", lambda *_: None)
    monkeypatch.setattr(
        "plateaux.training.tensorboard.TensorBoardLogger.add", lambda _, epoch, line: shown.append((epoch, dict(line)))
    )
    train(recipe(members=1, probe=PROBE, run={"tensorboard": True}), tmp_path / "run", components=GIVEN)
    (number,) = [line["probe toy_probes:loss"] for _, line in shown if "probe toy_probes:loss" in line]
    assert isinstance(number, float)


def test_a_wrong_probe_is_told_before_training() -> None:
    with pytest.raises(RecipeError, match="There is no probe called 'sharpnes'"):
        check(recipe(probe={"probes": ["sharpnes"]}))


def test_a_value_that_is_no_number_is_null_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import toy_probes

    nan = Probe(lambda _: {"": Estimate(float("nan"))}, lambda n: n)
    monkeypatch.setattr(toy_probes, "nothing", lambda: nan, raising=False)
    run = train(recipe(members=1, probe={"probes": ["toy_probes:nothing"]}), tmp_path / "run", components=GIVEN)
    (line,) = [line for line in run.log(0) if "probe" in line]
    assert line["rows"][""]["value"] is None
