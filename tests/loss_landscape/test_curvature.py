"""Curvature-vector products against explicit matrices."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from reference import curvature as reference
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plateaux.core.errors import RecipeError
from plateaux.core.member import MemberModule
from plateaux.core.types import Batch
from plateaux.loss_landscape.curvature import Curvature, Kind, module_name
from plateaux.loss_landscape.loss_surface import LossSurface


class Scores(nn.Module):
    """A network with named inputs and a parameter outside any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(3))
        self.layer = nn.Linear(3, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(self.layer(a * self.shift)) * b


class Attends(nn.Module):
    """Attention with the kernel that torch selects."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.out = nn.Linear(4, 12, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inward(x).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).mean(1))  # type: ignore[no-any-return]


class OnlyBackwards(torch.autograd.Function):
    """A cube without a forward-mode rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * grads[0]


class Cubes(nn.Module):
    def __init__(self, *, variant: str) -> None:
        super().__init__()
        self.inward, self.out, self.variant = nn.Linear(3, 2), nn.Linear(2, 3), variant
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.variant == "checkpoint":
            return checkpoint(lambda at: self.out(torch.tanh(self.inward(at))), x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.out(OnlyBackwards.apply(self.inward(x)))  # type: ignore[no-any-return, no-untyped-call]


class Plain(Cubes):
    def forward(self, x: Tensor) -> Tensor:
        h = self.inward(x)
        return self.out(torch.tanh(h) if self.variant == "checkpoint" else h**3)  # type: ignore[no-any-return]


def conv() -> nn.Module:
    layers = [nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(2, 3))


def batches(kind: str, sizes: tuple[int, ...] = (5, 3)) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    result = []
    for size in sizes:
        inputs = {
            "flat": lambda n=size: randn(n, 3),
            "image": lambda n=size: randn(n, 1, 4, 4),
            "tokens": lambda n=size: randn(n, 5, 4),
            "named": lambda n=size: {"a": randn(n, 3), "b": randn(n, 3)},
        }
        y = torch.randint(0, 3, (size,), generator=generator)
        result.append(Batch(inputs[kind](), y, torch.arange(size)))
    return result


NETS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), "flat"),
    "conv, batchnorm": (conv, "image"),
    "named inputs": (Scores, "named"),
    "attention": (Attends, "tokens"),
}


def make_surface(net: str, *, training: bool = False, **options: Any) -> LossSurface:
    torch.manual_seed(0)
    build, inputs = NETS[net]
    module = build().double().train(training)  # type: ignore[no-untyped-call]
    return LossSurface(MemberModule(module), batches(inputs), **options)


def dense(matrix: Curvature) -> Tensor:
    return torch.stack([matrix.product(row) for row in torch.eye(matrix.size, dtype=torch.float64)])


def explicit(surface: LossSurface, kind: Kind) -> Tensor:
    make = reference.hessian if kind == "hessian" else reference.gauss_newton
    return make(surface.module, list(surface.batches))


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("net", NETS)
def test_products_equal_those_of_the_explicit_matrix(net: str, kind: Kind, training: bool) -> None:
    surface = make_surface(net, training=training)
    before = {name: t.clone() for name, t in surface.module.state_dict().items()}
    matrix, expected = Curvature(surface, kind=kind), explicit(surface, kind)
    assert matrix.mode == "forward_over_reverse"
    v = torch.randn(matrix.size, dtype=torch.float64)
    assert float((expected @ v).abs().max()) > 1e-3
    assert torch.allclose(matrix.product(v), expected @ v, atol=1e-12)
    matrix.mode = "reverse_over_reverse"
    assert torch.allclose(matrix.product(v), expected @ v, atol=1e-12)
    assert all(torch.equal(t, before[name]) for name, t in surface.module.state_dict().items())
    assert all(p.grad is None for p in surface.module.parameters())


@pytest.mark.parametrize("variant", ["checkpoint", "function"])
@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
def test_double_backward_replaces_missing_forward_mode_with_a_warning(kind: Kind, variant: str) -> None:
    fallback, reference_net = Cubes(variant=variant).double(), Plain(variant=variant).double()
    reference_net.load_state_dict(fallback.state_dict())
    with pytest.warns(UserWarning, match="Falling back to double backward"):
        matrix = Curvature(LossSurface(MemberModule(fallback), batches("flat")), kind=kind)
    assert matrix.mode == "reverse_over_reverse"
    assert torch.allclose(
        dense(matrix), explicit(LossSurface(MemberModule(reference_net), batches("flat")), kind), atol=1e-12
    )


def test_a_transformer_is_differentiated_without_its_fast_path() -> None:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(4, 2, 3, 0.0, batch_first=True), nn.Flatten(), nn.Linear(20, 3)]
    surface = LossSurface(MemberModule(nn.Sequential(*layers).double().eval()), batches("tokens", (2, 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no fallback: the fast path is disabled
        matrix = Curvature(surface, kind="gauss_newton")
    v = torch.randn(matrix.size, dtype=torch.float64)
    assert torch.allclose(matrix.product(v), explicit(surface, "gauss_newton") @ v, atol=1e-12)
    matrix = Curvature(surface)
    assert matrix.mode == "forward_over_reverse"
    assert torch.allclose(matrix.product(v), explicit(surface, "hessian") @ v, atol=1e-12)


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
@pytest.mark.parametrize("mode", ["forward_over_reverse", "reverse_over_reverse"])
def test_unused_weights_have_no_curvature(kind: Kind, mode: Any) -> None:
    matrix = Curvature(
        LossSurface(MemberModule(Plain(variant="function").double()), batches("flat")), kind=kind, layer="idle"
    )
    matrix.mode = mode
    assert torch.equal(dense(matrix), torch.zeros(2, 2, dtype=torch.float64))


def test_a_network_without_second_derivatives_is_rejected() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return OnceOnly.apply(self.layer(x))  # type: ignore[no-any-return, no-untyped-call]

    with pytest.raises(RecipeError, match="Once cannot be differentiated twice"):
        Curvature(LossSurface(MemberModule(Once().double()), batches("flat")))


class OnceOnly(OnlyBackwards):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * grads[0]


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
def test_the_matrix_of_one_layer_is_a_block_of_the_full_matrix(kind: Kind) -> None:
    surface = make_surface("mlp")
    block = Curvature(surface, kind=kind, layer="2")
    assert block.size == 15
    assert torch.allclose(dense(block), explicit(surface, kind)[16:, 16:], atol=1e-12)
    block.mode = "reverse_over_reverse"
    assert torch.allclose(dense(block), explicit(surface, kind)[16:, 16:], atol=1e-12)
    assert Curvature(surface, layer="2.bias").size == 3


def test_an_unknown_layer_is_rejected_with_a_suggestion() -> None:
    surface = make_surface("named inputs")
    with pytest.raises(RecipeError, match="no layer 'layr' with trained weights; did you mean 'layer'"):
        Curvature(surface, layer="layr")
    assert Curvature(surface).layers() == {"shift": [0], "layer": [1, 2]}
    assert module_name("a.b.weight") == "a.b"


def test_quadratic_forms_are_returned_per_chunk_and_tensor() -> None:
    surface = make_surface("mlp")
    matrix = Curvature(surface)
    v = torch.randn(matrix.size, dtype=torch.float64)
    product, forms = matrix.product_and_forms(v)
    assert forms.shape == (2, 4)
    assert matrix.chunk_weights.tolist() == [5 / 8, 3 / 8]
    for row, batch in zip(forms, surface.batches, strict=True):
        item = (v * (reference.hessian(surface.module, [batch]) @ v)).split([12, 4, 12, 3])
        assert row.tolist() == pytest.approx([float(part.sum()) for part in item], abs=1e-12)
    assert float(matrix.chunk_weights @ forms.sum(1)) == pytest.approx(float(v @ product), abs=1e-12)


def test_the_gauss_newton_matrix_is_positive_semidefinite_with_normalized_logits() -> None:
    surface = make_surface("mlp", normalize_logits=True)
    values = torch.linalg.eigvalsh(dense(Curvature(surface, kind="gauss_newton")))
    assert float(values.min()) > -1e-12
    assert float(values.max()) > 1e-3
    slopes = torch.autograd.functional.hessian(
        lambda at: (
            sum(surface.losses_from_logits(reference.outputs(surface.module, at, b), b).sum() for b in surface.batches)
            / 8
        ),
        reference.flat(surface.module),
    )
    assert torch.allclose(dense(Curvature(surface)), slopes, atol=1e-12)


def test_samples_are_split_into_eight_chunks_of_sufficient_size_outside_batchnorm_training() -> None:
    def cut(*sizes: int, training: bool = False) -> list[int]:
        surface = LossSurface(make_surface("mlp").member, batches("flat", sizes))
        surface.module.train(training)
        return [len(piece) for piece in Curvature(surface).chunks]

    assert cut(5, 3) == [5, 3]
    assert cut(64, 40) == [16, 16, 16, 16, 20, 20]
    assert cut(200) == [25] * 8
    assert cut(64, 40, training=True) == [64, 40]
    assert cut(*[20] * 9) == [20] * 9


def test_the_standard_error_of_the_data_is_that_of_a_mean_over_chunks() -> None:
    matrix = Curvature(LossSurface(make_surface("mlp").member, batches("flat", (4, 4, 4))))
    values = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    assert matrix.data_stderr(values) == pytest.approx(float(values.std()) / 3**0.5)
    uneven = Curvature(LossSurface(make_surface("mlp").member, batches("flat", (9, 3))))
    two = torch.tensor([0.0, 4.0], dtype=torch.float64)
    assert uneven.data_stderr(two) == pytest.approx((2 * ((0.75 * 1) ** 2 + (0.25 * 3) ** 2)) ** 0.5)
    assert Curvature(LossSurface(make_surface("mlp").member, batches("flat", (9,)))).data_stderr(values[:1]) is None


def test_float32_agrees_with_float64() -> None:
    surface = make_surface("conv, batchnorm")
    expected = explicit(surface, "hessian")
    surface.module.float()
    near = [Batch(b.x.float(), b.y, b.index) for b in surface.batches if isinstance(b.x, Tensor)]
    matrix = Curvature(LossSurface(MemberModule(surface.module), near))
    rows = torch.stack([matrix.product(row) for row in torch.eye(matrix.size)])
    assert rows.dtype == torch.float32
    assert torch.allclose(rows.double(), expected, atol=1e-5)
