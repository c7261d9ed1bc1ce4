"""Damaged and exchanged files are refused by name, and `verify` finds them all."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import weights_path
from typer.testing import CliRunner

from plateaux import Recipe, calibrate, evaluate, load_predictor, predict, train
from plateaux.cli.main import app
from plateaux.core.errors import Interrupted, StorageError
from plateaux.core.progress import MemberUpdate
from plateaux.errors import PlateauxError
from plateaux.storage import digests
from plateaux.storage.local_store import LocalStore
from plateaux.storage.run import Run
from plateaux.storage.verify import verify

RECIPE = {
    "members": 2,
    "data": {"name": "digits", "batch_size": 256, "validation_split": 0.2},
    "model": {"name": "mlp", "hidden_sizes": [8]},
    "train": {"epochs": 2},
    "run": {"keep_checkpoints": "last"},
}


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs") / "run"
    train(Recipe.from_dict(RECIPE), root)
    evaluate(root, metrics="accuracy")
    calibrate(root)
    return root


@pytest.fixture
def run(complete: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(complete, tmp_path / "run"))


def flip(file: Path, position: float) -> None:
    content = bytearray(file.read_bytes())
    content[min(int(position * len(content)), len(content) - 1)] ^= 1
    file.write_bytes(content)


def test_digests_equal_hashlib() -> None:
    small, large = b"abc", bytes(range(256)) * 5000
    assert digests.digest_bytes(small) == f"sha256:3:{hashlib.sha256(small).hexdigest()}"
    expected = f"sha256:{len(large)}:{hashlib.sha256(large).hexdigest()}"
    assert digests.digest_bytes(large) == digests.digest_file(io.BytesIO(large)) == expected


def test_progress_names_the_digest_of_every_object_of_a_member(run: Path) -> None:
    for number in range(2):
        progress = Run.open(run).progress(number)
        assert progress.digests.keys() == set(progress.named())
        for name, digest in progress.digests.items():
            assert digest == digests.digest_bytes((run / name).read_bytes())
        paths = (path for path in (run / f"members/{number}").rglob("*.*") if path.is_file())
        files = {path.relative_to(run).as_posix() for path in paths} - {f"members/{number}/.lock"}
        assert files == {*progress.named(), f"members/{number}/progress.json"}


@pytest.mark.parametrize("position", [0.01, 0.5, 0.99])
def test_a_flipped_bit_in_the_weights_is_detected(run: Path, position: float) -> None:
    flip(weights_path(run, 1), position)
    shutil.rmtree(run / "predictions")
    with pytest.raises(StorageError, match=r"weights-\w+\.safetensors is damaged.*delete members/1 and run the same"):
        evaluate(run, metrics="accuracy")
    with pytest.raises(StorageError, match=r"weights-\w+\.safetensors is damaged"):
        load_predictor(run)


@pytest.mark.parametrize("position", [0.1, 0.5, 0.9])
def test_a_flipped_bit_in_a_checkpoint_is_detected(tmp_path: Path, position: float) -> None:
    recipe, root = Recipe.from_dict(RECIPE), tmp_path / "run"

    def interrupt(event: object) -> None:
        if isinstance(event, MemberUpdate) and Run.open(root).progress(0).checkpoints:
            raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        train(recipe, root, progress=interrupt)
    (checkpoint,) = root.glob("members/0/resume-*.pt")
    flip(checkpoint, position)
    with pytest.raises(StorageError, match=f"{checkpoint.name} is damaged: its content does not match its digest"):
        train(recipe, root)


def test_weights_of_another_member_are_detected(run: Path) -> None:
    shutil.copy(weights_path(run, 0), weights_path(run, 1))
    with pytest.raises(StorageError, match="does not match its digest"):
        load_predictor(run)


@pytest.mark.parametrize("position", [0.1, 0.5, 0.99])
def test_damaged_cached_logits_are_detected_and_computed_again_once_deleted(run: Path, position: float) -> None:
    before = evaluate(run, metrics="nll")["nll"].value
    logits = sorted(run.glob("predictions/*/*-logits.safetensors"))[0]
    flip(logits, position)
    with pytest.raises(StorageError, match=r"is damaged.*Delete predictions/[0-9a-f]+; it is computed again"):
        evaluate(run, split=["test", "validation"], metrics="nll")  # one of the two is damaged
    shutil.rmtree(logits.parent)
    assert evaluate(run, metrics="nll")["nll"].value == before


def test_cached_logits_under_another_name_are_detected(run: Path) -> None:
    evaluate(run, metrics="nll")
    for folder in run.glob("predictions/*"):
        first, second = sorted(folder.glob("*-logits.safetensors"))
        shutil.copy(first, second)
    with pytest.raises(StorageError, match="does not match its digest"):
        evaluate(run, metrics="nll")


def test_a_deleted_calibration_is_an_error(run: Path) -> None:
    assert predict(run, split="test").to_records()[0]["abstain"] is not None
    (run / "calibration.json").unlink()
    with pytest.raises(StorageError, match=r"was calibrated, but calibration\.json is missing"):
        predict(run, split="test")
    calibrate(run)
    assert predict(run, split="test").to_records()[0]["abstain"] is not None


def test_a_changed_number_in_a_json_file_is_detected(run: Path) -> None:
    file = run / "members/0/progress.json"
    file.write_text(file.read_text().replace('"epoch": 2', '"epoch": 1'))
    with pytest.raises(StorageError, match=r"progress\.json is damaged: its content does not match its digest"):
        Run.open(run).progress(0)


def test_a_changed_recipe_file_is_detected(run: Path) -> None:
    file = run / "recipe.toml"
    file.write_text(file.read_text() + "\n")
    with pytest.raises(StorageError, match=r"recipe\.toml is damaged: it has"):
        Run.open(run)
    train(Recipe.from_dict(RECIPE), run)  # the same recipe again: it is written again
    Run.open(run)


def test_tensor_files_stay_readable_by_other_programs(run: Path) -> None:
    from safetensors.torch import load_file

    ours = Run.open(run).weights(0)
    theirs = load_file(weights_path(run, 0))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs.keys() | ours.keys())


def test_the_digest_of_an_array_is_in_the_json_next_to_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with store.array_writer("a.safetensors", np.float32, 1000, {"key": "value"}) as write:
        write(np.arange(1000, dtype=np.float32))
    metadata, values = store.get_array("a.safetensors")
    assert metadata == {"key": "value"}
    assert np.array_equal(values, np.arange(1000))
    flip(tmp_path / "a.safetensors", 0.7)
    with pytest.raises(StorageError, match="does not match its digest"):
        store.get_array("a.safetensors")
    with pytest.raises(StorageError, match="does not match its digest"):
        list(store.iter_array("a.safetensors", 100))
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes())
    shutil.copy(tmp_path / "a.json", tmp_path / "b.json")
    with pytest.raises(StorageError, match=r"b\.json does not have its digest"):
        store.get_array("b.safetensors")


def test_verify_passes_for_an_intact_run(run: Path) -> None:
    result = verify(run)
    assert result.ok
    assert result.unchecked == []
    files = [path for path in run.rglob("*") if path.is_file() and not path.relative_to(run).as_posix().count("/.")]
    assert result.checked == len([path for path in files if not path.name.startswith(".")])
    assert CliRunner().invoke(app, ["verify", str(run)]).exit_code == 0


def test_verify_names_every_damaged_and_missing_file(run: Path) -> None:
    files = sorted(path for path in run.rglob("*") if path.is_file() and not path.name.startswith("."))
    for file in files:
        if file.name in ("run.json", "recipe.toml"):
            continue
        content = file.read_bytes()
        for damage in ("flip", "truncate", "delete"):
            flip(file, 0.6) if damage == "flip" else file.write_bytes(content[:-9])
            is_named = file.relative_to(run).parts[0] in ("members", "calibration.json")
            has_record = file.suffix == ".json" and file.with_suffix(".safetensors").exists()
            if damage == "delete":
                file.unlink()
                if not (is_named or has_record) or file.name == "progress.json":
                    file.write_bytes(content)
                    continue
            name = file.relative_to(run).as_posix()
            damaged = {name, name.removesuffix(".json") + ".safetensors"} if has_record else {name}
            damaged -= {name} if damage == "delete" and has_record else set()
            result = verify(run)
            assert result.damaged.keys() == damaged, (name, damage)
            assert all(Path(each).stem in problem for each, problem in result.damaged.items())
            file.write_bytes(content)
    flip(weights_path(run, 0), 0.5)
    done = CliRunner().invoke(app, ["verify", str(run), "--json"])
    assert done.exit_code == 4
    assert json.loads(done.stdout)["damaged"].keys() == {weights_path(run, 0).relative_to(run).as_posix()}
    assert isinstance(done.exception, SystemExit | PlateauxError)
