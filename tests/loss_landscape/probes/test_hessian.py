"""Curvature probes against explicit matrices, quadratic losses, and curvlinops."""

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
from plateaux.core.imports import optional_import
from plateaux.core.member import MemberModule
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


def run_probe(name: str, surface: LossSurface, **options: Any) -> Mapping[str, Estimate]:
    return registry.probe.get(name)(**options).run(surface)  # type: ignore[no-any-return]


def mlp(*, seed: int = 0, sizes: tuple[int, ...] = (12, 8)) -> LossSurface:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()
    return LossSurface(MemberModule(net), sampled(sizes, 3), seed=seed)


def sampled(sizes: tuple[int, ...], *shape: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    full = sum(sizes)
    x = 2 * torch.randn(full, *shape, generator=generator, dtype=torch.float64)
    batch = Batch(x, torch.randint(0, 3, (full,), generator=generator), torch.arange(full))
    ends = torch.tensor((0, *sizes)).cumsum(0).tolist()
    return [batch.take(slice(a, b)) for a, b in pairwise(ends)]


@cache
def hessian() -> Tensor:
    return reference.hessian(mlp().module, list(mlp().batches))


@cache
def gauss_newton() -> Tensor:
    return reference.gauss_newton(mlp().module, list(mlp().batches))


class Quadratic(LossSurface):
    """A surface with a quadratic loss, whose Hessian is the mean of x x'."""

    def losses_from_logits(self, logits: Tensor, batch: Batch) -> Tensor:
        return logits.square().sum(-1) / 2


def bowl(values: Tensor) -> Quadratic:
    """A quadratic loss whose Hessian has these eigenvalues, on two batches of different sizes."""
    count = len(values)
    rotation = torch.linalg.qr(torch.randn(count, count, dtype=torch.float64))[0]
    rows = (count * values.double()).sqrt()[:, None] * rotation  # mean of x x' = rotation' diag(values) rotation
    net = nn.Linear(count, 1, bias=False).double()
    full = Batch(rows, torch.zeros(count), torch.arange(count))
    return Quadratic(MemberModule(net), [full.take(slice(0, 7)), full.take(slice(7, count))])


BOWL = torch.cat([torch.linspace(0, 1, 30), torch.tensor([2.0, 6.0, 9.0])]).double()


def test_eigenvalues_of_a_quadratic_loss_have_eight_digits() -> None:
    result = run_probe("top_eigenvalue", bowl(BOWL), k=4, steps=60, tolerance=1e-10)
    assert [result[name].value for name in ("", "2nd", "3rd", "4th")] == pytest.approx([9, 6, 2, 1], abs=1e-8)
    assert result["residual"].value < 1e-8
    low = run_probe("top_eigenvalue", bowl(BOWL + 1), end="smallest", steps=60, tolerance=1e-10)
    assert low[""].value == pytest.approx(1, abs=1e-8)


def test_the_trace_of_a_quadratic_loss_is_within_its_standard_error_and_exact_with_a_basis() -> None:
    surface = bowl(BOWL)
    result = run_probe("trace", surface)[""]
    assert result.mc_stderr is not None
    assert abs(result.value - float(BOWL.sum())) < 4 * result.mc_stderr
    assert result.mc_stderr < 0.2 * result.value
    matrix = Curvature(surface)
    basis = sqrt(matrix.size) * torch.eye(matrix.size, dtype=torch.float64)
    full = _estimate(matrix, torch.stack([matrix.product_and_forms(row)[1].sum(-1) for row in basis]))
    assert full.value == pytest.approx(float(BOWL.sum()), abs=1e-8)


@pytest.mark.parametrize(("name", "full"), [("trace", hessian), ("gauss_newton_trace", gauss_newton)])
def test_the_trace_of_a_network_is_within_its_standard_error(name: str, full: Any) -> None:
    result = run_probe(name, mlp())[""]
    assert result.mc_stderr is not None
    assert abs(result.value - float(full().trace())) < 4 * result.mc_stderr
    assert 0 < result.mc_stderr < 0.3 * float(full().trace())


def test_traces_of_layers_are_those_of_their_blocks_and_sum_to_the_total() -> None:
    result = run_probe("trace", mlp(), mc_samples=40, layers=True)
    assert set(result) == {"", "layer 0", "layer 2"}
    for layer, block in {"layer 0": hessian()[:16, :16], "layer 2": hessian()[16:, 16:]}.items():
        value = result[layer]
        assert value.mc_stderr is not None
        assert value.stderr is not None
        assert abs(value.value - float(block.trace())) < 4 * value.mc_stderr
    assert result["layer 0"].value + result["layer 2"].value == pytest.approx(result[""].value, rel=1e-12)
    assert result[""] == run_probe("trace", mlp(), mc_samples=40)[""]


@pytest.mark.slow
def test_the_monte_carlo_standard_error_matches_repetition() -> None:
    """The interval contains the true trace for at least 45 of 50 seeds on the same data."""
    net, batches = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double().eval(), sampled((12,), 3)
    truth = float(reference.hessian(net, batches).trace())
    values = [run_probe("trace", LossSurface(MemberModule(net), batches, seed=seed))[""] for seed in range(50)]
    inside = [abs(value.value - truth) <= 1.96 * (value.mc_stderr or 0) for value in values]
    assert sum(inside) >= 45
    numbers = torch.tensor([value.value for value in values])
    errors = torch.tensor([value.mc_stderr for value in values])
    assert float(errors.square().mean().sqrt() / numbers.std()) == pytest.approx(1, abs=0.3)


def test_the_standard_error_of_the_data_matches_other_samples() -> None:
    """The standard deviation of the trace over 40 samples of data matches the reported standard errors."""
    torch.manual_seed(0)
    net = nn.Linear(2, 3).double().eval()
    values = []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(64, 2, generator=generator, dtype=torch.float64)
        surface = LossSurface(
            MemberModule(net), [Batch(x, torch.randint(0, 3, (64,), generator=generator), torch.arange(64))]
        )
        values.append(run_probe("gauss_newton_trace", surface, mc_samples=1)[""])
    spread = torch.tensor([value.value for value in values]).std()
    said = torch.tensor([value.stderr for value in values]).square().mean().sqrt()
    assert float(said / spread) == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize(("name", "full"), [("top_eigenvalue", hessian), ("gauss_newton_eigenvalue", gauss_newton)])
@pytest.mark.parametrize("end", ["largest", "smallest", "magnitude"])
def test_eigenvalues_of_a_network_have_eight_digits(name: str, full: Any, end: str) -> None:
    result = run_probe(name, mlp(), k=3, end=end, steps=60, tolerance=1e-9)
    values = torch.linalg.eigvalsh(full())
    order = {"largest": -values, "smallest": values, "magnitude": -values.abs()}[end].argsort()[:3]
    assert [result[part].value for part in ("", "2nd", "3rd")] == pytest.approx(values[order].tolist(), abs=1e-8)
    assert list(result) == ["", "2nd", "3rd", "residual"]
    assert result["residual"].value < 1e-6
    assert all(result[part].stderr is not None for part in ("", "2nd", "3rd"))


def test_the_error_of_an_eigenvalue_after_few_steps_is_at_most_its_residual() -> None:
    result = run_probe("top_eigenvalue", mlp(), steps=3)
    values = torch.linalg.eigvalsh(hessian())
    assert result["residual"].value > 1e-3
    assert float((values - result[""].value).abs().min()) <= result["residual"].value


@pytest.mark.parametrize(("layer", "rows"), [("0", slice(0, 16)), ("2", slice(16, 31)), ("2.weight", slice(16, 28))])
def test_a_probe_of_one_layer_uses_its_block(layer: str, rows: slice) -> None:
    block = hessian()[rows, rows]
    top = run_probe("top_eigenvalue", mlp(), layer=layer, steps=40, tolerance=1e-9)[""].value
    assert top == pytest.approx(float(torch.linalg.eigvalsh(block).max()), abs=1e-8)
    result = run_probe("trace", mlp(), layer=layer, mc_samples=40)[""]
    assert abs(result.value - float(block.trace())) < 4 * (result.mc_stderr or 0)


def test_a_trace_takes_one_product_per_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, applied = [], Curvature.product_and_forms
    monkeypatch.setattr(Curvature, "product_and_forms", lambda self, v: taken.append(v) or applied(self, v))
    run_probe("trace", mlp(), mc_samples=11)
    assert len(taken) == 11


def test_the_spectrum_integrates_to_one_and_its_mean_is_the_trace_over_the_weights() -> None:
    result = run_probe("spectrum", mlp(), mc_samples=3, steps=31)
    points = {float(name.removeprefix("density at ")): v for name, v in result.items() if name.startswith("density")}
    grid, heights = torch.tensor(list(points)).double(), torch.tensor([v.value for v in points.values()]).double()
    step = (grid[-1] - grid[0]) / (len(grid) - 1)
    assert len(points) == 101
    assert float(heights.sum() * step) == pytest.approx(1, abs=1e-5)
    assert float((heights * grid).sum() * step) == pytest.approx(result[""].value, abs=1e-5)
    trace = run_probe("trace", mlp())[""]
    wide = sqrt((result[""].mc_stderr or 0) ** 2 + ((trace.mc_stderr or 0) / 31) ** 2)
    assert abs(result[""].value - trace.value / 31) < 4 * wide
    assert abs(result[""].value - float(hessian().trace()) / 31) < 4 * (result[""].mc_stderr or 0)
    values = torch.linalg.eigvalsh(hessian())
    assert result["highest"].value == pytest.approx(float(values.max()), abs=1e-8)
    assert result["lowest"].value == pytest.approx(float(values.min()), abs=1e-8)
    near = run_probe("spectrum", mlp(), mc_samples=1, steps=4, kind="gauss_newton")
    assert near["lowest"].value > -1e-9
    assert near[""].mc_stderr is None


@pytest.mark.parametrize("name", QUICK)
def test_a_float32_network_with_batchnorm_is_supported_and_restored(name: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)]
    batches = [Batch(b.x.float(), b.y, b.index) for b in sampled((5, 4), 1, 4, 4)]  # type: ignore[union-attr]
    for training in (False, True):
        net = nn.Sequential(*layers).train(training)
        before = {key: t.clone() for key, t in net.state_dict().items()}
        surface = LossSurface(MemberModule(net), batches)
        result = run_probe(name, surface, **QUICK[name])
        wide = LossSurface(MemberModule(net.double()), [Batch(b.x.double(), b.y, b.index) for b in batches])  # type: ignore[union-attr]
        assert result[""].value == pytest.approx(run_probe(name, wide, **QUICK[name])[""].value, rel=1e-4)
        net.float()
        assert all(torch.equal(t, before[key]) for key, t in net.state_dict().items())
        assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("name", QUICK)
def test_the_draws_depend_only_on_the_seed_of_the_surface(name: str, rng_unchanged: None) -> None:
    state = torch.get_rng_state()
    first, again, other = (run_probe(name, mlp(seed=seed), **QUICK[name]) for seed in (1, 1, 2))
    torch.set_rng_state(state)
    assert first == again
    assert first[""].value != other[""].value


def test_a_product_with_the_hessian_counts_four_passes() -> None:
    make = registry.probe.get
    assert make("trace")(mc_samples=30).passes(1000) == 4 * 30 * 1000
    assert make("gauss_newton_trace")(mc_samples=30).passes(1000) == 2 * 30 * 1000
    assert make("top_eigenvalue")(k=2, steps=50).passes(10) == 4 * 52 * 10
    assert make("spectrum")(mc_samples=2, steps=3).passes(10) == 4 * 6 * 10
    assert not make("spectrum")().default


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("top_eigenvalue", {"k": 5, "steps": 4}, "steps = 4: must be at least 5"),
        ("top_eigenvalue", {"k": 32}, "has only 31 eigenvalues"),
        ("spectrum", {"points": 20}, "points = 20: must be at least 32"),
        ("trace", {"layer": "3"}, "no layer '3' with trained weights"),
    ],
)
def test_invalid_options_are_rejected(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        run_probe(name, mlp(), **options)


def test_ordinal_numbers_have_english_suffixes() -> None:
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 22, 112)] == [
        *("1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "112th")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
def test_a_small_conv_net_agrees_with_curvlinops(kind: Any) -> None:
    pytest.importorskip("curvlinops", reason="curvlinops-for-pytorch is not installed")
    theirs = optional_import("curvlinops", extra="dev")
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 2, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)]
    net, batches = nn.Sequential(*layers).double().eval(), sampled((10, 7), 1, 6, 6)
    operator = theirs.HessianLinearOperator if kind == "hessian" else theirs.GGNLinearOperator
    data = [(batch.x, batch.y) for batch in batches]
    other = operator(net, nn.CrossEntropyLoss(), list(net.parameters()), data)
    surface = LossSurface(MemberModule(net), batches)
    matrix = Curvature(surface, kind=kind)
    v = torch.randn(matrix.size, dtype=torch.float64)
    assert torch.allclose(matrix.product(v), other @ v, atol=1e-12)
    full = other @ torch.eye(matrix.size, dtype=torch.float64)
    name = "top_eigenvalue" if kind == "hessian" else "gauss_newton_eigenvalue"
    top = run_probe(name, surface, steps=60, tolerance=1e-10)[""].value
    assert top == pytest.approx(float(torch.linalg.eigvalsh(full).max()), abs=1e-8)
    result = run_probe("trace" if kind == "hessian" else "gauss_newton_trace", surface)[""]
    assert abs(result.value - float(full.trace())) < 4 * (result.mc_stderr or 0)
