"""`loss.class_weights = "balanced"`: inverse frequencies of the training samples, resolved before a run is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import plateaux
from plateaux.core.errors import DataError, RecipeError
from plateaux.data.sources import DataSplits, InMemorySource

BALANCED = {"loss": {"class_weights": "balanced"}, "model": {"hidden_sizes": [4]}, "executor": {"threads": 1}}


def test_balanced_weights_are_inverse_frequencies_with_mean_one_and_are_stored(tmp_path: Path) -> None:
    y = np.repeat([0, 1, 2], [60, 30, 10])
    x = np.random.default_rng(0).normal(size=(100, 2)).astype("float32") + y[:, None]
    data = plateaux.from_arrays(x, y, test=None)
    run = plateaux.fit(data, model="mlp", members=1, epochs=2, settings=BALANCED, out=tmp_path / "run")
    inverse = np.array([1 / 60, 1 / 30, 1 / 10])
    expected = inverse * 3 / inverse.sum()
    assert run.recipe.loss.options["class_weights"] == pytest.approx(expected.tolist(), rel=1e-5)
    given = {**BALANCED, "loss": {"class_weights": run.recipe.loss.options["class_weights"]}}
    same = plateaux.fit(data, model="mlp", members=1, epochs=2, settings=given, out=tmp_path / "same")
    assert all(torch.equal(tensor, same.weights(0)[name]) for name, tensor in run.weights(0).items())
    again = plateaux.fit(data, model="mlp", members=1, epochs=2, settings=BALANCED, out=tmp_path / "run")
    assert again.recipe.identity() == run.recipe.identity()


def test_a_class_without_training_samples_has_the_weight_zero(tmp_path: Path) -> None:
    source = InMemorySource(torch.randn(9, 2), torch.tensor([0, 2] * 4 + [0]))
    data = DataSplits("few", source, source, 3, (2,))
    settings = {**BALANCED, "data": {"validation_split": 0}}
    run = plateaux.fit(data, model="mlp", members=1, epochs=1, settings=settings, out=tmp_path / "run")
    weights = run.recipe.loss.options["class_weights"]
    assert weights[1] == 0
    assert weights == pytest.approx([3 * 4 / 9, 0, 3 * 5 / 9], rel=1e-5)


def test_labels_that_are_no_class_numbers_and_other_words_are_refused(tmp_path: Path) -> None:
    source = InMemorySource(torch.randn(8, 2), torch.full((8, 2), 0.5))
    data = DataSplits("soft", source, source, 2, (2,))
    tree = {"data": {"name": "soft"}, "model": {"name": "mlp"}, "loss": {"class_weights": "balanced"}}
    with pytest.raises(DataError, match="counts class numbers"):
        plateaux.train(plateaux.Recipe.from_dict(tree), tmp_path / "run", data=data)
    with pytest.raises(RecipeError, match="class_weights"):
        plateaux.train(
            plateaux.Recipe.from_dict({**tree, "loss": {"class_weights": "equal"}}), tmp_path / "run", data=data
        )
