"""Damaged and hostile files in a run folder: every command refuses them or gives the same answer, and nothing hangs.

CI runs a seeded sample of the cases; `PLATEAUX_LONG=1` runs all of them.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from attacking import COUNTS
from cases import weights_path
from typer.testing import CliRunner

from plateaux import Recipe, calibrate, evaluate, train
from plateaux.cli.main import app

LONG = bool(os.environ.get("PLATEAUX_LONG"))
SAMPLE = 16  # cases in CI
CODES = {0, 2, 3, 4, 5, 6}
RECIPE = {
    "members": 2,
    "data": {"name": "digits", "batch_size": 512, "validation_split": 0.2},
    "model": {"name": "mlp", "hidden_sizes": [4]},
    "train": {"epochs": 1},
    "run": {"keep_checkpoints": "last"},
}


class Marker:
    """An object whose unpickling creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.file,)


def build(root: Path, seed: int) -> Path:
    train(Recipe.from_dict({**RECIPE, "seed": seed}), root)
    evaluate(root, metrics=["accuracy", "nll"])
    calibrate(root)
    return root


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return build(folder / "run", 0), build(folder / "other", 1)


def flip(position: float) -> Callable[[Path, Path, Path], None]:
    def apply(file: Path, _: Path, __: Path) -> None:
        content = bytearray(file.read_bytes())
        if content:
            content[min(int(position * len(content)), len(content) - 1)] ^= 1 << 3
        file.write_bytes(content)

    return apply


def replace_by_fifo(file: Path, _: Path, __: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def link(file: Path, _: Path, outside: Path) -> None:
    file.rename(outside / "target")
    file.symlink_to(outside / "target")


DAMAGES: dict[str, Callable[[Path, Path, Path], object]] = {
    "truncated": lambda file, _, __: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "emptied": lambda file, _, __: file.write_bytes(b""),
    "deleted": lambda file, _, __: file.unlink(),
    "flipped at the start": flip(0.0),
    "flipped in the middle": flip(0.5),
    "flipped at the end": flip(1.0),
    "from another run": lambda file, other, _: shutil.copy(other, file) if other.exists() else file.unlink(),
    "a symbolic link": link,
    "a FIFO": replace_by_fifo,
    "a pickle": lambda file, _, outside: file.write_bytes(pickle.dumps(Marker(outside / "executed"))),
    "a header of a gigabyte": lambda file, _, __: file.write_bytes((1 << 30).to_bytes(8, "little") + b"{" * 100),
    "a million levels": lambda file, _, __: file.write_bytes(b"[" * 1_000_000),
}


def files(root: Path) -> list[str]:
    """Return every file, with one of many equal ones: hashes in names differ between runs."""
    names = (path.relative_to(root) for path in sorted(root.rglob("*")) if path.is_file())
    return [name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts)]


def is_named(name: str) -> bool:
    """Return whether the run records the digest of a file elsewhere, so that verify notices every change and loss."""
    return name in ("recipe.toml", "calibration.json") or (
        name.startswith("members/") and not name.endswith("progress.json")
    )


def call(*words: str) -> tuple[int, str]:
    COUNTS["inputs"] += 1
    result = CliRunner().invoke(app, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit), (words, result.exception)
    assert result.exit_code in CODES, (words, result.output)
    assert "Traceback" not in result.output
    return result.exit_code, result.stdout


def values(text: str) -> dict[str, dict[str, float]]:
    return {
        result["metric"]: {name: row["value"] for name, row in result["rows"].items()} for result in json.loads(text)
    }


def counterpart(other: Path, name: str) -> Path:
    """Return the same file of another run; names of objects contain the id of an attempt."""
    return next(other.glob(re.sub(r"-[0-9a-f]{8}\.", "-*.", name)), other / name)


def cases() -> list[tuple[int, str]]:
    every = [(position, damage) for position in range(40) for damage in DAMAGES]
    return every if LONG else random.Random(23).sample(every, SAMPLE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("position", "damage"), cases())
def test_a_damaged_file_is_refused_or_changes_nothing(
    runs: tuple[Path, Path], tmp_path: Path, position: int, damage: str
) -> None:
    original, other = runs
    names = files(original)
    name = names[position % len(names)]
    if LONG and position >= len(names):
        pytest.skip(f"there are only {len(names)} files")
    root, outside = Path(shutil.copytree(original, tmp_path / "run")), tmp_path / "outside"
    outside.mkdir()
    DAMAGES[damage](root / name, counterpart(other, name), outside)
    before = {file: file.read_bytes() for file in outside.iterdir()}
    metrics = ("--metrics", "accuracy,nll")
    expected = values(call("evaluate", str(original), *metrics, "--json")[1])
    call("status", str(root), "--json")
    call("plan", str(root), "--json")
    verified, _ = call("verify", str(root), "--json")
    if is_named(name):
        assert verified == 4, "verify did not notice the damage"
    call("report", str(root), "--out", str(tmp_path / "report.json"))
    call("predict", str(root), "--split", "test", "--out", str(tmp_path / "predictions.csv"))
    code, text = call("evaluate", str(root), *metrics, "--json")
    if code == 0:
        COUNTS["silent differences"] += values(text) != expected
        assert values(text) == expected, "a silent difference"
    assert {file: file.read_bytes() for file in outside.iterdir()} == before


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_training_again_gives_the_same_weights_or_is_refused(
    runs: tuple[Path, Path], tmp_path: Path, damage: str
) -> None:
    original, other = runs
    expected = {name: (original / name).read_bytes() for name in files(original) if "/weights-" in name}
    for name in [name for name in files(original) if name.startswith("members/1/")][:: 1 if LONG else 2]:
        root, outside = tmp_path / name.replace("/", "-"), tmp_path / f"outside-{name.replace('/', '-')}"
        shutil.copytree(original, root)
        outside.mkdir()
        DAMAGES[damage](root / name, counterpart(other, name), outside)
        code, _ = call("train", str(original / "recipe.toml"), "--out", str(root), "--no-evaluate")
        verified, _ = call("verify", str(root))
        if code == 0 and verified == 0:
            assert [weights_path(root, n).read_bytes() for n in range(len(expected))] == list(expected.values())
        assert not (outside / "executed").exists()
