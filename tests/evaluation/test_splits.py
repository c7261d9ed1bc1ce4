"""Evaluation splits: selected by name, read only when needed, and described in the results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import NO_DATA
from PIL import Image

from plateaux.config.recipe import Recipe
from plateaux.core.errors import RunError, StorageError
from plateaux.core.row_names import MEAN_PROBABILITY
from plateaux.data.corruptions.corrupt import Corrupted, corrupt
from plateaux.deploy.load_predictor import load_predictor
from plateaux.evaluation.evaluate import evaluate
from plateaux.evaluation.splits import eval_splits
from plateaux.storage.run import Run
from plateaux.training.train import train
from tests.cli.test_main import call

FACTS = replace(NO_DATA.data, name="cifar10", classes=10)


def recipe(root: Path) -> Recipe:
    return Recipe.from_dict(
        {
            "members": 2,
            "data": {"name": "arrays", "path": "d.npz", "root": str(root), "batch_size": 16},
            "model": {"name": "cnn", "channels": [4]},
            "train": {"epochs": 1},
            "executor": {"threads": 1},
        }
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    x = np.random.default_rng(0).integers(0, 255, (40, 3, 32, 32), dtype=np.uint8)
    y = np.arange(40) % 2
    np.savez(root / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    train(recipe(root), root / "run")
    return root / "run"


def test_split_names_select_samples(tmp_path: Path) -> None:
    what = recipe(tmp_path)
    assert [each.name for each in eval_splits(what, FACTS, ["test", "train"])] == ["test", "train"]
    every = eval_splits(what, FACTS, ["corrupted"])
    assert len({each.name for each in every}) == 75
    assert {each.metadata["source"] for each in every} == {"generated, CIFAR-C-like"}
    assert len(eval_splits(what, FACTS, ["corrupted:extra"])) == 20
    assert [each.name for each in eval_splits(what, FACTS, ["corrupted:fog:3"])] == ["fog 3"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("tets", "There is no split called 'tets'"),
        ("corrupted:fig", "There is no corruption called 'fig'; did you mean 'fog'"),
        ("corrupted:fog:0", "the severity must be 1, 2, 3, 4 or 5"),
        ("corrupted:fog:3:1", "the severity must be 1, 2, 3, 4 or 5"),
        ("corrupted:fog:", "the severity must be 1, 2, 3, 4 or 5"),
    ],
)
def test_unknown_split_names_are_rejected(word: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=message):
        eval_splits(recipe(tmp_path), FACTS, [word])


def test_metrics_under_corruption_are_those_of_the_corrupted_images(run: Path, log_lines: list[str]) -> None:
    (found,) = evaluate(run, split="corrupted:gaussian_noise:5", metrics=["accuracy"])
    x, y = (torch.from_numpy(np.load(run.parent / "d.npz")[name]) for name in ("x_test", "y_test"))
    seen = corrupt(x, torch.arange(40), "gaussian_noise", 5)
    wanted = float((load_predictor(run).ensemble.predict(seen).argmax(-1) == y).double().mean())
    assert found.rows[MEAN_PROBABILITY].value == pytest.approx(wanted)
    assert (found.data["corruption"], found.data["severity"]) == ("gaussian_noise", 5)
    assert found.data["source"] == "generated, CIFAR-C-like"
    log_lines.clear()
    evaluate(run, split="corrupted:gaussian_noise:5", metrics=["nll"])
    assert "gaussian_noise 5: using cached" in log_lines[0]


def test_several_corruptions_are_summarized(run: Path) -> None:
    found = evaluate(run, split=["corrupted:fog", "corrupted:contrast"], metrics=["accuracy"], limit=8)
    summary = found.robustness()[0]
    every = [each.rows["member 0"].value for each in found]
    assert summary.rows["member 0 · cACC"].value == pytest.approx(sum(every) / 10)
    code, out, message = call("evaluate", str(run), "--split", "corrupted:fog,corrupted:contrast", "--markdown")
    assert code == 0, message
    for words in ("| fog |", "severity 5", "cACC", "not normalized", "generated, CIFAR-C-like"):
        assert words in out, words


def test_corrupted_images_are_generated_once_with_a_cache(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snow: dict[str, Any] = {"split": "corrupted:snow:2", "metrics": ["nll"], "cache_logits": "off"}
    (loose,) = evaluate(run, **snow)
    (first,) = evaluate(run, **snow, corruption_cache=tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    assert file.name.startswith("snow-2-")
    monkeypatch.setattr(Corrupted, "fetch", None)  # nothing is made any more
    (second,) = evaluate(run, **snow, corruption_cache=tmp_path)
    assert loose.rows == first.rows == second.rows
    file.write_bytes(b"damaged")
    with pytest.raises(StorageError, match="snow-2"):
        evaluate(run, **snow, corruption_cache=tmp_path)


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on three classes of ImageNet, and a part of ImageNet-C with four classes in its published layout."""
    root = tmp_path_factory.mktemp("imagenet")
    rng = np.random.default_rng(0)
    for label, name in enumerate(("n01440764", "n01443537", "n01484850", "n01491361")):
        folders = [f"base/{split}/{name}" for split in ("train", "val") if label < 3] + [f"ImageNet-C/fog/3/{name}"]
        for folder in folders:
            (root / folder).mkdir(parents=True)
            for number in range(4):
                pixels = rng.integers(0, 256, (224, 224, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / folder / f"ILSVRC2012_val_{label}_{number}.JPEG")
    tree = recipe(root).to_dict()
    tree["data"] = {"name": "image_folder", "path": "base", "root": str(root), "size": 32, "batch_size": 16}
    train(Recipe.from_dict(tree), root / "run")
    return root


def test_imagenet_c_is_used_for_runs_with_classes_of_imagenet(imagenet: Path) -> None:
    published, generated = evaluate(imagenet / "run", split=["corrupted:fog:3", "corrupted:fog:2"], metrics=["nll"])
    assert (published.data["source"], published.data["samples"]) == ("published files", 12)
    assert (generated.data["source"], generated.data["samples"]) == ("generated, CIFAR-C-like", 12)
    nll = []
    for label, folder in enumerate(sorted((imagenet / "ImageNet-C" / "fog" / "3").iterdir())[:3]):
        for file in folder.glob("*.JPEG"):
            pixels = np.array(Image.open(file).resize((32, 32), Image.Resampling.BILINEAR))
            p = load_predictor(imagenet / "run").ensemble.predict(torch.from_numpy(pixels).permute(2, 0, 1)[None])
            nll.append(-float(p[0, label].log()))
    assert published.rows[MEAN_PROBABILITY].value == pytest.approx(np.mean(nll), rel=1e-5)


def test_imagenet_c_without_a_class_of_the_run_is_reported_and_images_are_generated(
    imagenet: Path, log_lines: list[str]
) -> None:
    info = Run.open(imagenet / "run").info.data
    what = Run.open(imagenet / "run").recipe
    for labels, told in (((*info.labels[:2], "n99999999"), True), (("cat", "dog", "owl"), False)):
        log_lines.clear()
        (found,) = eval_splits(what, replace(info, labels=labels), ["corrupted:fog:3"])
        assert found.metadata["source"] == "generated, CIFAR-C-like"
        assert any("ImageNet-C cannot be used" in line and "n99999999" in line for line in log_lines) is told
    (found,) = eval_splits(what, replace(info, name="my_imagenet"), ["corrupted:fog:3"])
    assert found.metadata["source"] == "published files"


def test_saturation_of_gray_images_is_refused_before_other_kinds_are_computed(tmp_path: Path) -> None:
    gray = replace(FACTS, name="digits", shape=(1, 28, 28))
    for name in ("corrupted:saturate:2", "corrupted:extra"):
        with pytest.raises(RunError, match=r"gray, which have no saturation.*corrupted:spatter"):
            eval_splits(recipe(tmp_path), gray, [name])
    assert len(eval_splits(recipe(tmp_path), gray, ["corrupted", "corrupted:spatter"])) == 80
    assert len(eval_splits(recipe(tmp_path), replace(gray, shape=(3, 28, 28)), ["corrupted:extra"])) == 20


def test_existing_published_files_are_preferred(tmp_path: Path, run: Path) -> None:
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    file = np.lib.format.open_memmap(folder / "fog.npy", mode="w+", dtype=np.uint8, shape=(50_000, 32, 32, 3))
    file[20_000] = 7
    np.save(folder / "labels.npy", np.tile(np.arange(10_000) % 10, 5).astype(np.uint8))
    (found,) = eval_splits(recipe(tmp_path), FACTS, ["corrupted:fog:3"])
    assert found.metadata["source"] == "published files"
    source, ids = found.open(recipe(tmp_path), None)  # type: ignore[arg-type]
    x, y = source.fetch(ids[:2])
    assert (len(ids), int(x[0].sum()), int(x[1].sum()), y.tolist()) == (10_000, 7 * 3 * 32 * 32, 0, [0, 1])
    assert Run.open(run).recipe.data.name == "arrays"
