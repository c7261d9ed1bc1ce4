"""Probes of curvature beside the whole matrix, beside quadratic losses, and beside curvlinops."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from math import sqrt
from typing import Any

import pytest
import torch
from reference import curvature as reference
from torch import Tensor, nn

from plateaux.core import registry
from plateaux.core.errors import RecipeError
from plateaux.core.member import MemberModule
from plateaux.core.optional import optional_import
from plateaux.core.types import Batch, Estimate
from plateaux.loss_landscape.curvature import Curvature
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.probes.hessian import _estimate, ordinal

QUICK: dict[str, dict[str, Any]] = {
    "trace": {"mc_samples": 3},
    "gauss_newton_trace": {"mc_samples": 3},
    "top_eigenvalue": {"steps": 6},
    "gauss_newton_eigenvalue": {"steps": 6},
    "spectrum": {"mc_samples": 2, "steps": 4},
}


def asked(name: str, ground: LossSurface, **options: Any) -> Mapping[str, Estimate]:
    return registry.probe.get(name)(**options).run(ground)  # type: ignore[no-any-return]


def mlp(*, key: int = 0, sizes: tuple[int, ...] = (12, 8)) -> LossSurface:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()
    return LossSurface(MemberModule(net), drawn(sizes, 3), seed=key)


def drawn(sizes: tuple[int, ...], *shape: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    whole = sum(sizes)
    x = 2 * torch.randn(whole, *shape, generator=generator, dtype=torch.float64)
    batch = Batch(x, torch.randint(0, 3, (whole,), generator=generator), torch.arange(whole))
    ends = torch.tensor((0, *sizes)).cumsum(0).tolist()
    return [batch.take(slice(a, b)) for a, b in pairwise(ends)]


@cache
def hessian() -> Tensor:
    return reference.hessian(mlp().module, list(mlp().batches))


@cache
def gauss_newton() -> Tensor:
    return reference.gauss_newton(mlp().module, list(mlp().batches))


class Quadratic(LossSurface):
    """A ground whose loss is a parabola: the matrix of its curvature is the mean of x x'."""

    def losses_from_logits(self, logits: Tensor, batch: Batch) -> Tensor:
        return logits.square().sum(-1) / 2


def bowl(values: Tensor) -> Quadratic:
    """A quadratic loss whose curvature has these eigenvalues, on two batches of different sizes."""
    count = len(values)
    turn = torch.linalg.qr(torch.randn(count, count, dtype=torch.float64))[0]
    rows = (count * values.double()).sqrt()[:, None] * turn  # mean of x x' = turn' diag(values) turn
    net = nn.Linear(count, 1, bias=False).double()
    whole = Batch(rows, torch.zeros(count), torch.arange(count))
    return Quadratic(MemberModule(net), [whole.take(slice(0, 7)), whole.take(slice(7, count))])


BOWL = torch.cat([torch.linspace(0, 1, 30), torch.tensor([2.0, 6.0, 9.0])]).double()


def test_eigenvalues_of_a_quadratic_loss_are_found_to_eight_digits() -> None:
    found = asked("top_eigenvalue", bowl(BOWL), k=4, steps=60, tolerance=1e-10)
    assert [found[name].value for name in ("", "2nd", "3rd", "4th")] == pytest.approx([9, 6, 2, 1], abs=1e-8)
    assert found["residual"].value < 1e-8
    low = asked("top_eigenvalue", bowl(BOWL + 1), end="smallest", steps=60, tolerance=1e-10)
    assert low[""].value == pytest.approx(1, abs=1e-8)


def test_the_trace_of_a_quadratic_loss_is_within_its_error_and_exact_with_a_basis() -> None:
    ground = bowl(BOWL)
    found = asked("trace", ground)[""]
    assert found.mc_stderr is not None
    assert abs(found.value - float(BOWL.sum())) < 4 * found.mc_stderr
    assert found.mc_stderr < 0.2 * found.value
    matrix = Curvature(ground)
    basis = sqrt(matrix.size) * torch.eye(matrix.size, dtype=torch.float64)
    whole = _estimate(matrix, torch.stack([matrix.product_and_forms(row)[1].sum(-1) for row in basis]))
    assert whole.value == pytest.approx(float(BOWL.sum()), abs=1e-8)


@pytest.mark.parametrize(("name", "whole"), [("trace", hessian), ("gauss_newton_trace", gauss_newton)])
@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_the_trace_of_a_net_is_within_its_error(name: str, whole: Any, method: str) -> None:
    found = asked(name, mlp(), method=method)[""]
    assert found.mc_stderr is not None
    assert abs(found.value - float(whole().trace())) < 4 * found.mc_stderr
    assert 0 < found.mc_stderr < 0.3 * float(whole().trace())


def test_the_trace_of_every_layer_is_that_of_its_block_and_they_add_up() -> None:
    found = asked("trace", mlp(), mc_samples=40, layers=True)
    assert set(found) == {"", "layer 0", "layer 2"}
    for layer, block in {"layer 0": hessian()[:16, :16], "layer 2": hessian()[16:, 16:]}.items():
        value = found[layer]
        assert value.mc_stderr is not None
        assert value.stderr is not None
        assert abs(value.value - float(block.trace())) < 4 * value.mc_stderr
    assert found["layer 0"].value + found["layer 2"].value == pytest.approx(found[""].value, rel=1e-12)
    assert found[""] == asked("trace", mlp(), mc_samples=40)[""]


def test_standard_errors_of_the_draws_are_honest() -> None:
    """Over fifty seeds on the same data the true trace is inside the interval at least forty-five times."""
    net, batches = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double().eval(), drawn((12,), 3)
    truth = float(reference.hessian(net, batches).trace())
    values = [asked("trace", LossSurface(MemberModule(net), batches, seed=seed))[""] for seed in range(50)]
    inside = [abs(value.value - truth) <= 1.96 * (value.mc_stderr or 0) for value in values]
    assert sum(inside) >= 45
    numbers = torch.tensor([value.value for value in values])
    errors = torch.tensor([value.mc_stderr for value in values])
    assert float(errors.square().mean().sqrt() / numbers.std()) == pytest.approx(1, abs=0.3)


def test_the_error_of_the_data_is_how_much_other_samples_change_the_number() -> None:
    """On forty other draws of the data, with the same directions, the trace spreads as the errors say."""
    torch.manual_seed(0)
    net = nn.Linear(2, 3).double().eval()
    values = []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(64, 2, generator=generator, dtype=torch.float64)
        ground = LossSurface(
            MemberModule(net), [Batch(x, torch.randint(0, 3, (64,), generator=generator), torch.arange(64))]
        )
        values.append(asked("gauss_newton_trace", ground, mc_samples=1)[""])
    spread = torch.tensor([value.value for value in values]).std()
    said = torch.tensor([value.stderr for value in values]).square().mean().sqrt()
    assert float(said / spread) == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize(("name", "whole"), [("top_eigenvalue", hessian), ("gauss_newton_eigenvalue", gauss_newton)])
@pytest.mark.parametrize("end", ["largest", "smallest", "magnitude"])
def test_eigenvalues_of_a_net_are_found_to_eight_digits(name: str, whole: Any, end: str) -> None:
    found = asked(name, mlp(), k=3, end=end, steps=60, tolerance=1e-9)
    values = torch.linalg.eigvalsh(whole())
    order = {"largest": -values, "smallest": values, "magnitude": -values.abs()}[end].argsort()[:3]
    assert [found[part].value for part in ("", "2nd", "3rd")] == pytest.approx(values[order].tolist(), abs=1e-8)
    assert list(found) == ["", "2nd", "3rd", "residual"]
    assert found["residual"].value < 1e-6
    assert all(found[part].stderr is not None for part in ("", "2nd", "3rd"))


def test_an_eigenvalue_lies_within_the_residual_where_too_few_steps_were_taken() -> None:
    found = asked("top_eigenvalue", mlp(), steps=3)
    values = torch.linalg.eigvalsh(hessian())
    assert found["residual"].value > 1e-3
    assert float((values - found[""].value).abs().min()) <= found["residual"].value


@pytest.mark.parametrize(("layer", "rows"), [("0", slice(0, 16)), ("2", slice(16, 31)), ("2.weight", slice(16, 28))])
def test_one_layer_alone_is_asked_about_its_block(layer: str, rows: slice) -> None:
    block = hessian()[rows, rows]
    top = asked("top_eigenvalue", mlp(), layer=layer, steps=40, tolerance=1e-9)[""].value
    assert top == pytest.approx(float(torch.linalg.eigvalsh(block).max()), abs=1e-8)
    found = asked("trace", mlp(), layer=layer, mc_samples=40)[""]
    assert abs(found.value - float(block.trace())) < 4 * (found.mc_stderr or 0)


def test_hutch_plus_plus_is_exact_where_its_sketch_holds_the_matrix() -> None:
    ground = bowl(torch.cat([torch.zeros(30), torch.tensor([2.0, 6.0, 9.0])]))
    found = asked("trace", ground, method="hutch++", mc_samples=12)[""]
    assert found.value == pytest.approx(17, abs=1e-8)
    assert found.mc_stderr == pytest.approx(0, abs=1e-8)
    assert asked("trace", ground, mc_samples=12)[""].mc_stderr > 0.5  # type: ignore[operator]
    flat = asked("trace", bowl(torch.zeros(9)), method="hutch++", mc_samples=3)[""]
    assert (flat.value, flat.mc_stderr) == (0, None)


@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_a_trace_takes_as_many_products_as_it_has_draws(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, applied = [], Curvature.product_and_forms
    monkeypatch.setattr(Curvature, "product_and_forms", lambda self, v: taken.append(v) or applied(self, v))
    asked("trace", mlp(), method=method, mc_samples=11)
    assert len(taken) == 11


def test_the_spectrum_integrates_to_one_and_its_mean_is_the_trace_over_the_weights() -> None:
    found = asked("spectrum", mlp(), mc_samples=3, steps=31)
    points = {float(name.removeprefix("density at ")): v for name, v in found.items() if name.startswith("density")}
    grid, heights = torch.tensor(list(points)).double(), torch.tensor([v.value for v in points.values()]).double()
    step = (grid[-1] - grid[0]) / (len(grid) - 1)
    assert len(points) == 101
    assert float(heights.sum() * step) == pytest.approx(1, abs=1e-5)
    assert float((heights * grid).sum() * step) == pytest.approx(found[""].value, abs=1e-5)
    trace = asked("trace", mlp())[""]
    wide = sqrt((found[""].mc_stderr or 0) ** 2 + ((trace.mc_stderr or 0) / 31) ** 2)
    assert abs(found[""].value - trace.value / 31) < 4 * wide
    assert abs(found[""].value - float(hessian().trace()) / 31) < 4 * (found[""].mc_stderr or 0)
    values = torch.linalg.eigvalsh(hessian())
    assert found["highest"].value == pytest.approx(float(values.max()), abs=1e-8)
    assert found["lowest"].value == pytest.approx(float(values.min()), abs=1e-8)
    near = asked("spectrum", mlp(), mc_samples=1, steps=4, kind="gauss_newton")
    assert near["lowest"].value > -1e-9
    assert near[""].mc_stderr is None


@pytest.mark.parametrize("name", QUICK)
def test_a_net_with_batchnorm_in_single_precision_is_asked_and_left_as_it_was(name: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)]
    batches = [Batch(b.x.float(), b.y, b.index) for b in drawn((5, 4), 1, 4, 4)]  # type: ignore[union-attr]
    for training in (False, True):
        net = nn.Sequential(*layers).train(training)
        before = {key: t.clone() for key, t in net.state_dict().items()}
        ground = LossSurface(MemberModule(net), batches)
        found = asked(name, ground, **QUICK[name])
        wide = LossSurface(MemberModule(net.double()), [Batch(b.x.double(), b.y, b.index) for b in batches])  # type: ignore[union-attr]
        assert found[""].value == pytest.approx(asked(name, wide, **QUICK[name])[""].value, rel=1e-4)
        net.float()
        assert all(torch.equal(t, before[key]) for key, t in net.state_dict().items())
        assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("name", QUICK)
def test_the_draws_depend_on_the_key_of_the_ground_alone(name: str, untouched_randomness: None) -> None:
    state = torch.get_rng_state()
    first, again, other = (asked(name, mlp(key=key), **QUICK[name]) for key in (1, 1, 2))
    torch.set_rng_state(state)
    assert first == again
    assert first[""].value != other[""].value


def test_passes_count_four_for_a_product_with_the_hessian() -> None:
    make = registry.probe.get
    assert make("trace")(mc_samples=30).passes(1000) == 4 * 30 * 1000
    assert make("gauss_newton_trace")(mc_samples=30).passes(1000) == 2 * 30 * 1000
    assert make("top_eigenvalue")(k=2, steps=50).passes(10) == 4 * 52 * 10
    assert make("spectrum")(mc_samples=2, steps=3).passes(10) == 4 * 6 * 10
    assert not make("spectrum")().default


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("trace", {"mc_samples": 0}, "mc_samples = 0: must be at least 1"),
        ("trace", {"mc_samples": 2, "method": "hutch++"}, "mc_samples = 2: must be at least 3"),
        ("trace", {"layers": True, "method": "hutch++"}, "not supported by method"),
        ("top_eigenvalue", {"k": 0}, "k = 0"),
        ("top_eigenvalue", {"k": 5, "steps": 4}, "steps = 4: must be at least 5"),
        ("top_eigenvalue", {"k": 32}, "has only 31 eigenvalues"),
        ("spectrum", {"points": 20}, "points = 20: must be at least 32"),
        ("trace", {"layer": "3"}, "no layer '3' with trained weights"),
    ],
)
def test_options_that_cannot_be_are_told(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        asked(name, mlp(), **options)


def test_places_are_named_as_they_are_spoken() -> None:
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 22, 112)] == [
        *("1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "112th")
    ]


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
def test_a_small_conv_net_agrees_with_curvlinops(kind: Any) -> None:
    pytest.importorskip("curvlinops", reason="curvlinops-for-pytorch is not installed")
    theirs = optional_import("curvlinops", extra="dev")
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 2, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)]
    net, batches = nn.Sequential(*layers).double().eval(), drawn((10, 7), 1, 6, 6)
    operator = theirs.HessianLinearOperator if kind == "hessian" else theirs.GGNLinearOperator
    data = [(batch.x, batch.y) for batch in batches]
    other = operator(net, nn.CrossEntropyLoss(), list(net.parameters()), data)
    ground = LossSurface(MemberModule(net), batches)
    matrix = Curvature(ground, kind=kind)
    v = torch.randn(matrix.size, dtype=torch.float64)
    assert torch.allclose(matrix.product(v), other @ v, atol=1e-12)
    whole = other @ torch.eye(matrix.size, dtype=torch.float64)
    name = "top_eigenvalue" if kind == "hessian" else "gauss_newton_eigenvalue"
    top = asked(name, ground, steps=60, tolerance=1e-10)[""].value
    assert top == pytest.approx(float(torch.linalg.eigvalsh(whole).max()), abs=1e-8)
    found = asked("trace" if kind == "hessian" else "gauss_newton_trace", ground)[""]
    assert abs(found.value - float(whole.trace())) < 4 * (found.mc_stderr or 0)
