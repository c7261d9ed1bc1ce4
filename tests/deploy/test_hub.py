"""Bundles are pushed to and pulled from a hub, a bucket, and a folder; what is pulled is checked before it is kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hub_server import Hub, running_hub

import plateaux
from plateaux.core.errors import RecipeError, RunError, StorageError
from plateaux.core.progress import ProgressEvent, WorkDone
from plateaux.deploy.bundle import Bundle
from plateaux.storage.digests import with_json_digest

pytest.importorskip("onnxruntime")
pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.xdist_group("bundle")  # one worker makes the bundle once
REPO = "someone/digits"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as found:
        yield found


def plateaux_command(hub: Hub, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run the command line against a hub, as a user does."""
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(plateaux.__file__).parents[1]),
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(folder / "hf"),
        "HF_TOKEN": "hf_loopback",
    }
    command = [sys.executable, "-m", "plateaux", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, cwd=folder)


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_bundle_is_pushed_to_the_hub_and_pulled_without_code(exported: Path, hub: Hub, tmp_path: Path) -> None:
    done = plateaux_command(hub, tmp_path, "push", exported, f"hf://{REPO}", "--private", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["address"].endswith(REPO)
    assert REPO in hub.private
    _, files = hub.files(REPO)
    assert set(files) == {*read_files(exported), ".gitattributes"}
    assert len(hub.large) == 4  # the graph, two members, and the golden samples

    done = plateaux_command(hub, tmp_path, "pull", f"hf://{REPO}", "-o", tmp_path / "pulled", "--json")
    assert done.returncode == 0, done.stderr
    assert "manifest.json" in json.loads(done.stdout)["files"]
    pulled = read_files(tmp_path / "pulled")
    assert pulled == {name: content for name, content in files.items() if name != ".gitattributes"}
    x = np.random.default_rng(0).integers(0, 256, (5, 1, 8, 8), dtype=np.uint8)
    expected = plateaux.load_predictor(exported)(x)
    assert np.array_equal(plateaux.load_predictor(tmp_path / "pulled")(x).probabilities, expected.probabilities)

    done = plateaux_command(hub, tmp_path, "pull", f"hf://{REPO}", "-o", tmp_path / "one", "--member", 1)
    assert done.returncode == 0, done.stderr
    assert read_files(tmp_path / "one") == {"members/1.safetensors": files["members/1.safetensors"]}
    assert safetensors.numpy.load(files["members/1.safetensors"])


def test_a_second_push_replaces_the_files_of_the_first_in_one_commit(exported: Path, hub: Hub, tmp_path: Path) -> None:
    hub.commits[REPO] = []
    hub.commit(REPO, {"members/7.safetensors": b"old", "notes.txt": b"kept"})
    first = hub.files(REPO)[0]
    done = plateaux_command(hub, tmp_path, "push", exported, f"hf://{REPO}")
    assert done.returncode == 0, done.stderr
    _, files = hub.files(REPO)
    assert "members/7.safetensors" not in files
    assert files["notes.txt"] == b"kept"
    assert len(hub.commits[REPO]) == 2
    # A revision is pulled as it was: the first commit is no bundle.
    done = plateaux_command(hub, tmp_path, "pull", f"hf://{REPO}@{first}", "-o", tmp_path / "first")
    assert done.returncode == 4
    assert "has no manifest.json. It is no complete bundle" in done.stderr


def test_a_private_push_to_a_public_repository_is_refused(exported: Path, hub: Hub, tmp_path: Path) -> None:
    hub.commits[REPO] = []
    hub.commit(REPO, {"notes.txt": b"kept"})
    done = plateaux_command(hub, tmp_path, "push", exported, f"hf://{REPO}", "--private")
    assert done.returncode == 4, (done.stdout, done.stderr)
    assert "exists and is public" in " ".join(done.stderr.split())
    assert set(hub.files(REPO)[1]) == {"notes.txt"}
    assert not hub.large
    hub.private.add(REPO)
    assert plateaux_command(hub, tmp_path, "push", exported, f"hf://{REPO}", "--private").returncode == 0


@pytest.mark.parametrize("change", ["flipped", "longer", "missing", "code", "absent"])
def test_a_damaged_bundle_on_the_hub_is_refused_and_leaves_no_bundle(
    exported: Path, hub: Hub, tmp_path: Path, change: str
) -> None:
    files = read_files(exported)
    message = "is damaged or was exchanged"
    if change == "flipped":
        files["model.onnx"] = files["model.onnx"][:-1] + bytes([files["model.onnx"][-1] ^ 1])
    elif change == "longer":
        files["golden.safetensors"] += b"x"
        message = "instead of at most"
    elif change == "missing":
        del files["members/0.safetensors"]
        message = "has no members/0.safetensors"
    elif change == "code":  # whoever pushed it named a file that may contain code
        tree = json.loads(files["manifest.json"])
        tree["files"]["model.pt2"] = {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
        files |= {"model.pt2": b"x", "manifest.json": json.dumps(with_json_digest(tree), indent=2).encode() + b"\n"}
        message = "names 'model.pt2', which no bundle contains"
    if change == "absent":
        message = "Check the name, your connection"
    else:
        hub.commits[REPO] = []
        hub.commit(REPO, files)
    out = tmp_path / "pulled"
    done = plateaux_command(hub, tmp_path, "pull", f"hf://{REPO}", "-o", out)
    assert done.returncode == 4, (done.stdout, done.stderr)
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (out / "manifest.json").exists()
    assert not [path for path in tmp_path.rglob("*.pt2")]


def test_a_folder_and_a_bucket_are_targets_and_sources(exported: Path, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    events: list[ProgressEvent] = []
    for address in (str(tmp_path / "shelf"), "memory://shelf/bundle"):
        out = tmp_path / f"from-{address.partition(':')[0].rpartition('/')[2]}"
        assert plateaux.push(exported, address, progress=events.append) == address
        names = plateaux.pull(address, out, progress=events.append)
        assert sorted(names) == sorted(read_files(out))
        assert set(read_files(out)) == set(read_files(exported))
        assert Bundle.open(out).manifest.files == Bundle.open(address).manifest.files
        with pytest.raises(RunError, match="is not empty"):
            plateaux.push(exported, address)
        with pytest.raises(RunError, match="is not empty"):
            plateaux.pull(address, out)
    assert events[-1] == WorkDone(len(names) - 1, len(names) - 1)


@pytest.mark.parametrize("done", range(1, 4))
def test_a_push_or_pull_into_a_folder_that_was_killed_can_be_repeated(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    for copy, out in ((plateaux.push, tmp_path / "pushed"), (plateaux.pull, tmp_path / "pulled")):
        with monkeypatch.context() as patch:
            # At the first byte of a file: the process that is killed has no chance to delete it.
            patch.setattr(os, "replace", fail_after(done, KeyboardInterrupt))
            patch.setattr(os, "unlink", lambda *_, **__: None)
            with pytest.raises(KeyboardInterrupt):
                copy(exported, out)
        assert len(read_files(out)) == done + 1
        copy(exported, out)
        assert read_files(out) == read_files(exported)
        (out / "notes.txt").write_text("mine")
        (out / "manifest.json").unlink()
        with pytest.raises(RunError, match="is not empty"):
            copy(exported, out)
        assert (out / "notes.txt").read_text() == "mine"


def fail_after(calls: int, error: type[BaseException]) -> Callable[..., None]:
    """Return a renaming function that fails after so many calls."""
    real, left = os.replace, calls

    def failing(*args: Any, **options: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise error
        real(*args, **options)

    return failing


def test_a_bundle_without_code_is_pushed_byte_by_byte(exported: Path, tmp_path: Path) -> None:
    plateaux.push(exported, tmp_path / "first")
    plateaux.push(tmp_path / "first", tmp_path / "second")
    assert read_files(tmp_path / "first") == read_files(tmp_path / "second")


def test_a_folder_with_a_changed_file_or_a_link_is_not_pulled(exported: Path, tmp_path: Path) -> None:
    plateaux.push(exported, tmp_path / "source")
    member = tmp_path / "source" / "members" / "0.safetensors"
    content = member.read_bytes()
    member.write_bytes(content[:100] + bytes([content[100] ^ 4]) + content[101:])
    with pytest.raises(StorageError, match="Nothing of it was kept"):
        plateaux.pull(tmp_path / "source", tmp_path / "out")
    secret = tmp_path / "secret.safetensors"
    shutil.copy(exported / "members" / "0.safetensors", secret)
    member.unlink()
    member.symlink_to(secret)
    with pytest.raises(StorageError):
        plateaux.pull(tmp_path / "source", tmp_path / "other")
    assert not (tmp_path / "other" / "manifest.json").exists()


def test_a_manifest_that_names_a_path_outside_is_refused(exported: Path, tmp_path: Path) -> None:
    plateaux.push(exported, tmp_path / "source")
    file = tmp_path / "source" / "manifest.json"
    tree: dict[str, Any] = json.loads(file.read_text())
    tree["files"]["../escaped.onnx"] = tree["files"]["model.onnx"]
    file.write_text(json.dumps(with_json_digest(tree), indent=2) + "\n")
    with pytest.raises(StorageError, match="which no bundle contains"):
        plateaux.pull(tmp_path / "source", tmp_path / "out" / "inner")
    assert not (tmp_path / "out").exists() or not read_files(tmp_path / "out")


@pytest.mark.parametrize("address", ["hf://name", "hf://a/b/c", "hf:///x y/z"])
def test_invalid_hub_addresses_are_refused(exported: Path, tmp_path: Path, address: str) -> None:
    for call in (lambda: plateaux.push(exported, address), lambda: plateaux.pull(address, tmp_path / "out")):
        with pytest.raises(RecipeError, match="give hf://user/name"):
            call()


def test_invalid_arguments_are_rejected_with_the_next_step(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"Leave out @v1"):
        plateaux.push(exported, f"hf://{REPO}@v1")
    with pytest.raises(RecipeError, match=r"is on the hub\. Pull into a folder"):
        plateaux.pull(exported, f"hf://{REPO}")
    plateaux.push(exported, tmp_path / "source")
    with pytest.raises(RecipeError, match=r"has no member 5\. Its members are 0, 1"):
        plateaux.pull(tmp_path / "source", tmp_path / "out", member=5)
    with pytest.raises(RunError, match="is not a bundle"):
        plateaux.pull(tmp_path / "nothing", tmp_path / "out")
