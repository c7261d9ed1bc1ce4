"""Bootstrap samples are drawn by seed with replacement and do not depend on the number of members."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from cases import GIVEN, distance, recipe, trained

from plateaux.config.builders.data import build_data, build_loader, train_val_split
from plateaux.config.experiment import Experiment
from plateaux.core.errors import RecipeError
from plateaux.data.random_split import bootstrap
from plateaux.training.cost import count_passes
from plateaux.training.loop import trainer
from plateaux.training.recipe_rules import check
from plateaux.training.train import train


def test_a_bootstrap_sample_has_the_requested_size_and_only_given_ids() -> None:
    ids = torch.arange(100, 200)
    for fraction in (0.3, 1.0, 1.5):
        sampled = bootstrap(ids, fraction, 7)
        assert len(sampled) == round(100 * fraction)
        assert torch.isin(sampled, ids).all()
        assert torch.equal(sampled, bootstrap(ids, fraction, 7))
        assert not torch.equal(sampled, bootstrap(ids, fraction, 8))


def test_a_bootstrap_sample_omits_the_expected_fraction_of_ids() -> None:
    n, repetitions = 500, 40
    omitted = [1 - len(bootstrap(torch.arange(n), 1.0, seed).unique()) / n for seed in range(repetitions)]
    expected = (1 - 1 / n) ** n
    # The number of omitted ids has variance n (p - p^2 (1 + 1)) to first order, below n p (1 - p).
    assert abs(sum(omitted) / repetitions - expected) < 4 * math.sqrt(expected * (1 - expected) / (n * repetitions))


def test_every_id_is_drawn_equally_often() -> None:
    counts = sum(torch.bincount(bootstrap(torch.arange(10), 1.0, seed), minlength=10) for seed in range(400))
    assert isinstance(counts, torch.Tensor)
    chi2 = ((counts - 400.0) ** 2 / 400).sum()
    assert chi2 < 33.7  # nine degrees of freedom, p = 0.0001


def test_an_empty_bootstrap_sample_is_rejected() -> None:
    with pytest.raises(RecipeError, match="empty bootstrap sample"):
        bootstrap(torch.arange(10), 0.01, 0)


def test_each_member_trains_on_its_own_bootstrap_sample_without_validation_samples() -> None:
    row = recipe(data={"bootstrap": 1.0, "validation_split": 5})
    data = build_data(row, GIVEN)
    train_ids, held_out = train_val_split(row, data)
    cpu = torch.device("cpu")
    loaders = [build_loader(row, data, number, shared=False, device=cpu, ids=train_ids) for number in range(2)]
    assert not torch.equal(loaders[0].ids, loaders[1].ids)
    for loader in loaders:
        ids = torch.cat([batch.index for batch in loader.epoch(0)])
        assert torch.equal(ids.sort().values, loader.ids)
        assert not torch.isin(ids, held_out).any()


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_adding_a_member_does_not_change_other_bootstrap_samples(fraction: float, tmp_path: Path) -> None:
    three = trained(recipe("sam", data={"bootstrap": fraction}), tmp_path / "three")
    two = trained(recipe("sam", data={"bootstrap": fraction}, members=2), tmp_path / "two")
    assert distance(three[:2], two) == 0
    assert distance(three[:2], trained(recipe("sam", members=2), tmp_path / "all")) > 0


def test_a_smaller_bootstrap_sample_makes_a_shorter_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    original_step = trainer.step

    def recorded_step(*args, share: float, **options):  # type: ignore[no-untyped-def]
        shares.append(share)
        return original_step(*args, share=share, **options)

    monkeypatch.setattr(trainer, "step", recorded_step)
    train(recipe(members=1, data={"bootstrap": 0.5}, train={"epochs": 1}), tmp_path / "run", **GIVEN.keywords())
    assert shares == [1.0, 1.0]  # 10 draws from 19 samples: batches of 7 and 3, not sharded
    assert count_passes(Experiment(recipe(data={"bootstrap": 0.5})), epochs=4) == 2.0


def test_members_with_shared_batches_cannot_use_bootstrap() -> None:
    for row in (recipe("apart", data={"bootstrap": 1.0}), recipe(data={"bootstrap": 1.0, "shuffle": "shared"})):
        with pytest.raises(RecipeError, match="share their batches"):
            check(Experiment(row, GIVEN))
