"""Label noise: how many labels change, to which classes, and that a run and its evaluation agree."""

from __future__ import annotations

import pytest
import torch

from plateaux.config.builders.data import build_data
from plateaux.config.components import Components
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError
from plateaux.data.label_noise import noisy_labels, with_label_noise
from plateaux.data.sources import DatasetSource, InMemorySource


def recipe(**data: object) -> Recipe:
    return Recipe.from_dict({"members": 1, "data": {"name": "digits", **data}, "model": {"name": "mlp"}, "method": {}})


def test_the_fraction_is_exact_and_all_other_classes_are_equally_likely() -> None:
    y = torch.arange(30_000) % 3
    noisy = noisy_labels(y, 0.3, classes=3, seed=1)
    changed = noisy != y
    assert int(changed.sum()) == 9_000
    shift = (noisy - y)[changed] % 3
    assert set(shift.tolist()) == {1, 2}
    assert float((shift == 1).double().mean()) == pytest.approx(0.5, abs=4 * 0.5 / 9_000**0.5)  # four standard errors
    assert torch.equal(noisy, noisy_labels(y, 0.3, classes=3, seed=1))
    assert not torch.equal(noisy, noisy_labels(y, 0.3, classes=3, seed=2))


def test_a_recipe_has_noisy_training_labels_and_clean_test_labels() -> None:
    clean, noisy = build_data(recipe()), build_data(recipe(label_noise=0.25))
    assert isinstance(clean.train, InMemorySource)
    assert isinstance(noisy.train, InMemorySource)
    assert int((noisy.train.y != clean.train.y).sum()) == round(0.25 * len(clean.train))
    assert noisy.train.fingerprint() != clean.train.fingerprint()
    assert noisy.test.fingerprint() == clean.test.fingerprint()
    given = build_data(recipe(label_noise=0.25), Components(data=clean))
    assert given.train.fingerprint() == noisy.train.fingerprint()


def test_labels_in_files_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"data.label_noise = 0.5 needs a classification data set in memory"):
        with_label_noise(DatasetSource([(torch.zeros(2), 1)]), 0.5, classes=3, seed=0)
