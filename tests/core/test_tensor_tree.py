"""Arithmetic on trees of tensors equals arithmetic on flat vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from plateaux.core import tensor_tree
from plateaux.core.types import TensorTree

SHAPES: tuple[tuple[int, ...], ...] = ((2, 3), (), (4,), (1, 2, 2))


def tree(seed: int, *, backwards: bool = False) -> TensorTree:
    draw = torch.Generator().manual_seed(seed)
    made = {f"p{i}": torch.randn(shape, generator=draw, dtype=torch.float64) for i, shape in enumerate(SHAPES)}
    return dict(reversed(made.items())) if backwards else made


def flat(a: TensorTree) -> NDArray[np.float64]:
    return np.concatenate([a[name].detach().numpy().reshape(-1) for name in sorted(a)])


@given(seed=st.integers(0, 99), times=st.floats(-10, 10), backwards=st.booleans())
def test_arithmetic_on_trees_equals_that_of_flat_vectors(seed: int, times: float, backwards: bool) -> None:
    a, b = tree(seed), tree(seed + 1, backwards=backwards)  # the order of names does not matter
    x, y = flat(a), flat(b)
    np.testing.assert_allclose(flat(tensor_tree.add(a, b, times=times)), x + times * y, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(flat(tensor_tree.scale(a, times)), times * x)
    np.testing.assert_allclose(flat(tensor_tree.multiply(a, b)), x * y)
    np.testing.assert_allclose(flat(tensor_tree.magnitude(a)), np.abs(x))
    assert float(tensor_tree.norm(a)) == pytest.approx(float(np.linalg.norm(x)))
    assert float(tensor_tree.dot(a, b)) == pytest.approx(float(x @ y))


def test_a_factor_may_be_a_tensor() -> None:
    a = tree(0)
    factor = torch.tensor(2.5, dtype=torch.float64)
    np.testing.assert_allclose(flat(tensor_tree.scale(a, factor)), 2.5 * flat(a))
    np.testing.assert_allclose(flat(tensor_tree.add(a, a, times=factor)), 3.5 * flat(a))


def test_arithmetic_changes_none_of_its_operands() -> None:
    a, b = tree(0), tree(1)
    x, y = flat(a).copy(), flat(b).copy()
    tensor_tree.add(a, b), tensor_tree.scale(a, 2.0), tensor_tree.multiply(a, b), tensor_tree.magnitude(a)
    assert np.array_equal(flat(a), x)
    assert np.array_equal(flat(b), y)


@given(seed=st.integers(0, 99), times=st.floats(-10, 10), backwards=st.booleans())
def test_in_place_arithmetic_gives_the_same_values_and_keeps_the_tensors(
    seed: int, times: float, backwards: bool
) -> None:
    b = tree(seed + 1, backwards=backwards)
    y = flat(b).copy()
    for change, wanted in (
        (lambda a: tensor_tree.add_(a, b, times=times), lambda x: x + times * y),
        (lambda a: tensor_tree.scale_(a, times), lambda x: times * x),
        (lambda a: tensor_tree.multiply_(a, b), lambda x: x * y),
        (lambda a: tensor_tree.clamp_(a, abs(times)), lambda x: np.clip(x, -abs(times), abs(times))),
    ):
        a = tree(seed)
        pointers = [tensor.data_ptr() for tensor in a.values()]
        should = wanted(flat(a).copy())
        change(a)
        np.testing.assert_allclose(flat(a), should, rtol=1e-12, atol=1e-12)
        assert [tensor.data_ptr() for tensor in a.values()] == pointers
    assert np.array_equal(flat(b), y)


def test_a_clone_shares_no_memory_or_autograd_graph() -> None:
    a = {name: tensor.requires_grad_() for name, tensor in tree(0).items()}
    copy = tensor_tree.clone(a)
    assert not any(tensor.requires_grad for tensor in copy.values())
    with torch.no_grad():
        a["p0"].zero_()
    assert copy["p0"].abs().sum() > 0


def test_write_copies_values_into_the_same_tensors() -> None:
    a, b = {name: t.requires_grad_() for name, t in tree(0).items()}, tree(1, backwards=True)
    pointers = {name: tensor.data_ptr() for name, tensor in a.items()}
    tensor_tree.write(a, b)
    assert np.array_equal(flat(a), flat(b))
    assert {name: tensor.data_ptr() for name, tensor in a.items()} == pointers
    assert all(tensor.requires_grad and tensor.is_leaf for tensor in a.values())
    tensor_tree.write({}, {})


def test_size_is_in_bytes() -> None:
    assert tensor_tree.size([torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64)]) == 12 + 32


def test_an_empty_tree_can_be_written() -> None:
    tensor_tree.write({}, {})


def test_one_nan_or_infinity_in_any_tensor_is_not_finite() -> None:
    assert tensor_tree.is_finite([])
    assert tensor_tree.is_finite([torch.ones(2), torch.zeros(3)])
    for wrong in (float("nan"), float("inf")):
        assert not tensor_tree.is_finite([torch.ones(2), torch.tensor([0.0, wrong])])
