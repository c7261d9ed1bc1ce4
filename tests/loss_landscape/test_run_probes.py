"""Running probes: the sample, the modes, the stored metadata, progress, interruption, and probes during training."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import recipe, weights
from torch import nn

import plateaux
from plateaux import Run
from plateaux.config.builders.data import build_data
from plateaux.config.components import Components
from plateaux.config.experiment import Experiment
from plateaux.core import tensor_tree
from plateaux.core.errors import Interrupted, RecipeError, RunError
from plateaux.core.member import MemberModule
from plateaux.core.progress import WorkDone
from plateaux.core.types import Batch, Estimate
from plateaux.data.sources import DataSplits, InMemorySource
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.results import MetricResult
from plateaux.loss_landscape.loss_surface import (
    LossSurface,
    ProbeBatch,
    ProbeOptions,
    make_loss_surface,
    probe_mode,
    sample_ids,
)
from plateaux.loss_landscape.probe import Probe, get_probes
from plateaux.loss_landscape.run_probes import ProbeSession, ProgressMeter, probe_landscape
from plateaux.storage.digests import check_json_digest
from plateaux.training.recipe_rules import check
from plateaux.training.train import train

TRUST = ("cases", "toy_probes")
GIVEN = Components(trust=TRUST)
AUGMENTED = {"data": {"crop": 2, "flip": True}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a run of two perceptrons, and one of two convolutional networks with BatchNorm and augmentation."""
    root = tmp_path_factory.mktemp("runs")
    train(recipe(members=2, samples=40), root / "mlp", **GIVEN.keywords())
    train(recipe("deep_ensemble", "conv_bn", members=2, samples=40, **AUGMENTED), root / "conv", **GIVEN.keywords())
    return {name: root / name for name in ("mlp", "conv")}


def run_probes(root: Path, *probes: str, **kwargs: Any) -> list[MetricResult]:
    return probe_landscape(plateaux.open_run(root, trust=TRUST), probes=probes, **kwargs)


def doubled(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
    return torch.stack([2 * F.cross_entropy(logits, batch.y, reduction="none") for logits in outputs])


FACTORS = {"trace(mc_samples=2)": 2, "average_l2(mc_samples=2)": 2, "sam_step": 2, "fisher_trace": 4, "fisher_rao": 2,
           "gradient_norm": 4, "input_curvature(mc_samples=2)": 4, "top_eigenvalue(steps=8)": 2}  # fmt: skip


def test_probes_measure_the_loss_that_is_given(runs: dict[str, Path], tmp_path: Path) -> None:
    root = shutil.copytree(runs["mlp"], tmp_path / "run")
    plain = run_probes(root, *FACTORS, limit=16)
    given = probe_landscape(plateaux.open_run(root, trust=TRUST, loss=doubled), probes=list(FACTORS), limit=16)
    for before, after in zip(plain, given, strict=True):
        expected = FACTORS[after.metric] * before.rows["member 0"].value  # type: ignore[index]
        assert after.rows["member 0"].value == pytest.approx(expected, rel=1e-3, abs=1e-7), after.metric  # type: ignore[index]
        assert (before.data.get("loss"), after.data["loss"]) == (None, "doubled")


@pytest.mark.parametrize(
    "probe", ["gauss_newton_trace", "relative_flatness", "fisher_rao(labels=model)", "spectrum(kind=gauss_newton)"]
)
def test_probes_of_the_cross_entropy_are_refused_with_another_loss(probe: str, runs: dict[str, Path]) -> None:
    opened = plateaux.open_run(runs["mlp"], trust=TRUST, loss=doubled)
    with pytest.raises(RecipeError, match="is defined for the cross entropy only"):
        probe_landscape(opened, probes=[probe], limit=8)


def test_a_run_with_its_own_loss_is_probed_with_this_loss_only(tmp_path: Path) -> None:
    small = recipe("deep_ensemble", members=1, samples=40, probe={"every": 1, "probes": ["trace"], "samples": 16})
    run = train(small, tmp_path, **{**GIVEN.keywords(), "loss": doubled})
    with pytest.raises(RunError, match=r"trained with a loss that was passed in Python.*open_run\(path, loss=\.\.\.\)"):
        run_probes(tmp_path, "trace")
    opened = plateaux.open_run(run, trust=TRUST, loss=doubled)
    (after,) = probe_landscape(opened, probes=["trace"], limit=16)
    record = [line for line in run.log(0) if "probe" in line][-1]
    assert record["rows"][""]["value"] == pytest.approx(after.rows["member 0"].value)  # type: ignore[index]


# Probes by name.


def test_a_probe_is_selected_by_name_and_options() -> None:
    assert get_probes(["toy_probes:loss"], trust=("toy_probes",))["toy_probes:loss"].samples == 8
    (probe,) = get_probes(["toy_probes:loss(scale=2; samples=4)"], trust=("toy_probes",)).values()
    assert probe.samples == 4
    for spec, message in (
        ("toy_probes:loss(scale=2", "is not a probe; write a name, with options in parentheses: worst_l2"),
        ("toy_probes:loss(2)", "write options as name=value, separated by semicolons: worst_l2"),
        ("toy_probes:loss(scales=2)", "did you mean 'scale'"),
    ):
        with pytest.raises(RecipeError, match=message):
            get_probes([spec], trust=("toy_probes",))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"radius": value}) for name in ("worst_l2", "average_linf") for value in (-0.1, "nan", "inf")),
        *(("worst_linf", {name: 0}) for name in ("m", "steps", "restarts", "samples")),
        *(("average_l2", {name: 0}) for name in ("m", "mc_samples", "samples")),
        *((name, {"eta": -1}) for name in ("worst_linf", "average_l2", "sam_step")),
        *((name, {"rho": value}) for name in ("sam_sharpness", "sam_step") for value in (-0.1, "inf")),
        *((name, {option: 0}) for name in ("input_curvature", "rank_agreement") for option in ("mc_samples", "radius")),
        ("sam_sharpness", {"directions": 0}),
        ("sam_sharpness", {"direction": "spher"}),
        ("sam_sharpness", {"form": "papr"}),
        ("sam_step", {"m": 0}),
        ("trace", {"mc_samples": 0}),
        ("top_eigenvalue", {"k": 0}),
        ("spectrum", {"steps": 0}),
        ("relative_flatness", {"mc_samples": 0}),
        ("worst_l2", {"preset": "sharpbalanc"}),
        ("worst_l2", {"norm": "linf"}),
    ],
)
def test_options_of_probes_out_of_range_are_refused(name: str, options: dict[str, Any]) -> None:
    ((option, value),) = options.items()
    with pytest.raises(RecipeError, match=rf"\[{name}\] (has no key '{option}'|{option} = '{value}': Input should be)"):
        get_probes([f"{name}({option}={value})"])


def test_a_factory_that_returns_no_probe_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    import toy_probes

    monkeypatch.setattr(toy_probes, "nothing", lambda: None, raising=False)
    with pytest.raises(RecipeError, match=r"returned NoneType; it must return plateaux\.Probe"):
        get_probes(["toy_probes:nothing"], trust=("toy_probes",))


def test_all_selects_the_default_probes() -> None:
    probes = get_probes(["all"])
    assert all(probe.default for probe in probes.values())
    assert set(probes) <= set(plateaux.probe.names())


# The sample.


def test_ids_are_drawn_by_seed_without_replacement_and_fewer_are_a_prefix_of_more() -> None:
    ids = torch.arange(100, 200)
    sampled = sample_ids(ids, 7, 20)
    assert len(set(sampled.tolist())) == 20
    assert set(sampled.tolist()) <= set(ids.tolist())
    assert torch.equal(sampled[:5], sample_ids(ids, 7, 5))
    assert not torch.equal(sampled, sample_ids(ids, 8, 20))
    assert sorted(sample_ids(ids, 7, 1000).tolist()) == ids.tolist()


def test_a_prefix_of_the_sample_keeps_its_batches() -> None:
    full = Batch(torch.arange(10.0)[:, None], torch.arange(10), torch.arange(10))
    sample = ProbeBatch(full.index, (full.take(slice(0, 4)), full.take(slice(4, 8)), full.take(slice(8, 10))))
    for count, sizes in ((10, [4, 4, 2]), (99, [4, 4, 2]), (8, [4, 4]), (6, [4, 2]), (1, [1])):
        prefix = sample.first(count)
        assert [len(batch) for batch in prefix.batches] == sizes
        assert torch.equal(torch.cat([batch.index for batch in prefix.batches]), prefix.ids)
    assert sample.first(8).metadata()["samples"] == 8
    assert sample.first(8).metadata()["ids"] != sample.first(9).metadata()["ids"]


def test_values_are_those_of_the_members_on_the_sampled_ids(runs: dict[str, Path]) -> None:
    (result,) = run_probes(runs["mlp"], "toy_probes:loss(samples=12)")
    run, data = Run.open(runs["mlp"]), build_data(recipe(samples=40), GIVEN)
    ids = sample_ids(torch.arange(40), run.recipe.seed, 12)
    x, y = data.train.fetch(ids)
    ensemble = plateaux.load_predictor(plateaux.open_run(runs["mlp"], trust=TRUST)).ensemble
    for number, module in enumerate(ensemble.members):
        losses = F.cross_entropy(module(x), y, reduction="none").detach()
        row = result.rows[f"member {number}"]
        assert row.value == pytest.approx(float(losses.mean()), rel=1e-5)
        assert row.stderr == pytest.approx(float(losses.std() / 12**0.5), rel=1e-4)
        assert result.rows[f"member {number} · samples"].value == 12
    values = [result.rows[f"member {number}"].value for number in (0, 1)]
    mean = result.rows["mean of members"]
    assert mean.value == pytest.approx(sum(values) / 2)
    assert mean.stderr == pytest.approx(abs(values[0] - values[1]) / 2)


def test_each_probe_has_its_own_number_of_samples_unless_a_limit_is_set(runs: dict[str, Path]) -> None:
    results = run_probes(runs["mlp"], "toy_probes:loss", "toy_probes:ascent")
    assert [result.data["samples"] for result in results] == [8, 16]
    limited = run_probes(runs["mlp"], "toy_probes:loss", "toy_probes:ascent", limit=12)
    assert [result.data["samples"] for result in limited] == [12, 12]
    assert limited[0].data["ids"] == limited[1].data["ids"] != results[0].data["ids"]
    (full,) = run_probes(runs["mlp"], "toy_probes:loss", limit=1000)
    assert full.data["samples"] == 40


def test_settings_and_definition_are_stored_with_the_result(runs: dict[str, Path]) -> None:
    (result,) = run_probes(runs["conv"], "toy_probes:loss", split="test", members=[1])
    assert result.split == "test"
    settings = {
        "batchnorm": "eval",
        "augmentation": "none",
        "normalize_logits": False,
        "precision": "fp32",
        "samples": 3,
    }
    assert settings.items() <= result.data.items()
    assert result.definition == "the mean over samples; scale-invariant"
    assert result.group == "sharpness"
    assert list(result.rows) == ["member 1", "member 1 · samples"]
    assert result.hashes.keys() == result.weights.keys() == {"member 1"}
    (without_batchnorm,) = run_probes(runs["mlp"], "toy_probes:loss", batchnorm="train")
    assert without_batchnorm.data["batchnorm"] == "none"


def test_the_same_probe_overwrites_its_file_and_another_limit_adds_one(runs: dict[str, Path]) -> None:
    (result,) = run_probes(runs["mlp"], "toy_probes:loss(scale=3)")
    run_probes(runs["mlp"], "toy_probes:loss(scale=3)")
    run_probes(runs["mlp"], "toy_probes:loss(scale=3)", limit=5)
    files = list((runs["mlp"] / "metrics").glob("toy_probes_loss_scale_3_*.json"))
    assert len(files) == 2
    stored = [check_json_digest(json.loads(file.read_text())) for file in files]
    assert json.loads(json.dumps(result.to_dict())) in stored


# Modes.


def test_batch_statistics_and_normalized_logits_change_the_value_and_are_recorded(runs: dict[str, Path]) -> None:
    running, batch, normalized = (
        run_probes(runs["conv"], "toy_probes:loss(samples=14)", **options)[0]
        for options in ({}, {"batchnorm": "train"}, {"normalize_logits": True})
    )
    assert (batch.data["batchnorm"], batch.data["batch"]) == ("train", 7)
    assert normalized.data["normalize_logits"] is True
    assert len({result.rows["member 0"].value for result in (running, batch, normalized)}) == 3


def test_samples_are_augmented_as_in_training(runs: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "plateaux")
    (plain,), (augmented,), (repeated,) = (
        run_probes(runs["conv"], "toy_probes:loss", augment=augment) for augment in (False, True, True)
    )
    assert augmented.data["augmentation"] == {"crop": 2, "flip": True}
    assert augmented.rows == repeated.rows
    assert augmented.rows["member 0"].value != plain.rows["member 0"].value
    assert run_probes(runs["conv"], "toy_probes:loss", augment=True, split="test")[0].data["samples"] == 3
    assert not any("no augmentation" in message for message in caplog.messages)
    (unchanged,) = run_probes(runs["mlp"], "toy_probes:loss", augment=True)
    assert unchanged.data["augmentation"] == "none"
    assert any("no augmentation" in message for message in caplog.messages)


def test_probe_mode_restores_the_mode_of_every_layer() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    net[1].eval()
    with probe_mode(net, "eval"):
        assert not any(layer.training for layer in net.modules())
    with probe_mode(net, "train"):
        assert [layer.training for layer in net.modules()] == [True, False, True, False]
    with probe_mode(nn.Sequential(nn.Linear(2, 2)), "train") as _, probe_mode(net[2], "train"):
        assert not net[2].training  # no BatchNorm: nothing to restore
    assert [layer.training for layer in net.modules()] == [True, True, False, True]


def test_random_numbers_of_a_network_come_from_the_seed_of_the_member(rng_unchanged: None) -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(super().forward(x), training=True)

    sample = ProbeBatch(torch.arange(3), (Batch(torch.ones(3, 2), torch.zeros(3).long(), torch.arange(3)),))
    with torch.random.fork_rng():
        net = Noisy(2, 4).train()
    calls: list[int] = []
    surface = make_loss_surface(net, sample, ProbeOptions(), seed=1, member_id=0, on_forward=lambda: calls.append(1))
    assert torch.equal(surface.all_losses(), surface.all_losses())
    assert len(calls) == 2


# Progress, errors, and interruption.


def test_the_run_time_is_estimated_first_and_progress_increases(
    runs: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "plateaux")
    events: list[Any] = []
    run_probes(runs["mlp"], "toy_probes:ascent", "toy_probes:loss(samples=16)", progress=events.append)
    assert caplog.messages[0].startswith("2 probes of 2 members on train samples: about ")
    assert caplog.messages[1].startswith("toy_probes:ascent: ")
    done = [event.done for event in events]
    assert done == sorted(set(done))
    assert events[-1].done == events[-1].total == int(2 * (16 * (1 + 4 / 3) + 16 / 3))


def test_progress_of_a_long_probe_follows_the_clock_up_to_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    events: list[Any] = []
    meter = ProgressMeter(200.0, events.append)
    with meter.track(100.0, 0.1):
        for now[0] in (1.0, 1.0, 3.0, 99.0):
            meter.on_forward()
    assert events == [WorkDone(10, 200), WorkDone(30, 200), WorkDone(95, 200), WorkDone(100, 200)]


def test_an_unsupported_probe_is_skipped_and_the_reason_is_logged(
    runs: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "plateaux")
    (result,) = run_probes(runs["mlp"], "toy_probes:refuses", "toy_probes:loss")
    assert result.metric == "toy_probes:loss"
    assert "toy_probes:refuses is skipped: this network is not supported" in caplog.messages
    with pytest.raises(RecipeError, match="not supported"):
        run_probes(runs["mlp"], "toy_probes:refuses")


def test_ctrl_c_keeps_the_finished_results(runs: dict[str, Path]) -> None:
    for file in (runs["mlp"] / "metrics").glob("*.json"):
        file.unlink()
    with pytest.raises(Interrupted, match=r"during probe toy_probes:stopped, after 1 of 2 members; 1 of 3 probes"):
        run_probes(runs["mlp"], "toy_probes:loss", "toy_probes:stopped", "toy_probes:ascent")
    stored = [json.loads(file.read_text()) for file in sorted((runs["mlp"] / "metrics").glob("*.json"))]
    assert [result["metric"] for result in stored] == ["toy_probes:loss", "toy_probes:stopped"]
    assert list(stored[1]["rows"]) == list(stored[1]["hashes"]) == ["member 0"]
    with pytest.raises(Interrupted, match="0 of 2 members"):
        run_probes(runs["mlp"], "toy_probes:stopped(after=0)")


def test_a_probe_does_not_change_the_member(runs: dict[str, Path], tmp_path: Path) -> None:
    import toy_probes

    probe: Probe = toy_probes.ascent()
    module = plateaux.load_predictor(plateaux.open_run(runs["conv"], trust=TRUST)).ensemble.members[0]
    before = tensor_tree.clone(module.state_dict())
    x, y = build_data(recipe("deep_ensemble", "conv_bn", samples=9), GIVEN).train.fetch(torch.arange(9))
    assert isinstance(x, torch.Tensor)
    with probe_mode(module, "train"):
        probe.run(LossSurface(MemberModule(module), [Batch(x, y, torch.arange(9))]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_data_other_than_the_training_data_of_the_run_are_rejected(runs: dict[str, Path]) -> None:
    run = Run.open(runs["mlp"])
    x = torch.randn(40, *run.info.data.shape)
    other_data = DataSplits(
        "blobs", InMemorySource(x, torch.arange(40) % 2), InMemorySource(x, torch.arange(40) % 2), 3, tuple(x.shape[1:])
    )
    evaluator = Evaluator(plateaux.open_run(run, data=other_data, trust=TRUST))
    with pytest.raises(RunError, match="have changed since this run was trained"):
        ProbeSession(evaluator, "train", ProbeOptions(), limit=4)


# During training.


PROBE = {"probes": ["toy_probes:ascent", "toy_probes:loss", "toy_probes:refuses"], "every": 2, "samples": 12}


@pytest.mark.parametrize(("net", "mode"), [("conv_bn", "loop"), ("conv_bn", "offload"), ("mlp", "vmap")])
def test_probes_do_not_change_training(net: str, mode: str, tmp_path: Path) -> None:
    base = recipe("sam", net, members=2, train={"epochs": 3}, executor={"mode": mode})
    plain = weights(train(base, tmp_path / "plain", **GIVEN.keywords()))
    probed = train(base.replaced(probe=PROBE), tmp_path / "probed", **GIVEN.keywords())
    for one, other in zip(plain, weights(probed), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    records = [record for record in probed.log(1) if "probe" in record]
    assert [(record["epoch"], record["probe"]) for record in records] == [
        (epoch, name) for epoch in (2, 3) for name in PROBE["probes"]
    ]
    assert "not supported" in records[2]["problem"]
    assert records[0]["rows"][""].keys() == {"value", "stderr", "mc_stderr"}
    assert records[0]["data"]["samples"] == 12


@pytest.mark.slow
def test_the_last_record_equals_the_probe_of_the_finished_member(tmp_path: Path) -> None:
    run = train(recipe("deep_ensemble", "conv_bn", members=2, probe=PROBE), tmp_path / "run", **GIVEN.keywords())
    results = run_probes(tmp_path / "run", "toy_probes:ascent", "toy_probes:loss", limit=12)
    by_name = {result.metric: result for result in results}
    for number in (0, 1):
        for record in run.log(number):
            if "rows" in record:
                result = by_name[record["probe"]]
                assert record["rows"][""]["value"] == result.rows[f"member {number}"].value
                assert record["data"].items() <= result.data.items()


def test_records_survive_interruption_and_resume(tmp_path: Path) -> None:
    row = recipe(members=1, train={"epochs": 4}, probe={**PROBE, "every": 1}, run={"checkpoint_every_epochs": 2})
    whole = train(row, tmp_path / "whole", **GIVEN.keywords())

    def stop(event: Any) -> None:
        if getattr(event, "completed_epoch", None) == 3:
            raise Interrupted("enough")

    with pytest.raises(Interrupted):
        train(row, tmp_path / "cut", **GIVEN.keywords(), progress=stop)
    rest = train(row, tmp_path / "cut", **GIVEN.keywords())
    for one, other in zip(weights(whole), weights(rest), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    kept = [[line for line in run.log(0) if "probe" in line] for run in (whole, rest)]
    assert kept[0] == kept[1]
    assert [line["epoch"] for line in kept[0] if line["probe"] == "toy_probes:loss"] == [1, 2, 3, 4]


def test_a_run_can_be_resumed_with_other_probes(tmp_path: Path) -> None:
    row = recipe(members=1)
    train(row, tmp_path / "run", **GIVEN.keywords())
    again = train(row.replaced(probe=PROBE), tmp_path / "run", **GIVEN.keywords())
    assert not [line for line in again.log(0) if "probe" in line]


def test_an_unknown_probe_is_rejected_before_training() -> None:
    with pytest.raises(RecipeError, match="There is no probe called 'sharpnes'"):
        check(Experiment(recipe(probe={"probes": ["sharpnes"]})))


def test_nan_is_null_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import toy_probes

    nan = Probe(lambda _: {"": Estimate(float("nan"))}, lambda n: n)
    monkeypatch.setattr(toy_probes, "nothing", lambda: nan, raising=False)
    run = train(recipe(members=1, probe={"probes": ["toy_probes:nothing"]}), tmp_path / "run", **GIVEN.keywords())
    (line,) = [line for line in run.log(0) if "probe" in line]
    assert line["rows"][""]["value"] is None
