"""Soups compared with closed forms: linear models, convex and double-well losses, BatchNorm on known data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import swa_utils

from plateaux.core.errors import DataError, RecipeError
from plateaux.core.types import TensorTree
from plateaux.ensembles.soup_weights import GreedySoup, Interpolation, check_barrier, greedy, interpolate, uniform
from plateaux.models.modes import update_bn

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def tree(seed: int, dtype: torch.dtype = torch.float32) -> TensorTree:
    chance = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(5, 3, generator=chance, dtype=torch.float64).to(dtype),
        "scale": torch.randn((), generator=chance, dtype=torch.float64).to(dtype),
        "seen": torch.tensor(10 + seed),
    }


def bits(a: TensorTree) -> dict[str, bytes]:
    return {name: t.reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in a.items()}


# The mean of weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 49])
def test_a_soup_of_equal_networks_is_that_network_bit_for_bit(dtype: torch.dtype, count: int) -> None:
    one = tree(0, dtype)
    one["edge"] = torch.tensor([0.0, -0.0, 0.1, torch.finfo(dtype).max, torch.finfo(dtype).tiny], dtype=dtype)
    assert bits(uniform([one] * count)) == bits(one)
    assert bits(uniform([one] * count, [(1 + i) * 2 / (count * (count + 1)) for i in range(count)])) == bits(one)


@given(seed=st.integers(0, 99), count=st.integers(1, 6), dtype=st.sampled_from(DTYPES))
@settings(max_examples=40)
def test_a_soup_is_the_float64_mean_converted_back(seed: int, count: int, dtype: torch.dtype) -> None:
    trees = [tree(seed + i, dtype) for i in range(count)]
    weights = np.arange(1, count + 1) / np.arange(1, count + 1).sum()
    for found, parts in ((uniform(trees), np.full(count, 1 / count)), (uniform(trees, weights.tolist()), weights)):
        for name in ("weight", "scale"):
            wide = sum(part * t[name].double().numpy() for part, t in zip(parts, trees, strict=True))
            assert found[name].dtype == dtype
            step = torch.finfo(dtype).eps
            np.testing.assert_allclose(found[name].double().numpy(), wide, rtol=step, atol=1e-15)
        assert found["seen"] == trees[0]["seen"]


@given(seed=st.integers(0, 99), order=st.permutations(range(4)))
@settings(max_examples=20)
def test_the_order_of_networks_does_not_matter(seed: int, order: list[int]) -> None:
    trees = [tree(seed + i, torch.float64) for i in range(4)]
    a, b = uniform(trees), uniform([trees[i] for i in order])
    torch.testing.assert_close(a["weight"], b["weight"], rtol=1e-14, atol=1e-15)


def test_half_precision_is_summed_in_float64() -> None:
    # In float16 the running sum 2048 + 1 + 1 + ... stays where it is.
    trees = [{"w": torch.tensor([2048.0], dtype=torch.float16)}] + [{"w": torch.ones(1, dtype=torch.float16)}] * 2047
    assert uniform(trees)["w"].item() == pytest.approx((2048 + 2047) / 2048, rel=1e-3)
    large = {"w": torch.tensor([6e4], dtype=torch.float16)}  # two of them are more than float16 can hold
    assert torch.equal(uniform([large, large])["w"], large["w"])


def test_a_network_with_weight_zero_has_no_effect() -> None:
    broken = {**tree(0), "weight": torch.full((5, 3), math.nan)}
    found = uniform([broken, tree(1)], [0.0, 1.0])
    assert bits(found) == bits(tree(1))  # its counter neither


def test_the_soup_of_linear_models_predicts_the_mean_of_their_predictions() -> None:
    models = [nn.Linear(4, 3).double() for _ in range(5)]
    x = torch.randn(20, 4, dtype=torch.float64)
    soup = functional_call(models[0], uniform([dict(model.state_dict()) for model in models]), (x,))
    torch.testing.assert_close(soup, torch.stack([model(x) for model in models]).mean(0))


def test_a_soup_shares_no_memory_or_autograd_graph_with_its_inputs() -> None:
    part = {"w": torch.ones(3, requires_grad=True), "n": torch.tensor(3)}
    for found in (uniform([part]), uniform([part, part])):
        assert not found["w"].requires_grad
        found["w"].zero_()
        found["n"].zero_()
        assert part["w"].sum().item() == part["n"].item() == 3


def test_complex_weights_have_a_mean_too() -> None:
    trees = [{"w": torch.tensor([1 + 2j, 4j])}, {"w": torch.tensor([3 + 0j, 2 + 0j])}]
    assert torch.equal(uniform(trees)["w"], torch.tensor([2 + 1j, 1 + 2j]))


def test_boolean_masks_must_be_equal() -> None:
    a, b = ({"w_mask": torch.tensor(bits_)} for bits_ in ([True, False], [True, True]))
    assert torch.equal(uniform([a, a])["w_mask"], a["w_mask"])
    with pytest.raises(RecipeError, match=r"'w_mask' differs.*has no mean"):
        uniform([a, b])


def test_networks_with_different_tensors_are_rejected_with_the_difference() -> None:
    one = tree(0)
    with pytest.raises(RecipeError, match=r"'extra' is only in network 1\. "):
        uniform([one, {**tree(1), "extra": torch.zeros(1)}])
    with pytest.raises(RecipeError, match="'scale' is only in network 0, and 2 more differ"):
        uniform([one, {"weight": one["weight"], "unknown": one["scale"]}])
    with pytest.raises(RecipeError, match=r"'weight' is \(5, 3\).*\(3, 5\).*in network 2"):
        uniform([one, tree(1), {**tree(2), "weight": torch.zeros(3, 5)}])
    with pytest.raises(RecipeError, match=r"float32 in network 0, and \(\) of torch.float64"):
        uniform([one, {**tree(1), "scale": torch.tensor(1.0, dtype=torch.float64)}])
    with pytest.raises(RecipeError, match="no networks"):
        uniform([])
    with pytest.raises(RecipeError, match="sum to 1"):
        uniform([one, one], [0.5, 0.6])


# The greedy soup


def nearness(target: Tensor) -> Callable[[TensorTree], float]:
    """A held-out score that is higher the nearer the weights are to a target."""
    return lambda weights: -float((weights["w"].double() - target).square().sum())


def reference(
    trees: list[TensorTree], score: Callable[[TensorTree], float], *, or_equal: bool
) -> tuple[list[int], Tensor]:
    """The slow reference, by the running mean n/(n+1)."""
    order = sorted(range(len(trees)), key=lambda i: (-score(trees[i]), i))
    chosen, mean = [order[0]], trees[order[0]]["w"].double()
    best = score({"w": mean})
    for i in order[1:]:
        n = len(chosen)
        tried = mean * (n / (n + 1)) + trees[i]["w"].double() / (n + 1)
        found = score({"w": tried})
        if found > best or (or_equal and found == best):
            chosen, mean, best = [*chosen, i], tried, found
    return chosen, mean


@given(seed=st.integers(0, 999), count=st.integers(1, 7), accept=st.sampled_from(["better", "as good"]))
@settings(max_examples=60)
def test_a_greedy_soup_equals_the_reference_and_is_never_below_the_best_network(
    seed: int, count: int, accept: str
) -> None:
    chance = torch.Generator().manual_seed(seed)
    trees = [{"w": torch.randn(3, generator=chance, dtype=torch.float64)} for _ in range(count)]
    score = nearness(0.3 * torch.randn(3, generator=chance, dtype=torch.float64))
    found = greedy(trees, score, accept=accept)  # type: ignore[arg-type]
    chosen, mean = reference(trees, score, or_equal=accept == "as good")
    assert list(found.chosen) == chosen
    soup = uniform(trees, found.weights)
    torch.testing.assert_close(soup["w"], mean)
    assert score(soup) == found.score >= max(score(each) for each in trees)
    assert found.alone == tuple(score(each) for each in trees)
    assert sorted(found.order) == list(range(count))
    assert found.chosen[0] == found.order[0]


def test_in_float32_the_weights_reproduce_exactly_the_scored_soup() -> None:
    judged: list[TensorTree] = []

    def score(weights: TensorTree) -> float:
        judged.append(weights)
        return nearness(torch.zeros(50, dtype=torch.float64))(weights)

    trees = [{"w": torch.randn(50)} for _ in range(6)]
    found = greedy(trees, score)
    assert len(found.chosen) > 2
    last = judged[6 - 1 + found.order.index(found.chosen[-1])]
    assert bits(uniform(trees, found.weights)) == bits(last)


def test_equally_good_networks_are_added_only_with_accept_as_good() -> None:
    trees = [{"w": torch.tensor([value])} for value in (1.0, 1.0, 5.0)]
    steps = lambda weights: float(weights["w"] < 3)  # noqa: E731
    assert greedy(trees, steps) == GreedySoup((0, 1, 2), (0,), (1.0, 1.0, 0.0), (1.0, 1.0, 0.0), (1.0, 0.0, 0.0))
    more = greedy(trees, steps, accept="as good")
    assert more.chosen == (0, 1, 2)
    assert more.weights == pytest.approx([1 / 3] * 3)


def test_among_equally_good_networks_the_first_is_tried_first() -> None:
    trees = [{"w": torch.tensor([value])} for value in (3.0, 1.0, 1.0, 2.0)]
    assert greedy(trees, lambda w: -float(w["w"])).order == (1, 2, 3, 0)


def test_a_network_that_makes_the_score_nan_is_not_added() -> None:
    trees = [{"w": torch.tensor([value])} for value in (1.0, 3.0)]
    found = greedy(trees, lambda w: math.nan if float(w["w"]) == 2 else float(w["w"]))
    assert found.chosen == (1,)
    assert math.isnan(found.scores[1])
    assert found.score == 3


def test_invalid_greedy_soup_inputs_are_rejected() -> None:
    with pytest.raises(RecipeError, match=r"network 1 is NaN\. Remove"):
        greedy([tree(0), tree(1)], lambda w: math.nan if bits(w) == bits(tree(1)) else 0.0)
    with pytest.raises(RecipeError, match="no networks"):
        greedy([], lambda w: 0.0)
    with pytest.raises(RecipeError, match="allowed: 'better', 'as good'"):
        greedy([tree(0)], lambda w: 0.0, accept="equal")  # type: ignore[arg-type]


# The straight line between two networks


def test_a_convex_loss_has_no_barrier() -> None:
    for seed in range(20):
        a, b = tree(seed, torch.float64), tree(seed + 50, torch.float64)
        bowl = interpolate(a, b, lambda w: float(w["weight"].square().sum()))
        assert bowl.barrier <= 0
        assert bowl.losses[5] < (bowl.losses[0] + bowl.losses[-1]) / 2


def test_a_double_well_has_the_barrier_of_its_closed_form() -> None:
    a, b = ({"w": torch.tensor([value], dtype=torch.float64)} for value in (-1.0, 1.0))
    well = interpolate(a, b, lambda w: float((w["w"] ** 2 - 1) ** 2))
    assert well.at == pytest.approx([i / 10 for i in range(11)])
    assert well.losses == pytest.approx([((2 * t - 1) ** 2 - 1) ** 2 for t in well.at])
    assert well.barrier == pytest.approx(1.0)
    tilted = interpolate(a, b, lambda w: float((w["w"] ** 2 - 1) ** 2 + 7 * w["w"]), points=21)
    assert tilted.barrier == pytest.approx(1.0)  # what the ends differ by is no barrier


def test_the_ends_of_an_interpolation_are_the_networks() -> None:
    evaluated: list[TensorTree] = []
    interpolate(tree(0), tree(1), lambda w: float(len(evaluated)) if evaluated.append(w) is None else 0.0, points=2)
    assert [bits(end) for end in evaluated] == [bits(tree(0)), bits(tree(1))]


def test_a_nan_loss_does_not_pass_as_a_low_barrier() -> None:
    assert math.isnan(Interpolation((0.0, 0.5, 1.0), (1.0, math.nan, 1.0)).barrier)
    assert Interpolation((0.0, 0.5, 1.0), (1.0, math.inf, 1.0)).barrier == math.inf
    with pytest.raises(RecipeError, match="at least 2 points"):
        interpolate(tree(0), tree(1), lambda w: 0.0, points=1)


def test_networks_with_different_initializations_need_a_low_barrier() -> None:
    check_barrier(5.0, 0.1, True)
    check_barrier(0.05, 0.1, False)
    check_barrier(0.0, 0.0, False)
    for barrier in (0.2, math.nan, math.inf):
        with pytest.raises(RecipeError, match=r"different initializations.*Combine their predictions"):
            check_barrier(barrier, 0.1, False)


# BatchNorm


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm1d(4, momentum=0.3), nn.Linear(4, 3), nn.ReLU(), nn.BatchNorm1d(3), nn.Linear(3, 2)
    )


def test_statistics_are_the_closed_form_of_the_data() -> None:
    module, data = net(), 3 * torch.randn(6, 32, 4) + 1
    module[0].running_mean.fill_(9)
    update_bn(module, data)
    rows = data.double().numpy()
    np.testing.assert_allclose(module[0].running_mean.numpy(), rows.reshape(-1, 4).mean(0), rtol=1e-5)
    np.testing.assert_allclose(module[0].running_var.numpy(), rows.var(1, ddof=1).mean(0), rtol=1e-5)
    assert module[0].num_batches_tracked == 6


def test_one_batch_gives_the_statistics_of_its_samples_at_every_depth() -> None:
    module, x = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), torch.randn(5, 2, 6, 6)
    update_bn(module, [x])
    rows = module[0](x).detach().movedim(1, -1).reshape(-1, 3)
    torch.testing.assert_close(module[1].running_mean, rows.mean(0))
    torch.testing.assert_close(module[1].running_var, rows.var(0))


@pytest.mark.parametrize("sizes", [(16, 16), (16, 16, 5), (2,)])
def test_without_dropout_it_equals_torchs_update_bn(sizes: tuple[int, ...]) -> None:
    ours, theirs = net(), net()
    theirs.load_state_dict(ours.state_dict())
    batches = [torch.randn(size, 4) for size in sizes]
    update_bn(ours, batches)
    swa_utils.update_bn(batches, theirs)
    assert bits(dict(ours.state_dict())) == bits(dict(theirs.state_dict()))


@pytest.mark.parametrize("fails", [False, True])
def test_modes_and_momenta_are_restored_even_if_a_batch_fails(fails: bool) -> None:
    module = net().train()
    module[0].eval()
    module[2].eval()
    modes, momenta = [part.training for part in module.modules()], [module[0].momentum, module[3].momentum]
    batches = [torch.randn(8, 4), torch.randn(8, 5 if fails else 4)]
    if fails:
        with pytest.raises(RuntimeError):
            update_bn(module, batches)
    else:
        update_bn(module, batches)
    assert [part.training for part in module.modules()] == modes
    assert [module[0].momentum, module[3].momentum] == momenta == [0.3, 0.1]
    assert all(p.grad is None and p.requires_grad for p in module.parameters())


@pytest.mark.usefixtures("rng_unchanged")
def test_dropout_is_off_during_update_bn() -> None:
    dropping, x = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4)).train(), torch.arange(24.0).view(6, 4)
    update_bn(dropping, [x])
    torch.testing.assert_close(dropping[1].running_mean, x.mean(0))


def test_dict_inputs_are_supported() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, *, pixels: Tensor) -> Tensor:
            out: Tensor = self.norm(pixels)
            return out

    module, x = Named(), torch.randn(6, 4)
    update_bn(module, iter([{"pixels": x}]))
    torch.testing.assert_close(module.norm.running_mean, x.mean(0))


def test_an_empty_list_of_batches_is_rejected_and_nothing_is_reset() -> None:
    module = net()
    module(torch.randn(8, 4))
    before = bits(dict(module.state_dict()))
    with pytest.raises(DataError, match="no batches"):
        update_bn(module, [])
    assert bits(dict(module.state_dict())) == before


@pytest.mark.parametrize(
    "module", [nn.Linear(4, 2), nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False)], ids=lambda m: str(m)
)
def test_a_network_without_running_statistics_is_unchanged(module: nn.Module) -> None:
    def never() -> Iterator[Tensor]:
        raise AssertionError("a batch was read")
        yield

    before = bits(dict(module.state_dict()))
    update_bn(module, never())
    assert bits(dict(module.state_dict())) == before


def test_a_soup_with_batchnorm_needs_update_bn() -> None:
    # Two networks of opposite sign: the mean of their means of activations is right by accident, of variances is not.
    data = torch.randn(4, 64, 4)
    parts = []
    for sign in (1.0, -1.0):
        module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        with torch.no_grad():
            module[0].weight.copy_(sign * torch.ones(3, 4) + torch.randn(3, 4) / 10)
        update_bn(module, data)
        parts.append(dict(module.state_dict()))
    soup = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    soup.load_state_dict(uniform(parts))
    stale = soup[1].running_var.clone()
    update_bn(soup, data)
    assert (stale > 10 * soup[1].running_var).all()
    spread = soup.eval()(data.flatten(0, 1)).var(0)
    torch.testing.assert_close(spread, torch.ones(3), rtol=0.1, atol=0)
