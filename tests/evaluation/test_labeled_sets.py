"""Images of the run's classes, or of some of them, as evaluation sets: against a slow reference with PIL and NumPy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digit_runs import train_digits
from PIL import Image

import plateaux
from plateaux.config.recipe import Recipe
from plateaux.core.errors import DataError, RunError
from plateaux.core.outputs import features, logits
from plateaux.core.row_names import MEAN_PROBABILITY
from plateaux.core.types import Batch
from plateaux.evaluation.class_mask import mask_classes
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.loaded_run import load_members
from plateaux.evaluation.metric_loop import BatchOutputs
from plateaux.evaluation.metric_specs import get_metrics
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.splits import eval_splits
from plateaux.reports.artifacts import load_predictions
from plateaux.storage.run import Run
from plateaux.studies.runner import StudyRunner
from plateaux.studies.study import Study
from tests.cli.test_main import call

CLASSES = ("n01", "n02", "n03", "n04", "n05")
SOME = ("n02", "n04", "n05")  # of `shift`
ANY = {  # for runs whose data are passed in Python
    "members": 1,
    "data": {"name": "digits", "batch_size": 4},
    "model": {"name": "mlp", "hidden_sizes": [4]},
    "train": {"epochs": 1},
}
SIZE = 16
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def write_images(folder: Path, label: int, count: int, *, seed: int, size: tuple[int, int], suffix: str) -> None:
    """Write noise around a gray value of the class; the values of neighboring classes overlap."""
    rng = np.random.default_rng([seed, label])
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        gray = 70 + 28 * label + rng.normal(0, 25)
        pixels = np.clip(rng.normal(gray, 30, (*size, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02d}{suffix}")


def image_recipe(root: Path) -> dict[str, Any]:
    return {
        "members": 2,
        "data": {"name": "image_folder", "path": "base", "root": str(root), "size": SIZE, "batch_size": 16},
        "model": {"name": "cnn", "channels": [4]},
        "optimizer": {"name": "SGD", "lr": 0.05},
        "train": {"epochs": 3, "precision": "fp32"},
        "executor": {"threads": 1},
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with a run on five classes, and `shift`: images of three of them, of another size."""
    root = tmp_path_factory.mktemp("images")
    for label, name in enumerate(CLASSES):
        write_images(root / "base" / "train" / name, label, 12, seed=0, size=(SIZE, SIZE), suffix=".png")
        write_images(root / "base" / "test" / name, label, 6, seed=1, size=(SIZE, SIZE), suffix=".png")
        write_images(root / "same" / name, label, 5, seed=3, size=(SIZE, SIZE), suffix=".png")
    for label in (1, 3, 4):
        write_images(root / "shift" / CLASSES[label], label, 9, seed=2, size=(20, 27), suffix=".jpg")
    write_images(root / "shift" / "n04" / "more", 3, 2, seed=5, size=(40, 18), suffix=".png")
    plateaux.train(Recipe.from_dict(image_recipe(root)), root / "run")
    return root


def reference_pixels(file: Path) -> np.ndarray[Any, Any]:
    """Shorter side to 16 pixels, center square, normalized by ImageNet's mean and std: [3, 16, 16]."""
    with Image.open(file) as opened:
        image = opened.convert("RGB")
    scale = SIZE / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    left, top = (image.width - SIZE) // 2, (image.height - SIZE) // 2
    pixels = np.asarray(image.crop((left, top, left + SIZE, top + SIZE)), dtype=np.float64) / 255
    return ((pixels - MEAN) / STD).transpose(2, 0, 1)


def reference(run: Path, files: Sequence[tuple[Path, str]], names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return accuracy and NLL of each member and of the mean probability over the classes `names`, image by image."""
    modules = load_members(Run.open(run), [0, 1])
    columns = [CLASSES.index(name) for name in names]
    probabilities = []
    for file, _ in files:
        x = torch.from_numpy(reference_pixels(file)).float()[None]
        with torch.no_grad():
            out = np.stack([module.eval()(x)[0].double().numpy() for module in modules])[:, columns]
        powers = np.exp(out - out.max(1, keepdims=True))
        probabilities.append(powers / powers.sum(1, keepdims=True))
    p = np.stack(probabilities)  # [N, M, K]
    rows = {"member 0": p[:, 0], "member 1": p[:, 1], str(MEAN_PROBABILITY): p.mean(1)}
    y = np.array([list(names).index(name) for _, name in files])
    return {
        row: (float((q.argmax(1) == y).mean()), float(-np.log(q[np.arange(len(y)), y]).mean()))
        for row, q in rows.items()
    }


def shift_files(root: Path) -> list[tuple[Path, str]]:
    folders = [folder for folder in sorted((root / "shift").iterdir())]
    return [(file, folder.name) for folder in folders for file in sorted(folder.rglob("*.[jp][pn]g"))]


def measured(found: Sequence[MetricResult]) -> dict[str, tuple[float, float]]:
    accuracy, nll = (next(one for one in found if one.metric == name) for name in ("accuracy", "nll"))
    names = ("member 0", "member 1", str(MEAN_PROBABILITY))
    return {name: (accuracy.rows[name].value, nll.rows[name].value) for name in names}  # type: ignore[index]


def close(one: dict[str, tuple[float, float]], other: dict[str, tuple[float, float]]) -> bool:
    return all(one[row] == pytest.approx(other[row], rel=1e-4) for row in other) and len(one) == len(other)


def test_masked_metrics_equal_a_reference_with_pil_and_numpy(place: Path) -> None:
    files = shift_files(place)
    assert len(files) == 29
    wanted, without = reference(place / "run", files, SOME), reference(place / "run", files, CLASSES)
    assert wanted[str(MEAN_PROBABILITY)][0] > without[str(MEAN_PROBABILITY)][0]  # the mask changes predictions
    for cached in ("computed", "cached, float32"):
        found = plateaux.evaluate(place / "run", split="./shift", metrics=["accuracy", "nll", "ece", "brier"])
        assert close(measured(found), wanted)
        assert found[0].data["logits"] == cached
        assert found[0].data["classes"] == "3 of 5 classes"
        assert found[0].data["samples"] == 29
    assert "folder, ./shift (29, 3 of 5 classes)" in repr(found)


def test_masked_and_unmasked_logits_are_cached_separately(place: Path) -> None:
    files = shift_files(place)
    for names, split in ((SOME, "./shift"), (CLASSES, "./shift:all_classes")) * 2:
        found = plateaux.evaluate(place / "run", split=split, metrics=["accuracy", "nll"])
        assert close(measured(found), reference(place / "run", files, names)), split
    assert found[0].data["classes"] == "3 of 5 classes, not masked"
    loaded = load_predictions(Run.open(place / "run"))  # figures of a report compare logits of all classes
    assert "./shift" not in loaded
    assert loaded["./shift:all_classes"][1].shape == (2, 29, 5)


def test_an_empty_class_folder_changes_the_mask_and_not_the_images(place: Path) -> None:
    files = shift_files(place)
    for name in ("n01", "n03"):  # as many classes, the same files
        (place / "shift" / name).mkdir()
        try:
            found = plateaux.evaluate(place / "run", split="./shift", metrics=["accuracy", "nll"])
        finally:
            (place / "shift" / name).rmdir()
        assert found[0].data["classes"] == "4 of 5 classes"
        assert close(measured(found), reference(place / "run", files, sorted((*SOME, name)))), name


def test_a_set_with_all_classes_has_no_mask_and_equals_the_test_split(place: Path) -> None:
    results = {
        split: plateaux.evaluate(place / "run", split=split, metrics=["accuracy", "nll"])
        for split in ("./base/test", "test", "./same")
    }
    assert measured(results["./base/test"]) == measured(results["test"])
    assert measured(results["./same"]) != measured(results["test"])
    assert "classes" not in results["./same"][0].data


def test_the_first_samples_are_balanced_and_a_limit_keeps_the_mask(place: Path) -> None:
    files = shift_files(place)
    first = [next(one for one in files if one[1] == name) for name in SOME]
    found = plateaux.evaluate(place / "run", split="./shift@3", metrics=["accuracy", "nll"])
    assert close(measured(found), reference(place / "run", first, SOME))
    found = plateaux.evaluate(place / "run", split="./shift@2", metrics=["accuracy", "nll"])
    assert close(measured(found), reference(place / "run", first[:2], SOME))
    assert (found[0].data["first"], found[0].data["classes"]) == (2, "3 of 5 classes")


def test_changed_images_are_evaluated_again(place: Path, tmp_path: Path) -> None:
    found = []
    for count in (3, 4):
        for label in (1, 3):
            write_images(tmp_path / "set" / CLASSES[label], label, count, seed=8, size=(16, 16), suffix=".png")
        found.append(plateaux.evaluate(place / "run", split=f"{tmp_path}/set", metrics=["nll"])["nll"])
    assert [one.data["samples"] for one in found] == [6, 8]
    assert found[0].value != found[1].value


@pytest.mark.parametrize("suite", ["near", "test", "train", "labeled"])
def test_a_suite_of_ood_sets_may_have_any_name(place: Path, suite: str) -> None:
    (found,) = plateaux.detect_ood(place / "run", {suite: ["./shift"]})
    (other,) = plateaux.detect_ood(place / "run", {"far": ["./shift"]})
    assert found.split == f"./shift ({suite})"
    assert found.rows == other.rows
    assert found.data["outside"]["fingerprint"] == other.data["outside"]["fingerprint"]


def test_a_list_is_evaluated_like_the_folder(place: Path) -> None:
    files = shift_files(place)
    lines = [f"{file.relative_to(place).as_posix()} {name}" for file, name in reversed(files)]
    (place / "all.txt").write_text("\n".join(lines))
    found = plateaux.evaluate(place / "run", split="all.txt", metrics=["accuracy", "nll"])
    assert close(measured(found), reference(place / "run", files, SOME))


@pytest.mark.parametrize(("name", "folder"), [("imagenet_a", "imagenet-a"), ("imagenet_r", "imagenet-r")])
def test_a_published_set_has_the_classes_of_its_folders(place: Path, name: str, folder: str) -> None:
    (place / folder).symlink_to(place / "shift", target_is_directory=True)
    (place / "shift" / "README.txt").write_text("published beside the folders")
    found = plateaux.evaluate(place / "run", split=name, metrics=["accuracy", "nll"])
    direct = [one for one in shift_files(place) if one[0].parent.name != "more"]  # no folders within folders
    assert close(measured(found), reference(place / "run", direct, SOME))
    assert (found[0].data["classes"], found[0].data["samples"]) == ("3 of 5 classes", 27)
    assert "resized" not in found[0].data


def test_rows_of_classes_have_the_numbers_of_the_run(place: Path) -> None:
    (found,) = plateaux.evaluate(place / "run", split="./shift", metrics=["per_class"])
    samples = {name.part[0]: value.value for name, value in found.rows.items() if name.part[1] == "samples"}
    assert samples == {"class 1": 9, "class 3": 11, "class 4": 9}


def test_a_mask_selects_columns_and_renumbers_labels() -> None:
    values = torch.arange(2 * 3 * 5, dtype=torch.float32).view(2, 3, 5)
    hidden = torch.ones(2, 3, 7)
    batch = BatchOutputs(
        {logits: values, features: hidden}, Batch(torch.zeros(3), torch.tensor([4, 1, 3]), torch.arange(3)), 0, 3
    )
    (masked,) = mask_classes(iter([batch]), (1, 3, 4))
    assert torch.equal(masked.outputs[logits], values[:, :, [1, 3, 4]])
    assert torch.equal(masked.outputs[features], hidden)
    assert masked.batch.y.tolist() == [2, 0, 1]
    assert list(mask_classes(iter([batch]), None)) == [batch]
    with pytest.raises(AssertionError, match="outside of the class mask"):
        list(mask_classes(iter([batch]), (1, 3)))


def test_a_prediction_of_a_masked_class_is_replaced_by_the_best_other_class(tmp_path: Path) -> None:
    """A known network: its logits are 9 for class 0, and the class's mean pixel for the others."""
    for name, value in (("1", 40), ("2", 200)):
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.new("L", (8, 8), value).save(tmp_path / "set" / name / "a.png")

    class Known(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gray = x.mean((1, 2, 3))
            return self.scale * torch.stack([9 + 0 * gray, 1 - gray, gray], 1)

    x = torch.zeros(4, 1, 8, 8, dtype=torch.uint8)
    data = plateaux.from_tensors((x, torch.tensor([0, 1, 2, 0])), (x, torch.tensor([0, 1, 2, 0])), classes=3)
    recipe = Recipe.from_dict({**ANY, "model": {"name": "mlp"}, "optimizer": {"name": "SGD", "lr": 1e-9}})
    plateaux.train(recipe, tmp_path / "run", data=data, model=Known)  # a rate that changes no weight in float32
    shared: dict[str, Any] = {"metrics": ["accuracy", "nll"]}
    run = plateaux.open_run(tmp_path / "run", data=data, model=Known)
    masked = plateaux.evaluate(run, split=f"{tmp_path}/set", **shared)
    unmasked = plateaux.evaluate(run, split=f"{tmp_path}/set:all_classes", **shared)
    assert (masked["accuracy"].value, unmasked["accuracy"].value) == (1.0, 0.0)
    a, b = 40 / 255, 200 / 255  # logits: 1 - a against a, and 1 - b against b
    wanted = [np.log1p(np.exp(2 * a - 1)), np.log1p(np.exp(1 - 2 * b))]
    assert masked["nll"].value == pytest.approx(np.mean(wanted), rel=1e-5)
    wanted = [
        np.log(np.exp(9) + np.exp(1 - a) + np.exp(a)) - (1 - a),
        np.log(np.exp(9) + np.exp(1 - b) + np.exp(b)) - b,
    ]
    assert unmasked["nll"].value == pytest.approx(np.mean(wanted), rel=1e-5)


def test_a_run_without_class_names_has_classes_by_number(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (20, 1, 8, 8), dtype=np.uint8), np.arange(20) % 4
    data = plateaux.from_tensors((x, y), (x, y), classes=4)
    recipe = Recipe.from_dict(ANY)
    plateaux.train(recipe, tmp_path / "run", data=data)
    for label in range(4):
        (tmp_path / "set" / str(label)).mkdir(parents=True)
    for number in range(20):
        Image.fromarray(x[number, 0]).save(tmp_path / "set" / str(y[number]) / f"{number:02d}.png")
    found = plateaux.evaluate(plateaux.open_run(tmp_path / "run", data=data), split=[f"{tmp_path}/set", "test"])
    assert found.on(f"{tmp_path}/set")["nll"].value == pytest.approx(found.on("test")["nll"].value, rel=1e-6)
    (tmp_path / "set" / "cat").mkdir()
    with pytest.raises(DataError, match=r"'cat'\. The run has 4 classes: '0', '1', '2', '3'"):
        plateaux.evaluate(plateaux.open_run(tmp_path / "run", data=data), split=f"{tmp_path}/set")


def test_another_data_set_with_the_same_classes_is_resized(tmp_path: Path) -> None:
    run = train_digits(tmp_path / "run", members=1, epochs=1, model={"name": "mlp", "hidden_sizes": [8]})
    found = plateaux.evaluate(run, split=["digits", "test"], metrics=["nll"])
    assert found.on("digits")["nll"].value == found.on("test")["nll"].value
    folder = tmp_path / "set" / "3"
    write_images(folder, 0, 2, seed=0, size=(30, 30), suffix=".png")
    with pytest.raises(DataError, match=r"images of one class only \('3'\).*:all_classes"):
        plateaux.evaluate(run, split=f"{tmp_path}/set", metrics=["accuracy"])
    found = plateaux.evaluate(run, split=f"{tmp_path}/set:all_classes", metrics=["accuracy"])
    assert found[0].data["samples"] == 2


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("./gone", "gone was not found"),
        ("./base/test/n01", "no class folders.*--ood far="),
        ("./base", "'test', 'train'. The run has 5 classes: 'n01', 'n02', 'n03', 'n04', 'n05'"),
        ("digits", "digits has 10 of 10 classes that are not classes of this run: '0', '1', '2', '3', '4', ..."),
        ("spirals", "only images can be evaluated"),
    ],
)
def test_invalid_sets_are_refused_before_evaluation(place: Path, split: str, message: str) -> None:
    before = set((place / "run").rglob("*"))
    with pytest.raises(DataError, match=message):
        plateaux.evaluate(place / "run", split=["test", split], metrics=["top5"])
    assert set((place / "run").rglob("*")) == before


def test_image_sets_are_refused_for_a_run_on_points(tmp_path: Path) -> None:
    recipe = {"members": 1, "data": {"name": "spirals"}, "model": {"name": "mlp", "hidden_sizes": [4]}}
    plateaux.train(Recipe.from_dict({**recipe, "train": {"epochs": 1}}), tmp_path / "run")
    with pytest.raises(DataError, match=r"\./photos are images, but the inputs of this run have shape \[2\]"):
        plateaux.evaluate(tmp_path / "run", split="./photos")


def test_metrics_of_outputs_other_than_logits_are_refused_with_masked_classes(place: Path) -> None:
    def probabilities(member: Any, batch: Batch) -> torch.Tensor:
        return member(batch.x).softmax(-1)

    metrics = {"mine": replace(get_metrics(["accuracy"])["accuracy"], output=probabilities)}
    evaluator = Evaluator(Run.open(place / "run"))
    masked, unmasked = eval_splits(evaluator.recipe, evaluator.data_info, ["./shift", "./shift:all_classes"])
    with pytest.raises(RunError, match=r"mine uses an output other than logits.*\./shift:all_classes"):
        evaluator.evaluate(masked, metrics)
    (found,) = evaluator.evaluate(unmasked, metrics)
    wanted = reference(place / "run", shift_files(place), CLASSES)
    assert found.rows["member 0"].value == pytest.approx(wanted["member 0"][0])  # type: ignore[index]


@pytest.mark.parametrize("function", ["calibrate", "predict"])
def test_functions_on_the_runs_own_samples_refuse_other_sets(place: Path, function: str) -> None:
    with pytest.raises(RunError, match="is not a split of the run's own data"):
        getattr(plateaux, function)(place / "run", split="./shift")


def test_the_command_line_takes_a_path_from_the_current_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    code, out, message = call("evaluate", "run", "--split", "test,./shift", "--metrics", "accuracy,nll", "--json")
    assert code == 0, message
    results = {(one["metric"], one["split"]): one for one in json.loads(out)}
    wanted = reference(place / "run", shift_files(place), SOME)[str(MEAN_PROBABILITY)]
    for metric, value in zip(("accuracy", "nll"), wanted, strict=True):
        one = results[metric, "./shift"]
        assert one["rows"][str(MEAN_PROBABILITY)]["value"] == pytest.approx(value, rel=1e-4)
        assert one["data"]["classes"] == "3 of 5 classes"
    code, out, _ = call("evaluate", "run", "--split", "./shift", "--metrics", "accuracy", "--markdown")
    assert (code, "folder, ./shift (29, 3 of 5 classes)" in out) == (0, True)
    code, _, message = call("evaluate", "run", "--split", "./base", "--metrics", "accuracy")
    assert code != 0
    assert "not classes of this run" in message


def test_a_study_evaluates_labeled_images_and_checks_them_first(place: Path, tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "base": image_recipe(place),
        "evaluate": {"splits": ["test", "./shift@20"], "metrics": ["accuracy", "nll"]},
    }
    runner = StudyRunner(Study.from_dict(tree), tmp_path / "study")
    (entry,) = runner.run()["runs"].values()
    (found,) = [one for one in entry["metrics"] if (one["metric"], one["split"]) == ("nll", "./shift")]
    ordered = interleaved(shift_files(place))[:20]
    wanted = reference(tmp_path / "study" / entry["folder"], ordered, SOME)
    assert found["rows"]["member 1"]["value"] == pytest.approx(wanted["member 1"][1], rel=1e-4)
    assert (found["data"]["classes"], found["data"]["samples"]) == ("3 of 5 classes", 20)
    tree["evaluate"]["splits"] = ["test", "./base"]
    with pytest.raises(DataError, match="not classes of this run"):
        StudyRunner(Study.from_dict(tree), tmp_path / "wrong").run()
    assert not (tmp_path / "wrong").exists()


def interleaved(files: Sequence[tuple[Path, str]]) -> list[tuple[Path, str]]:
    """Return the first image of each class, the second of each class, and so on."""
    groups = [[one for one in files if one[1] == name] for name in SOME]
    return [group[rank] for rank in range(len(files)) for group in groups if rank < len(group)]
