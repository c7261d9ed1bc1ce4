"""Keys, batches and values."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plateaux.core.types import Batch, Value, key, map_inputs

PARTS = st.lists(st.integers() | st.text(), max_size=4)


def test_keys_never_change() -> None:
    # Runs made by any version must come out alike, so these numbers are part of the format.
    assert key() == 6510301506637419378
    assert key(0, "order", 1) == 3583953554662909129
    assert key(5, "init", 2) == 3848422270064573258


@given(PARTS)
def test_a_key_is_a_number_that_generators_take(parts: list[int | str]) -> None:
    number = key(*parts)
    assert 0 <= number < 2**63
    assert number == key(*parts)
    torch.Generator().manual_seed(number)


@given(PARTS, PARTS)
def test_different_parts_make_different_keys(one: list[int | str], other: list[int | str]) -> None:
    assert (key(*one) == key(*other)) == (one == other)


def test_order_type_and_grouping_count() -> None:
    assert len({key(1, 2), key(2, 1), key("1", 2), key(12), key("12"), key(1, 2, ""), key("1,2")}) == 7


def test_many_keys_do_not_meet() -> None:
    assert len({key(0, "augment", i) for i in range(20000)}) == 20000
    bits = torch.tensor([key(0, i) >> 62 for i in range(4000)]).float()
    assert abs(float(bits.mean()) - 0.5) < 0.05


def test_a_part_of_a_batch_keeps_its_ids_and_key() -> None:
    batch = Batch(torch.arange(10.0), torch.arange(10), torch.arange(100, 110), key=7, extra={"u": torch.ones(3)})
    part = batch.part(slice(2, 5))
    assert len(part) == 3
    assert part.x.tolist() == [2, 3, 4]  # type: ignore[union-attr]
    assert (part.y.tolist(), part.index.tolist(), part.key) == ([2, 3, 4], [102, 103, 104], 7)
    assert part.extra is batch.extra


def test_named_inputs_are_cut_by_name() -> None:
    batch = Batch({"ids": torch.arange(4), "mask": torch.ones(4, 2)}, torch.arange(4), torch.arange(4))
    part = batch.part(slice(0, 1))
    assert {name: tuple(tensor.shape) for name, tensor in part.x.items()} == {"ids": (1,), "mask": (1, 2)}  # type: ignore[union-attr]
    assert map_inputs(torch.ones(2), lambda t: t + 1).tolist() == [2, 2]


def test_values_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Value(1.0).number = 2.0  # type: ignore[misc]
    assert Value(1.0).error is None
