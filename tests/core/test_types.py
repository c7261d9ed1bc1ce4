"""Derived seeds, batches, and frozen values."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plateaux.core.types import Batch, Estimate, derive_seed, map_tensors

PARTS = st.lists(st.integers() | st.text(), max_size=4)


def test_derived_seeds_have_not_changed() -> None:
    # Every version must give the same weights, so these numbers are part of the format.
    assert derive_seed() == 6510301506637419378
    assert derive_seed(0, "order", 1) == 3583953554662909129
    assert derive_seed(5, "init", 2) == 3848422270064573258


@given(PARTS)
def test_a_derived_seed_is_accepted_by_generators(parts: list[int | str]) -> None:
    number = derive_seed(*parts)
    assert 0 <= number < 2**63
    assert number == derive_seed(*parts)
    torch.Generator().manual_seed(number)


@given(PARTS, PARTS)
def test_different_labels_give_different_seeds(one: list[int | str], other: list[int | str]) -> None:
    assert (derive_seed(*one) == derive_seed(*other)) == (one == other)


def test_a_seed_depends_on_order_type_and_grouping_of_its_labels() -> None:
    assert (
        len(
            {
                derive_seed(1, 2),
                derive_seed(2, 1),
                derive_seed("1", 2),
                derive_seed(12),
                derive_seed("12"),
                derive_seed(1, 2, ""),
                derive_seed("1,2"),
            }
        )
        == 7
    )


def test_many_derived_seeds_do_not_collide() -> None:
    assert len({derive_seed(0, "augment", i) for i in range(20000)}) == 20000
    bits = torch.tensor([derive_seed(0, i) >> 62 for i in range(4000)]).float()
    assert abs(float(bits.mean()) - 0.5) < 0.05


def test_a_slice_of_a_batch_keeps_its_ids_and_seed() -> None:
    batch = Batch(torch.arange(10.0), torch.arange(10), torch.arange(100, 110), seed=7, extra={"u": torch.ones(3)})
    part = batch.take(slice(2, 5))
    assert len(part) == 3
    assert part.x.tolist() == [2, 3, 4]  # type: ignore[union-attr]
    assert (part.y.tolist(), part.index.tolist(), part.seed) == ([2, 3, 4], [102, 103, 104], 7)
    assert part.extra is batch.extra


def test_named_inputs_are_sliced_by_name() -> None:
    batch = Batch({"ids": torch.arange(4), "mask": torch.ones(4, 2)}, torch.arange(4), torch.arange(4))
    part = batch.take(slice(0, 1))
    assert {name: tuple(tensor.shape) for name, tensor in part.x.items()} == {"ids": (1,), "mask": (1, 2)}  # type: ignore[union-attr]
    assert map_tensors(torch.ones(2), lambda t: t + 1).tolist() == [2, 2]


def test_values_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Estimate(1.0).value = 2.0  # type: ignore[misc]
    assert Estimate(1.0).stderr is None
