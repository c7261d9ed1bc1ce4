"""OOD sets from Python: the same numbers as a data set by name, and an error for inputs that do not fit the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digit_runs import SMALL_MLP, digits_recipe, train_digits
from torch.utils.data import Dataset, IterableDataset

import plateaux
from plateaux.config.recipe import Recipe
from plateaux.core.errors import DataError, RecipeError, RunError
from plateaux.core.registry import dataset
from plateaux.core.types import Estimate
from plateaux.data.samples import sample_ids
from plateaux.data.sources import HASHED_SAMPLES, from_tensors
from plateaux.evaluation.ood import detect_ood
from plateaux.evaluation.splits import ResizedSource
from plateaux.training.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_digits(tmp_path_factory.mktemp("run"), model=SMALL_MLP)


def test_the_name_of_a_folder_is_refused_with_its_path(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match=r"no dataset called 'photos'.* write \./photos"):
        detect_ood(run, {"far": ["photos"]})


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run on a table of four features, and its data."""
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    data = from_tensors((x[:64], x[:64, 0] > 0), (x[64:], x[64:, 0] > 0), classes=2)
    out = tmp_path_factory.mktemp("table")
    recipe = {**digits_recipe(model=SMALL_MLP), "data": {"name": "table"}}
    train(Recipe.from_dict(recipe), out, data=data)
    return out, data


def rows(run: Any, sets: Any, **options: Any) -> dict[Any, Estimate]:
    (found,) = detect_ood(run, {"far": sets}, **options)
    return dict(found.rows)


def test_arrays_give_the_numbers_of_the_data_set_with_a_name(run: Path) -> None:
    test = dataset.get("digits")().test
    x, labels = test.fetch(torch.arange(len(test)))
    expected = rows(run, ["digits"])
    assert rows(run, {"own": x}) == expected
    assert rows(run, {"own": x.numpy()}) == expected
    assert rows(run, {"own": x.squeeze(1).numpy()}) == expected
    pairs = [(image, int(label)) for image, label in zip(x, labels, strict=True)]
    assert rows(run, {"own": Pairs(pairs)}) == expected
    (both, *_), names = detect_ood(run, {"far": {"a": x, "b": 1 - x}}), ["a (far)", "b (far)"]
    assert both.split == names[0]
    assert [each.split for each in detect_ood(run, {"far": {"a": x, "b": 1 - x}})][:2] == names


def test_images_of_another_size_and_with_colors_are_converted(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = dataset.get("digits")().test.fetch(torch.arange(40))[0]
    large = torch.rand(40, 3, 12, 12, generator=torch.Generator().manual_seed(1)) * float(own.max())
    large = large.round().to(torch.uint8)
    source = from_tensors((large, torch.zeros(40)), (large, torch.zeros(40)), classes=10).test
    small = ResizedSource(source, (1, 8, 8)).fetch(torch.arange(40))[0]
    expected = rows(run, {"small": small})
    assert "resized" not in caplog.text
    assert rows(run, {"large": large}) == expected
    assert rows(run, {"large": large.movedim(1, 3).numpy()}) == expected  # channels last
    assert "images were resized from 3x12x12 to 1x8x8" in caplog.text


def test_a_table_may_be_a_data_frame(table: tuple[Path, Any]) -> None:
    pandas = pytest.importorskip("pandas")
    run, data = table
    other = np.random.default_rng(0).normal(3, 1, (50, 4)).astype(np.float32)
    expected = rows(plateaux.open_run(run, data=data), {"other": other})
    assert rows(plateaux.open_run(run, data=data), {"other": pandas.DataFrame(other, columns=list("abcd"))}) == expected


def test_labeled_arrays_are_evaluated_by_a_name_of_their_own(table: tuple[Path, Any]) -> None:
    run, data = table
    opened = plateaux.open_run(run, data=data)
    x, y = data.test.fetch(torch.arange(len(data.test)))
    expected = plateaux.evaluate(opened)["nll"].ensemble
    (found,) = plateaux.evaluate(opened, split={"new": (x.numpy(), y.numpy())}, metrics="nll")
    assert (found.split, found.rows) == ("new", plateaux.evaluate(opened)["nll"].rows)
    assert found.ensemble == expected
    (wrong,) = plateaux.evaluate(opened, split={"new": (x, (y + 1) % data.classes)}, metrics="nll")
    assert wrong.ensemble.value > expected.value


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"new": np.zeros((5, 4), np.float32)}, r"give \(x, y\) by a name of your own"),
        ({"test": (np.zeros((5, 4), np.float32), np.zeros(5))}, r"give \(x, y\) by a name of your own"),
        ({"new": (np.zeros((5, 4), np.float32), np.zeros(4, int))}, "5 samples, but 4 labels"),
        ({"new": (np.zeros((5, 4), np.float32), np.full(5, 99))}, "Sample 0 of 'new' has label 99"),
        (
            {"new": (np.zeros((5, 4), np.float32), ["cat"] * 5)},
            "'new' has the label 'cat', which is no class of the run",
        ),
        ({"new": (np.zeros((5, 3), np.float32), np.zeros(5, int))}, r"A sample of 'new' is float32\[3\]"),
    ],
)
def test_wrong_labeled_arrays_are_refused(table: tuple[Path, Any], sets: dict[str, Any], message: str) -> None:
    with pytest.raises((DataError, RecipeError), match=message):
        plateaux.evaluate(plateaux.open_run(table[0], data=table[1]), split=sets)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            np.zeros((5, 3), np.float32),
            r"'other' is float32\[3\], but a test sample of the run is float32\[4\]: prepare x",
        ),
        (np.zeros((5, 4), np.int64), r"'other' is int64\[4\], but"),
        ({"a": np.zeros((5, 4), np.float32)}, r"'other' is \{a: float32\[4\]\}, but"),
        (np.zeros((5, 1, 8, 8), np.float32), r"float32\[1, 8, 8\], but"),
        (np.zeros((0, 4), np.float32), "'other' has no samples"),
        (np.full((5, 4), np.nan, np.float32), "The OOD set 'other' has NaN or infinity"),
        (np.zeros(5, np.float32), r"The OOD set 'other' has shape \[5\]"),
        (object(), "The OOD set 'other'"),
    ],
)
def test_inputs_of_the_wrong_shape_are_an_error_even_with_skip_missing(
    table: tuple[Path, Any], x: Any, message: str
) -> None:
    run, data = table
    with pytest.raises(DataError, match=message):
        detect_ood(plateaux.open_run(run, data=data), {"far": {"other": x}}, skip_missing=True)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ("mnist", r"suite 'far' is a str: .* such as \{\"far\": \[\"mnist\"\]\}"),
        (np.zeros((5, 4)), r"suite 'far' is a ndarray: .* such as \{\"far\": \{\"noise\": x\}\}"),
        (torch.zeros(5, 4), r"suite 'far' is a Tensor: .* such as \{\"far\": \{\"noise\": x\}\}"),
    ],
)
def test_a_suite_is_a_list_of_names_or_inputs_by_name(run: Path, sets: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        detect_ood(run, {"far": sets})


class Pairs(Dataset[Any]):
    """A map-style data set of a list."""

    def __init__(self, pairs: list[Any]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, i: int) -> Any:
        return self.pairs[i]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_a_data_set_whose_samples_are_not_hashed_is_not_cached(run: Path) -> None:
    """The fingerprint reads a few samples only, so another data set can have the same one."""
    x = torch.randint(0, 256, (400, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    pairs = [(image, 0) for image in x]
    before = rows(run, {"pairs": Pairs(pairs)})
    hashed = set(sample_ids(len(x), HASHED_SAMPLES).tolist())
    changed = [(image if i in hashed else image * 0, 0) for i, image in enumerate(x)]
    after = rows(run, {"pairs": Pairs(changed)})
    assert after == rows(run, {"other name": torch.stack([image for image, _ in changed])})
    assert after != before


def test_samples_of_a_stream_have_no_ids(run: Path) -> None:
    with pytest.raises(DataError, match="use a map-style Dataset"):
        detect_ood(run, {"far": {"stream": Stream()}})
