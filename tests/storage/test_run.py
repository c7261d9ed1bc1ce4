"""The run folder: its files, the progress of members, and rejected recipes and data."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import NO_DATA, blobs, weight_files, weights_path

import plateaux
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RunError, StorageError
from plateaux.data.sources import DataSplits, InMemorySource
from plateaux.storage.local_store import LocalStore
from plateaux.storage.member_writer import MemberWriter, write_member
from plateaux.storage.run import MemberProgress, Run, environment
from plateaux.storage.run_info import FORMAT, AutotuneInfo, DataInfo, RunInfo, UnlabeledInfo
from plateaux.training.train import train

SMALL = ("data.samples=30", "data.test_samples=9", "model.hidden_sizes=[4]", "train.epochs=2", "run.log_every=50")
RECIPE = blobs(*SMALL)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def numbers(x: float = 0.0) -> DataSplits:
    """A data set of six points."""
    points = InMemorySource(torch.arange(12.0).reshape(6, 2) + x, torch.arange(6) % 2)
    return DataSplits("points", points, points, 2, (2,))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    train(RECIPE, out)
    return out


def copy(folder: Path, to: Path) -> Path:
    for name, content in contents(folder).items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(content)
    return to


@pytest.mark.parametrize("source", ["another member", "another run"])
def test_the_folder_of_another_member_is_refused(source: str, trained: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    other = train(RECIPE, tmp_path / "other").store.root / "members" / "1" if source == "another run" else None
    copy(Path(str(other)) if other else run / "members" / "0", run / "members" / "1")
    with pytest.raises(RunError, match="is not of member 1 of this run: the folder was copied"):
        plateaux.evaluate(run)
    with pytest.raises(RunError, match="is not of member 1"):
        plateaux.load_predictor(run)
    assert Run.open(copy(trained, tmp_path / "moved")).progress(1).finished


def test_a_run_folder_has_the_documented_files(trained: Path) -> None:
    names = set(contents(trained))
    assert {"run.json", "recipe.toml", "environment.json"} < names
    assert {f"members/{n}/progress.json" for n in (0, 1)} < names
    assert all(re.fullmatch(r"weights-[0-9a-f]{8}\.safetensors", weights_path(trained, n).name) for n in (0, 1))
    info = json.loads((trained / "run.json").read_text())
    assert info["format"] == FORMAT
    assert list(info["members"]) == ["0", "1"]
    assert info["data"]["train"] == {"samples": 30, "fingerprint": info["data"]["train"]["fingerprint"]}
    assert Recipe.load(trained / "recipe.toml") == RECIPE
    assert LocalStore(trained).get_json("environment.json") == environment()


def test_weights_can_be_loaded_without_plateaux(trained: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file

    x = np.ones((5, 2), dtype=np.float32)
    w = load_file(weights_path(trained, 1))
    logits = np.maximum(x @ w["1.weight"].T + w["1.bias"], 0) @ w["3.weight"].T + w["3.bias"]
    from plateaux.deploy.load_predictor import load_predictor

    np.testing.assert_allclose(load_predictor(trained).ensemble.logits(torch.ones(5, 2))[1].numpy(), logits, rtol=1e-5)


def test_a_folder_without_a_run_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not a run folder: it has no run\.json\. `plateaux train RECIPE --out"):
        Run.open(tmp_path)


@pytest.mark.parametrize("other", [FORMAT + 1, 0, None, "1"])
def test_another_format_is_rejected_with_an_explanation(trained: Path, tmp_path: Path, other: Any) -> None:
    run = copy(trained, tmp_path)
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**info, "format": other}))  # as an older version, without a digest
    before = contents(run)
    for call in (lambda: Run.open(run), lambda: train(RECIPE, run)):
        with pytest.raises(RunError, match=rf"has format .*; this version of Plateaux reads format {FORMAT}\. Use the"):
            call()
    assert contents(run) == before


@pytest.mark.parametrize("content", ["[1]", '"x"', "3"])
def test_a_run_json_that_is_not_an_object_is_rejected(trained: Path, tmp_path: Path, content: str) -> None:
    run = copy(trained, tmp_path)
    (run / "run.json").write_text(content)
    with pytest.raises(RunError, match="format"):
        Run.open(run)


def test_another_recipe_is_rejected_with_the_differences_and_nothing_is_changed(trained: Path) -> None:
    before = contents(trained)
    other = RECIPE.replaced(optimizer={"lr": 0.2, "momentum": 0.9}, method={"name": "sam", "rho": 0.1})
    with pytest.raises(RunError) as error:
        train(other, trained)
    assert str(error.value).splitlines() == [
        f"{trained} belongs to another recipe. Differences (stored -> given):",
        "  method.name: 'deep_ensemble' -> 'sam'",
        "  method.rho: (unset) -> 0.1",
        "  optimizer.lr: 0.1 -> 0.2",
        "  optimizer.momentum: (unset) -> 0.9",
        "Choose another --out, or restore the recipe",
    ]
    assert contents(trained) == before


@pytest.mark.parametrize(
    "change", [{"executor": {"mode": "offload"}}, {"executor": {"processes": 2}}, {"run": {"log_every": 7}}]
)
def test_executor_and_run_settings_do_not_make_another_recipe(
    trained: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    run = copy(trained, tmp_path)
    weights = {name: content for name, content in contents(run).items() if name.startswith("members")}
    train(RECIPE.replaced(**change), run)
    assert {name: content for name, content in contents(run).items() if name.startswith("members")} == weights


def test_other_data_with_the_same_recipe_are_rejected(tmp_path: Path) -> None:
    Run.begin(tmp_path, Experiment(RECIPE), RunInfo(DataInfo.from_splits(numbers())))
    run = Run.begin(tmp_path, Experiment(RECIPE), RunInfo(DataInfo.from_splits(numbers())))
    with write_member(run, 0) as writer:
        writer.commit(MemberProgress(epoch=1))
    with pytest.raises(RunError) as error:
        Run.begin(tmp_path, Experiment(RECIPE), RunInfo(DataInfo.from_splits(numbers(1.0))))
    assert (
        "was trained on other data or with other model code. Differences (stored -> given):\n  test.fingerprint: '"
        in str(error.value)
    )
    assert "train.fingerprint: " in str(error.value)


def test_a_larger_ensemble_trains_only_the_new_members(trained: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "grown")
    before = {name: content for name, content in contents(run).items() if name.startswith("members")}
    members = set()
    train(RECIPE.replaced(members=3), run, progress=lambda event: members.add(getattr(event, "member", None)))
    assert members == {2}
    after = contents(run)
    assert {name: after[name] for name in before} == before
    new_run = train(RECIPE.replaced(members=3), tmp_path / "new")
    assert weight_files(Run.open(run)) == weight_files(new_run)
    assert len(json.loads(after["run.json"])["members"]) == 3


def test_a_finished_run_is_not_changed(trained: Path) -> None:
    before = contents(trained)
    events: list[Any] = []
    train(RECIPE, trained, progress=events.append)
    assert contents(trained) == before
    assert events == []


def test_the_name_of_a_member_depends_only_on_what_determines_its_weights(tmp_path: Path) -> None:
    def name(number: int = 0, **changes: Any) -> str:
        return Run.begin(
            tmp_path / str(len(list(tmp_path.iterdir()))), Experiment(RECIPE.replaced(**changes)), NO_DATA
        ).member_name(number)

    assert name() == name(members=7) == name(executor={"mode": "vmap"}) == name(run={"log_every": 3})
    assert len({name(), name(1), name(seed=1), name(train={"epochs": 3}), name(data={"batch_size": 8})}) == 5


def test_a_new_member_is_at_the_first_epoch(tmp_path: Path) -> None:
    run = Run.begin(tmp_path, Experiment(RECIPE), NO_DATA)
    assert run.all_progress() == [MemberProgress(), MemberProgress()]
    assert MemberProgress().position == (0, 0)
    with pytest.raises(RunError, match=r"Member 1 of .* has no weights yet \(0 of 2 epochs done\)\. Run the same"):
        run.weights(1)


def test_progress_is_read_back_and_unreferenced_objects_are_deleted(tmp_path: Path) -> None:
    run = Run.begin(tmp_path, Experiment(RECIPE), NO_DATA)
    old = MemberProgress(epoch=1, step=2)
    with write_member(run, 0) as writer:
        _check_a_commit(tmp_path, run, writer, old)
    stored = Run.open(tmp_path).progress(0)
    assert stored.claim is None


def _check_a_commit(tmp_path: Path, run: Run, writer: MemberWriter, old: MemberProgress) -> None:
    part = writer.put_log(old, [{"loss": 0.5}, {"loss": 0.25}])
    state = writer.put_state(old, {"x": torch.ones(1)})
    best = writer.put_weights({"w": torch.ones(2)}, epoch=1, best=True)
    spare = writer.put_weights({"w": torch.ones(2)}, epoch=0, best=True)
    writer.put_state(MemberProgress(epoch=1, step=1), {"x": torch.ones(1)})
    progress = replace(
        old,
        checkpoints=((1, 2, state),),
        log_parts=(part,),
        weights=best,
        previous_weights=spare,
        best=0.1,
        seconds=2.5,
    )
    writer.commit(progress)
    stored = Run.open(tmp_path).progress(0)
    assert stored.claim is not None
    assert replace(stored, digests={}, claim=None) == progress
    assert stored.digests.keys() == {part, state, best, spare}
    assert set(run.store.names("members/0")) == {part, state, best, spare, "members/0/progress.json"}
    assert run.log(0) == [{"loss": 0.5}, {"loss": 0.25}]
    assert torch.equal(run.weights(0)["w"], torch.ones(2))


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"checkpoints": [[1]], "log_parts": []}', '{"checkpoints": [], "log_parts": [], "new": 1}']
)
def test_an_invalid_progress_file_is_reported(tmp_path: Path, content: str) -> None:
    run = Run.begin(tmp_path, Experiment(RECIPE), NO_DATA)
    run.store.put_json("members/1/progress.json", json.loads(content))
    with pytest.raises(StorageError, match=r"members/1/progress\.json.*; restore it, or delete its folder"):
        run.progress(1)


def test_progress_cannot_name_files_outside_the_run(tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    run = Run.begin(tmp_path / "run", Experiment(RECIPE), NO_DATA)
    run.store.put_json(
        "members/0/progress.json",
        asdict(
            MemberProgress(
                member=f"{run.info.id}/0",
                weights="../secret.safetensors",
                log_parts=("/etc/passwd",),
                digests={"../secret.safetensors": "sha256:6:0", "/etc/passwd": "sha256:1:0"},
            )
        ),
    )
    for read in (run.weights, run.log):
        with pytest.raises(StorageError, match="is not a valid object name"):
            read(0)


@pytest.mark.parametrize(("keep", "states"), [("none", 0), ("last", 1)])
def test_checkpoints_of_finished_members_are_kept_only_on_request(tmp_path: Path, keep: str, states: int) -> None:
    run = train(RECIPE.replaced(run={"keep_checkpoints": keep}), tmp_path)
    for number in range(2):
        assert len(run.progress(number).checkpoints) == states
        assert len([n for n in run.store.names(f"members/{number}") if n.endswith(".pt")]) == states


def test_the_resolved_recipe_has_the_autotuned_settings(tmp_path: Path) -> None:
    run = Run.begin(tmp_path, Experiment(RECIPE.replaced(train={"precision": "auto"})), NO_DATA)
    assert run.resolved_recipe().train.precision == "auto"
    run.with_autotune(AutotuneInfo("bf16", "channels_last", tried=()))
    run = Run.open(tmp_path)
    assert run.recipe.train.precision == "auto"
    assert (run.resolved_recipe().train.precision, run.resolved_recipe().train.memory_format) == (
        "bf16",
        "channels_last",
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (("data",), "lacks the field 'data'"),
        (("data", "classes"), "lacks the field 'data.classes'"),
        (("data", "train", "samples"), "lacks the field 'data.train.samples'"),
    ],
)
def test_a_missing_field_of_run_json_is_reported(tmp_path: Path, path: tuple[str, ...], message: str) -> None:
    tree = Run.begin(tmp_path, Experiment(RECIPE), NO_DATA).store.get_json("run.json")
    section = tree
    for name in path[:-1]:
        section = section[name]
    del section[path[-1]]
    Run.begin(tmp_path, Experiment(RECIPE), NO_DATA).store.put_json("run.json", tree)
    with pytest.raises(StorageError, match=rf"run\.json {message}; restore it"):
        Run.open(tmp_path)


def test_run_info_is_read_back_and_keeps_the_stored_keys(tmp_path: Path) -> None:
    data = replace(NO_DATA.data, shape=(3, 2), labels=("a", "b"), unlabeled=UnlabeledInfo("more", "ab", (1, 4)))
    info = RunInfo(data, imported_from=("a.safetensors",), autotune=AutotuneInfo(scoring_batch=7))
    run = Run.begin(tmp_path, Experiment(RECIPE), info)
    assert Run.open(tmp_path).info == run.info == replace(info, id=run.info.id)
    tree = run.store.get_json("run.json")
    assert list(tree) == ["format", "data", "id", "imported_from", "autotune", "recipe_digest", "members"]
    assert tree["data"] == {
        "name": "none", "classes": 2, "shape": [3, 2], "mean": [], "std": [], "labels": ["a", "b"],
        "train": {"samples": 0, "fingerprint": ""}, "test": {"samples": 0, "fingerprint": ""},
        "unlabeled": {"name": "more", "fingerprint": "ab", "ids": [1, 4]},
    }  # fmt: skip
    assert tree["autotune"] == {"scoring_batch": 7}


def test_shared_weights_are_written_once(tmp_path: Path) -> None:
    run = Run.begin(tmp_path, Experiment(RECIPE), NO_DATA)
    assert run.shared() == {}
    with write_member(run, 0) as writer:
        writer.put_shared({})
        assert not run.store.has("shared.safetensors")
        writer.put_shared({"backbone": torch.ones(2)})
        writer.put_shared({"backbone": torch.zeros(2)})
        writer.commit(MemberProgress())
    assert torch.equal(run.shared()["backbone"], torch.ones(2))
