"""Bags of samples: drawn by key with replacement, the same however many members there are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from cases import GIVEN, distance, recipe, trained

from plateaux.config.builders.data import build_data, build_loader, train_val_split
from plateaux.core.errors import RecipeError
from plateaux.data.splits import bootstrap
from plateaux.training import trainer
from plateaux.training.checks import check
from plateaux.training.cost import count_passes
from plateaux.training.train import train


def test_a_bag_holds_as_many_ids_as_asked_for_and_no_others() -> None:
    ids = torch.arange(100, 200)
    for share in (0.3, 1.0, 1.5):
        found = bootstrap(ids, share, 7)
        assert len(found) == round(100 * share)
        assert torch.isin(found, ids).all()
        assert torch.equal(found, bootstrap(ids, share, 7))
        assert not torch.equal(found, bootstrap(ids, share, 8))


def test_a_bag_leaves_out_the_share_that_drawing_with_replacement_does() -> None:
    n, bags = 500, 40
    left_out = [1 - len(bootstrap(torch.arange(n), 1.0, each).unique()) / n for each in range(bags)]
    truth = (1 - 1 / n) ** n
    # The number left out has variance n (p - p^2 (1 + 1)) to first order, below n p (1 - p).
    assert abs(sum(left_out) / bags - truth) < 4 * math.sqrt(truth * (1 - truth) / (n * bags))


def test_every_id_is_drawn_equally_often() -> None:
    counts = sum(torch.bincount(bootstrap(torch.arange(10), 1.0, each), minlength=10) for each in range(400))
    assert isinstance(counts, torch.Tensor)
    chi = ((counts - 400.0) ** 2 / 400).sum()
    assert chi < 33.7  # nine degrees of freedom, one in ten thousand


def test_a_bag_with_nothing_in_it_is_refused() -> None:
    with pytest.raises(RecipeError, match="makes an empty bag"):
        bootstrap(torch.arange(10), 0.01, 0)


def test_a_member_is_fed_its_own_bag_and_nothing_held_out() -> None:
    row = recipe(data={"bootstrap": 1.0, "validation_split": 5})
    data = build_data(row, GIVEN)
    train_ids, held_out = train_val_split(row, data)
    cpu = torch.device("cpu")
    feeds = [build_loader(row, data, number, shared=False, device=cpu, ids=train_ids) for number in range(2)]
    assert not torch.equal(feeds[0].ids, feeds[1].ids)
    for feed in feeds:
        seen = torch.cat([batch.index for batch in feed.epoch(0)])
        assert torch.equal(seen.sort().values, feed.ids)
        assert not torch.isin(seen, held_out).any()


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_adding_a_member_changes_no_others_bag(share: float, tmp_path: Path) -> None:
    three = trained(recipe("sam", data={"bootstrap": share}), tmp_path / "three")
    two = trained(recipe("sam", data={"bootstrap": share}, members=2), tmp_path / "two")
    assert distance(three[:2], two) == 0
    assert distance(three[:2], trained(recipe("sam", members=2), tmp_path / "all")) > 0


def test_a_smaller_bag_makes_a_shorter_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    real = trainer.step

    def counted(*args, share: float, **options):  # type: ignore[no-untyped-def]
        shares.append(share)
        return real(*args, share=share, **options)

    monkeypatch.setattr(trainer, "step", counted)
    train(recipe(members=1, data={"bootstrap": 0.5}, train={"epochs": 1}), tmp_path / "run", components=GIVEN)
    assert shares == [1.0, 1.0]  # of 19 samples 10 draws: batches of 7 and 3, each whole here
    assert count_passes(recipe(data={"bootstrap": 0.5}), epochs=4) == 2.0


def test_members_that_share_their_batches_have_no_bags() -> None:
    for row in (recipe("apart", data={"bootstrap": 1.0}), recipe(data={"bootstrap": 1.0, "shuffle": "shared"})):
        with pytest.raises(RecipeError, match="cannot have bags of their own"):
            check(row, GIVEN)
