"""Products with the curvature beside the whole matrix, written down entry by entry."""

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
    """A network that is called with named tensors, and whose first weight is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(3))
        self.layer = nn.Linear(3, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(self.layer(a * self.shift)) * b


class Attends(nn.Module):
    """Attention by whatever kernel torch takes."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.out = nn.Linear(4, 12, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inward(x).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).mean(1))  # type: ignore[no-any-return]


class OnlyBackwards(torch.autograd.Function):
    """A cube that forward mode does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * grads[0]


class Cubes(nn.Module):
    def __init__(self, *, way: str) -> None:
        super().__init__()
        self.inward, self.out, self.way = nn.Linear(3, 2), nn.Linear(2, 3), way
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "checkpoint":
            return checkpoint(lambda at: self.out(torch.tanh(self.inward(at))), x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.out(OnlyBackwards.apply(self.inward(x)))  # type: ignore[no-any-return, no-untyped-call]


class Plain(Cubes):
    def forward(self, x: Tensor) -> Tensor:
        h = self.inward(x)
        return self.out(torch.tanh(h) if self.way == "checkpoint" else h**3)  # type: ignore[no-any-return]


def conv() -> nn.Module:
    layers = [nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(2, 3))


def batches(kind: str, sizes: tuple[int, ...] = (5, 3)) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    found = []
    for size in sizes:
        inputs = {
            "flat": lambda n=size: draw(n, 3),
            "image": lambda n=size: draw(n, 1, 4, 4),
            "tokens": lambda n=size: draw(n, 5, 4),
            "named": lambda n=size: {"a": draw(n, 3), "b": draw(n, 3)},
        }
        y = torch.randint(0, 3, (size,), generator=generator)
        found.append(Batch(inputs[kind](), y, torch.arange(size)))
    return found


NETS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), "flat"),
    "conv, batchnorm": (conv, "image"),
    "named inputs": (Scores, "named"),
    "attention": (Attends, "tokens"),
}


def made(net: str, *, training: bool = False, **options: Any) -> LossSurface:
    torch.manual_seed(0)
    build, inputs = NETS[net]
    module = build().double().train(training)  # type: ignore[no-untyped-call]
    return LossSurface(MemberModule(module), batches(inputs), **options)


def whole(matrix: Curvature) -> Tensor:
    return torch.stack([matrix.product(row) for row in torch.eye(matrix.size, dtype=torch.float64)])


def explicit(ground: LossSurface, kind: Kind) -> Tensor:
    make = reference.hessian if kind == "hessian" else reference.gauss_newton
    return make(ground.module, list(ground.batches))


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("net", NETS)
def test_products_are_those_of_the_matrix_written_down(net: str, kind: Kind, training: bool) -> None:
    ground = made(net, training=training)
    before = {name: t.clone() for name, t in ground.module.state_dict().items()}
    matrix, wanted = Curvature(ground, kind=kind), explicit(ground, kind)
    assert matrix.mode == "forward_over_reverse"
    v = torch.randn(matrix.size, dtype=torch.float64)
    assert float((wanted @ v).abs().max()) > 1e-3
    assert torch.allclose(matrix.product(v), wanted @ v, atol=1e-12)
    matrix.mode = "reverse_over_reverse"
    assert torch.allclose(matrix.product(v), wanted @ v, atol=1e-12)
    assert all(torch.equal(t, before[name]) for name, t in ground.module.state_dict().items())
    assert all(p.grad is None for p in ground.module.parameters())


@pytest.mark.parametrize("way", ["checkpoint", "function"])
@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
def test_what_forward_mode_cannot_is_done_twice_backwards_and_said(kind: Kind, way: str) -> None:
    hard, easy = Cubes(way=way).double(), Plain(way=way).double()
    easy.load_state_dict(hard.state_dict())
    with pytest.warns(UserWarning, match="Falling back to double backward"):
        matrix = Curvature(LossSurface(MemberModule(hard), batches("flat")), kind=kind)
    assert matrix.mode == "reverse_over_reverse"
    assert torch.allclose(whole(matrix), explicit(LossSurface(MemberModule(easy), batches("flat")), kind), atol=1e-12)


def test_a_transformer_whose_fast_path_has_no_derivatives_is_right_all_the_same() -> None:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(4, 2, 3, 0.0, batch_first=True), nn.Flatten(), nn.Linear(20, 3)]
    ground = LossSurface(MemberModule(nn.Sequential(*layers).double().eval()), batches("tokens", (2, 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing falls back: the fast path is switched off
        matrix = Curvature(ground, kind="gauss_newton")
    v = torch.randn(matrix.size, dtype=torch.float64)
    assert torch.allclose(matrix.product(v), explicit(ground, "gauss_newton") @ v, atol=1e-12)
    matrix = Curvature(ground)
    assert matrix.mode == "forward_over_reverse"
    assert torch.allclose(matrix.product(v), explicit(ground, "hessian") @ v, atol=1e-12)


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
@pytest.mark.parametrize("manner", ["forward_over_reverse", "reverse_over_reverse"])
def test_weights_that_the_loss_does_not_feel_have_no_curvature(kind: Kind, manner: Any) -> None:
    matrix = Curvature(
        LossSurface(MemberModule(Plain(way="function").double()), batches("flat")), kind=kind, layer="idle"
    )
    matrix.mode = manner
    assert torch.equal(whole(matrix), torch.zeros(2, 2, dtype=torch.float64))


def test_a_network_without_second_derivatives_is_told() -> None:
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
def test_one_layer_is_a_block_of_the_whole(kind: Kind) -> None:
    ground = made("mlp")
    block = Curvature(ground, kind=kind, layer="2")
    assert block.size == 15
    assert torch.allclose(whole(block), explicit(ground, kind)[16:, 16:], atol=1e-12)
    block.mode = "reverse_over_reverse"
    assert torch.allclose(whole(block), explicit(ground, kind)[16:, 16:], atol=1e-12)
    assert Curvature(ground, layer="2.bias").size == 3


def test_a_layer_that_is_not_there_is_told_with_those_that_are() -> None:
    ground = made("named inputs")
    with pytest.raises(RecipeError, match="no layer 'layr' with trained weights; did you mean 'layer'"):
        Curvature(ground, layer="layr")
    assert Curvature(ground).layers() == {"shift": [0], "layer": [1, 2]}
    assert module_name("a.b.weight") == "a.b"


def test_forms_are_those_of_every_piece_and_tensor() -> None:
    ground = made("mlp")
    matrix = Curvature(ground)
    v = torch.randn(matrix.size, dtype=torch.float64)
    product, forms = matrix.product_and_forms(v)
    assert forms.shape == (2, 4)
    assert matrix.chunk_weights.tolist() == [5 / 8, 3 / 8]
    for row, batch in zip(forms, ground.batches, strict=True):
        each = (v * (reference.hessian(ground.module, [batch]) @ v)).split([12, 4, 12, 3])
        assert row.tolist() == pytest.approx([float(part.sum()) for part in each], abs=1e-12)
    assert float(matrix.chunk_weights @ forms.sum(1)) == pytest.approx(float(v @ product), abs=1e-12)


def test_the_gauss_newton_matrix_is_never_below_zero_with_unit_logits_too() -> None:
    ground = made("mlp", normalize_logits=True)
    values = torch.linalg.eigvalsh(whole(Curvature(ground, kind="gauss_newton")))
    assert float(values.min()) > -1e-12
    assert float(values.max()) > 1e-3
    slopes = torch.autograd.functional.hessian(
        lambda at: (
            sum(ground.losses_from_logits(reference.outputs(ground.module, at, b), b).sum() for b in ground.batches) / 8
        ),
        reference.flat(ground.module),
    )
    assert torch.allclose(whole(Curvature(ground)), slopes, atol=1e-12)


def test_samples_are_cut_into_eight_pieces_unless_that_makes_them_small_or_batchnorm_feels_it() -> None:
    def cut(*sizes: int, training: bool = False) -> list[int]:
        ground = LossSurface(made("mlp").member, batches("flat", sizes))
        ground.module.train(training)
        return [len(piece) for piece in Curvature(ground).chunks]

    assert cut(5, 3) == [5, 3]
    assert cut(64, 40) == [16, 16, 16, 16, 20, 20]
    assert cut(200) == [25] * 8
    assert cut(64, 40, training=True) == [64, 40]
    assert cut(*[20] * 9) == [20] * 9


def test_the_error_of_the_data_is_that_of_a_mean_over_pieces() -> None:
    matrix = Curvature(LossSurface(made("mlp").member, batches("flat", (4, 4, 4))))
    values = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    assert matrix.data_stderr(values) == pytest.approx(float(values.std()) / 3**0.5)
    uneven = Curvature(LossSurface(made("mlp").member, batches("flat", (9, 3))))
    two = torch.tensor([0.0, 4.0], dtype=torch.float64)
    assert uneven.data_stderr(two) == pytest.approx((2 * ((0.75 * 1) ** 2 + (0.25 * 3) ** 2)) ** 0.5)
    assert Curvature(LossSurface(made("mlp").member, batches("flat", (9,)))).data_stderr(values[:1]) is None


def test_single_precision_is_near_double() -> None:
    ground = made("conv, batchnorm")
    wanted = explicit(ground, "hessian")
    ground.module.float()
    near = [Batch(b.x.float(), b.y, b.index) for b in ground.batches if isinstance(b.x, Tensor)]
    matrix = Curvature(LossSurface(MemberModule(ground.module), near))
    rows = torch.stack([matrix.product(row) for row in torch.eye(matrix.size)])
    assert rows.dtype == torch.float32
    assert torch.allclose(rows.double(), wanted, atol=1e-5)
