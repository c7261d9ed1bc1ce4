"""Geometry of the toy data sets, and digits compared with scikit-learn."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.data.datasets.digits import digits
from plateaux.data.datasets.toy import blobs, moons, spirals
from plateaux.data.sources import DataSplits, InMemorySource


def points(data: DataSplits) -> tuple[Tensor, Tensor]:
    assert isinstance(data.train, InMemorySource)
    assert isinstance(data.train.x, Tensor)
    return data.train.x, data.train.y


def test_moons_without_noise_are_on_two_half_circles() -> None:
    x, y = points(moons(noise=0.0))
    center = torch.where(y[:, None] == 0, torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.5]))
    assert torch.allclose((x - center).norm(dim=1), torch.ones(1000), atol=1e-5)
    assert (x[y == 0, 1] >= -1e-6).all()
    assert (x[y == 1, 1] <= 0.5 + 1e-6).all()


@pytest.mark.parametrize("classes", [2, 5])
def test_spiral_arms_are_rotated_copies_of_each_other(classes: int) -> None:
    x, y = points(spirals(noise=0.0, classes=classes))
    radius, angle = x.norm(dim=1), torch.atan2(x[:, 1], x[:, 0])
    start = angle - 2 * math.pi * 0.75 * (radius - 0.1) / 0.9 - 2 * math.pi * y / classes
    assert torch.allclose(torch.cos(start), torch.ones(1000), atol=1e-4)
    assert radius.max() <= 1


def test_blobs_are_centered_on_the_circle_with_the_given_noise() -> None:
    x, y = points(blobs(samples=40_000, classes=4, noise=0.2))
    for c, center in enumerate([(1, 0), (0, 1), (-1, 0), (0, -1)]):
        assert torch.allclose(x[y == c].mean(0), torch.tensor(center).float(), atol=0.01)
        assert torch.allclose(x[y == c].std(0), torch.full((2,), 0.2), atol=0.01)


@pytest.mark.parametrize("build", [moons, spirals, blobs])
def test_toy_data_sets_depend_only_on_their_seed(build: object) -> None:
    assert callable(build)
    one, again, other = build(samples=50), build(samples=50), build(samples=50, seed=1)
    assert one.train.fingerprint() == again.train.fingerprint() != other.train.fingerprint()
    assert build(samples=50, test_samples=50).test.fingerprint() != one.train.fingerprint()
    assert points(one)[1].bincount().max() - points(one)[1].bincount().min() <= 1


def test_invalid_toy_options_are_rejected() -> None:
    with pytest.raises(RecipeError, match="at least 2"):
        blobs(classes=1)
    with pytest.raises(RecipeError):
        moons(samples=1)


def test_digits_are_the_scikit_learn_digits_split_two_to_one() -> None:
    sklearn = pytest.importorskip("sklearn.datasets")
    images, labels = sklearn.load_digits(return_X_y=True)
    data = digits()
    assert (len(data.train), len(data.test)) == (1198, 599)
    x, y = points(data)
    original = (x.double() * 16 / 255).round().view(-1, 64)
    assert isinstance(data.test, InMemorySource)
    assert isinstance(data.test.x, Tensor)
    all_images = torch.cat([original, (data.test.x.double() * 16 / 255).round().view(-1, 64)])
    truth = torch.from_numpy(images)
    assert torch.equal(torch.sort(all_images @ torch.arange(64.0).double().exp2()).values,
                       torch.sort(truth @ torch.arange(64.0).double().exp2()).values)  # fmt: skip
    match = (truth[:, None] == original[None, :20]).all(2).nonzero()
    assert all(labels[i] == int(y[j]) for i, j in match.tolist())
    assert (x.double() / 255).mean().item() == pytest.approx(data.mean[0], abs=1e-4)
    assert (x.double() / 255).std().item() == pytest.approx(data.std[0], abs=1e-4)
    assert digits(seed=1).train.fingerprint() != data.train.fingerprint() == digits().train.fingerprint()


def test_a_missing_scikit_learn_is_reported_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"plateaux\[demo\]"):
        digits()
