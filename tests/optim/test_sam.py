"""SAM updates against reference implementations, closed forms, and another library."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import corner, make_state, steps
from reference import sam as reference
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.core.method import GradRequest, Method, Objective, StepContext, Update
from plateaux.core.types import Batch, TensorTree
from plateaux.methods.sam import asam, gsam, sam
from plateaux.optim.losses import cross_entropy
from plateaux.optim.sam import count_gradients, groups, min_fraction, plain_gradient, sam_on_subset
from plateaux.optim.sam import gsam as gsam_update
from plateaux.optim.sam import sam as sam_update

LOSS = cross_entropy()


def to_numpy(module: nn.Module) -> reference.Arrays:
    return {name: p.detach().double().numpy().copy() for name, p in module.named_parameters()}


def gradient_of(module: nn.Module, batch: Batch) -> reference.Gradient:
    """Return the gradient of the mean cross entropy as a function of the weights alone."""
    module = copy.deepcopy(module)

    def gradient(w: reference.Arrays) -> reference.Arrays:
        network = copy.deepcopy(module)
        with torch.no_grad():
            for name, p in network.named_parameters():
                p.copy_(torch.from_numpy(w[name]))
        F.cross_entropy(network(batch.x), batch.y).backward()
        return {name: p.grad.numpy() for name, p in network.named_parameters()}  # type: ignore[union-attr]

    return gradient


def sam_reference(w: reference.Arrays, g: reference.Gradient) -> reference.Arrays:
    return reference.perturbed_gradient(w, g, lambda w, g: reference.sam_epsilon(w, g, 0.3))


def asam_reference(w: reference.Arrays, g: reference.Gradient) -> reference.Arrays:
    return reference.perturbed_gradient(w, g, lambda w, g: reference.asam_epsilon(w, g, 0.5, 0.02))


def elementwise_reference(w: reference.Arrays, g: reference.Gradient) -> reference.Arrays:
    return reference.perturbed_gradient(w, g, lambda w, g: reference.elementwise_epsilon(w, g, 2.0))


def gsam_reference(w: reference.Arrays, g: reference.Gradient) -> reference.Arrays:
    return reference.gsam(w, g, lambda w, g: reference.sam_epsilon(w, g, 0.3), 0.4)


def adaptive_gsam_reference(w: reference.Arrays, g: reference.Gradient) -> reference.Arrays:
    return reference.gsam(w, g, lambda w, g: reference.elementwise_epsilon(w, g, 2.0), 0.7)


REFERENCES: dict[str, tuple[Method, Callable[[reference.Arrays, reference.Gradient], reference.Arrays]]] = {
    "sam": (sam(LOSS, rho=0.3), sam_reference),
    "asam": (asam(LOSS, rho=0.5, eta=0.02), asam_reference),
    "asam elementwise": (asam(LOSS, rho=2.0, variant="elementwise"), elementwise_reference),
    "gsam": (gsam(LOSS, rho=0.3, alpha=0.4), gsam_reference),
    "gsam elementwise": (gsam(LOSS, rho=2.0, alpha=0.7, variant="elementwise"), adaptive_gsam_reference),
}


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("net", ["mlp", "conv", "conv_bn"])
@pytest.mark.parametrize("name", REFERENCES)
def test_every_step_equals_the_reference(name: str, net: str, clip: float | None) -> None:
    method, direction = REFERENCES[name]
    module = corner(net).module
    member = make_state(module, method, lr=0.2, momentum=0.9, weight_decay=0.01, max_grad_norm=clip)
    descent, w = reference.Descent(0.2, 0.9, 0.01), to_numpy(module)
    for seed in range(4):
        batch = corner(net, seed=seed).batch
        found = direction(w, gradient_of(module, batch))
        w = descent.step(w, found if clip is None else reference.clipped(found, clip))
        steps(member, [batch])
        for key, value in to_numpy(module).items():
            np.testing.assert_allclose(value, w[key], rtol=0, atol=1e-11)


def test_clipping_applies_only_to_the_final_gradient() -> None:
    # A gradient that is clipped has the maximum norm; the perturbation is not clipped.
    module = corner().module
    before, batch = to_numpy(module), corner().batch
    steps(make_state(module, sam(LOSS, rho=0.3), lr=1.0, max_grad_norm=0.01), [batch])
    moved = {name: before[name] - after for name, after in to_numpy(module).items()}
    sam_gradient = sam_reference(before, gradient_of(corner().module, batch))
    assert reference.length(moved) == pytest.approx(0.01, rel=1e-3)
    assert reference.inner(moved, sam_gradient) == pytest.approx(
        reference.length(moved) * reference.length(sam_gradient), rel=1e-9
    )


ZERO = {
    "sam": sam(LOSS, rho=0.0),
    "sam in groups": sam(LOSS, rho=0.0, m=3),
    "asam": asam(LOSS, rho=0.0),
    "asam elementwise": asam(LOSS, rho=0.0, variant="elementwise"),
    "gsam": gsam(LOSS, rho=0.0),
}


@pytest.mark.parametrize("net", ["mlp", "conv_bn", "dropout"])
@pytest.mark.parametrize("name", ZERO)
def test_sam_with_zero_radius_is_plain_descent_bit_for_bit(name: str, net: str) -> None:
    ends = []
    for method in (ZERO[name], Method(Objective(LOSS), plain_gradient)):
        own = corner(net, dtype=torch.float32)
        steps(make_state(own.module, method, momentum=0.9), [own.batch] * 3)
        ends.append(own.module.state_dict())
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


@pytest.mark.parametrize("name", REFERENCES)
def test_sam_with_a_radius_above_zero_is_not_plain_descent(name: str) -> None:
    ends = []
    for method in (REFERENCES[name][0], Method(Objective(LOSS), plain_gradient)):
        own = corner()
        steps(make_state(own.module, method), [own.batch])
        ends.append(to_numpy(own.module))
    assert max(np.abs(ends[0][key] - ends[1][key]).max() for key in ends[0]) > 1e-4


@pytest.mark.parametrize("m", [1, 3, 8, 100])
def test_m_sharpness_equals_the_reference(m: int) -> None:
    own = corner()
    before = to_numpy(own.module)
    cuts = [slice(start, min(start + m, 8)) for start in range(0, 8, m)]
    gradients = [gradient_of(own.module, own.batch.take(cut)) for cut in cuts]
    shares = [len(range(8)[cut]) / 8 for cut in cuts]
    truth = reference.Descent(0.1).step(before, reference.in_groups(before, gradients, shares, 0.3))
    steps(make_state(own.module, sam(LOSS, rho=0.3, m=m)), [own.batch])
    for key, value in to_numpy(own.module).items():
        np.testing.assert_allclose(value, truth[key], rtol=0, atol=1e-12)


@pytest.mark.parametrize("m", [8, 9, 1000])
@pytest.mark.parametrize("net", ["mlp", "conv_bn", "dropout"])
def test_one_group_as_large_as_the_batch_is_sam_bit_for_bit(net: str, m: int) -> None:
    ends = []
    for method in (sam(LOSS, rho=0.3, m=m), sam(LOSS, rho=0.3)):
        own = corner(net, dtype=torch.float32)
        steps(make_state(own.module, method, momentum=0.9), [own.batch] * 2)
        ends.append(own.module.state_dict())
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_groups_cover_every_sample_once() -> None:
    for size in range(12):
        for m in range(1, 14):
            cuts = groups(size, m)
            assert [i for cut, _ in cuts for i in range(size)[cut]] == list(range(size))
            assert sum(share for _, share in cuts) == pytest.approx(1.0 if size else 0.0)


class Line(nn.Module):
    """A linear model: its squared error is a quadratic."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(start.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.theta[:, None]


def squares(table: Tensor, batch: Batch) -> Tensor:
    """Return half the squared error times the batch size, so that the mean is half the sum of squares."""
    return 0.5 * len(batch.y) * (table[..., 0] - batch.y) ** 2


def test_unnormalized_sam_on_a_quadratic_equals_the_closed_form() -> None:
    # theta_k = theta* + (I - eta W - eta rho W^2)^k (theta_0 - theta*), W = A^T A.
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(6, 4, generator=draw, dtype=torch.float64) / 3
    best, start = (torch.randn(4, generator=draw, dtype=torch.float64) for _ in range(2))
    module = Line(start)
    method = Method(Objective(squares), sam_update(0.4, direction=lambda params, gradient: (gradient, torch.ones(()))))
    batch = Batch(a, a @ best, torch.arange(6))
    steps(make_state(module, method, lr=0.1), [batch] * 7)
    w = a.T @ a
    b = torch.eye(4, dtype=torch.float64) - 0.1 * w - 0.1 * 0.4 * w @ w
    torch.testing.assert_close(module.theta.detach(), best + torch.matrix_power(b, 7) @ (start - best))


def test_sam_on_a_parabola_equals_the_closed_form() -> None:
    # Far from the minimum, f = h x^2 / 2: x_k = (1 - lr h)^k (x_0 + rho) - rho.
    h, lr, rho, start = 2.0, 0.05, 0.3, 5.0
    module = Line(torch.tensor([start], dtype=torch.float64))
    one = torch.full((1, 1), h**0.5, dtype=torch.float64)
    batch = Batch(one, torch.zeros(1, dtype=torch.float64), torch.arange(1))
    steps(make_state(module, Method(Objective(squares), sam_update(rho)), lr=lr), [batch] * 9)
    assert float(module.theta.detach()) == pytest.approx((1 - lr * h) ** 9 * (start + rho) - rho, rel=1e-12)


@pytest.mark.slow
def test_sam_agrees_with_another_library() -> None:
    from pytorch_optimizer import SAM

    ours, theirs = corner("conv", dtype=torch.float32).module, corner("conv", dtype=torch.float32).module
    member = make_state(ours, sam(LOSS, rho=0.2), lr=0.1, momentum=0.9, weight_decay=0.01)
    other = SAM(theirs.parameters(), torch.optim.SGD, rho=0.2, lr=0.1, momentum=0.9, weight_decay=0.01)
    for seed in range(5):
        batch = corner("conv", dtype=torch.float32, seed=seed).batch
        steps(member, [batch])
        for pass_over in (other.first_step, other.second_step):
            F.cross_entropy(theirs(batch.x), batch.y).backward()
            pass_over(zero_grad=True)
        for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-6)


def trace(update: Update, *, lr: float = 0.1) -> list[GradRequest]:
    """Return the requests of an update if all gradients are equal."""
    params: TensorTree = {"w": torch.zeros(2)}
    steps_of_update = update(params, StepContext(4, lr, peak_lr=0.1))
    requests = [next(steps_of_update)]
    try:
        while True:
            requests.append(steps_of_update.send({"w": torch.tensor([3.0, 4.0])}))
    except StopIteration:
        return requests


@pytest.mark.parametrize("lr", [0.1, 0.055, 0.01])
def test_the_radius_of_gsam_follows_the_learning_rate(lr: float) -> None:
    second = trace(gsam_update(0.5, alpha=0.4, rho_min=0.1, lr_min=0.01), lr=lr)[1]
    assert second.at is not None
    assert float(second.at["w"].norm()) == pytest.approx(reference.gsam_radius(0.5, 0.1, lr, 0.1, 0.01), rel=1e-6)


def test_gsam_without_rho_min_has_a_constant_radius() -> None:
    second = trace(gsam(LOSS, rho=0.5).update, lr=0.001)[1]
    assert second.at is not None
    assert float(second.at["w"].norm()) == pytest.approx(0.5, rel=1e-6)


def test_gsam_with_alpha_zero_is_sam() -> None:
    ends = []
    for method in (gsam(LOSS, rho=0.3, alpha=0.0), sam(LOSS, rho=0.3)):
        own = corner()
        steps(make_state(own.module, method), [own.batch] * 2)
        ends.append(to_numpy(own.module))
    assert all(np.array_equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_a_zero_gradient_gives_no_perturbation() -> None:
    for update in (sam(LOSS).update, asam(LOSS).update, asam(LOSS, variant="elementwise").update, gsam(LOSS).update):
        params: TensorTree = {"weight": torch.ones(2)}
        steps_of_update = update(params, StepContext(4, 0.1, 0.1))
        next(steps_of_update)
        second = steps_of_update.send({"weight": torch.zeros(2)})
        assert second.at is not None
        assert torch.equal(second.at["weight"], params["weight"])
        with pytest.raises(StopIteration) as end:
            steps_of_update.send({"weight": torch.zeros(2)})
        assert torch.equal(end.value.value["weight"], torch.zeros(2))


def test_the_variants_of_asam_scale_biases_differently() -> None:
    params: TensorTree = {"layer.weight": torch.tensor([1.0, -2.0]), "layer.bias": torch.tensor([3.0])}
    gradient: TensorTree = {"layer.weight": torch.tensor([1.0, 1.0]), "layer.bias": torch.tensor([1.0])}
    found = {}
    for variant in ("published", "elementwise"):
        steps_of_update = asam(LOSS, rho=1.0, variant=variant, eta=0.0).update(params, StepContext(4, 0.1, 0.1))
        next(steps_of_update)
        at = steps_of_update.send(gradient).at
        assert at is not None
        found[variant] = {name: at[name] - params[name] for name in params}
    assert float(found["published"]["layer.bias"]) == pytest.approx(1 / 6**0.5)  # T = (1, 2, 1)
    assert float(found["elementwise"]["layer.bias"]) == pytest.approx(9 / 14**0.5)  # T = (1, 2, 3)


def test_count_gradients_returns_the_number_of_gradients_of_an_update() -> None:
    updates = (plain_gradient, sam_update(0.0), sam_update(0.1), sam_update(0.1, m=3))
    assert [count_gradients(update, 8) for update in updates] == [1, 1, 2, 6]
    assert count_gradients(gsam(LOSS).update, 8) == 2


def test_per_worker_perturbations_use_the_local_gradient_only_for_the_perturbation() -> None:
    assert [request.local for request in trace(sam_update(0.1, perturbation="per_worker"))] == [True, False]
    assert [request.local for request in trace(sam_update(0.1))] == [False, False]


# --- SharpBalance


def sharpbalance_reference(module: nn.Module, batch: Batch, chosen: Tensor, rho: float) -> dict[str, Tensor]:
    """Return the SharpBalance gradient by definition: one part of the batch at a time, on copies of the network."""

    def summed(net: nn.Module, rows: Tensor) -> dict[str, Tensor]:
        net.zero_grad()
        if rows.any():
            F.cross_entropy(net(batch.x[rows]), batch.y[rows], reduction="sum").backward()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in net.named_parameters()}

    flat = summed(copy.deepcopy(module), ~chosen)
    there = copy.deepcopy(module)
    up = {name: tensor / len(batch) for name, tensor in summed(copy.deepcopy(module), chosen).items()}
    length = sum(float(g.square().sum()) for g in up.values()) ** 0.5
    with torch.no_grad():
        for name, p in there.named_parameters():
            p.add_(up[name] * (rho / (length + 1e-12)))
    steep = summed(there, chosen)
    return {name: (flat[name] + steep[name]) / len(batch) for name in flat}


CHOSEN = torch.tensor([True, False, False, True, True, False, True, False])


@pytest.mark.parametrize("net", ["mlp", "conv"])
@pytest.mark.parametrize(
    "chosen",
    [CHOSEN, ~CHOSEN, CHOSEN & (torch.arange(8) < 4), CHOSEN | (torch.arange(8) < 5), CHOSEN & False, CHOSEN | True],
    ids=["half", "rest", "quarter", "three quarters", "none", "all"],
)
def test_a_sharpbalance_step_equals_its_definition(net: str, chosen: Tensor) -> None:
    own = corner(net)
    method = Method(Objective(LOSS), sam_on_subset(sam_update(0.3), warmup=plain_gradient))
    member = make_state(own.module, method, lr=1.0)
    member.sam_set = lambda index: chosen[index]
    before = {name: p.detach().clone() for name, p in own.module.named_parameters()}
    batch = replace(own.batch, index=torch.arange(len(own.batch)))
    wanted = sharpbalance_reference(own.module, batch, chosen, 0.3)
    steps(member, [batch])
    for name, p in own.module.named_parameters():
        assert torch.allclose(before[name] - p.detach(), wanted[name], rtol=0, atol=1e-13), name


@pytest.mark.parametrize("accumulate", [1, 3])
def test_batchnorm_is_updated_by_both_parts_of_a_batch(accumulate: int) -> None:
    own = corner("conv_bn")
    method = Method(Objective(LOSS), sam_on_subset(sam_update(0.3), warmup=plain_gradient))
    member = make_state(own.module, method)
    member.sam_set = lambda index: CHOSEN[index]
    steps(member, [replace(own.batch, index=torch.arange(8))], gradient_accumulation_steps=accumulate)
    # Each part has four samples. With three accumulation steps, it is split into two micro-batches of two samples.
    assert int(own.module.state_dict()["0.1.num_batches_tracked"]) == 2 * (1 if accumulate == 1 else 2)


@pytest.mark.parametrize("lone", ["sam", "plain"])
@pytest.mark.parametrize("size", [2, 8])
def test_a_part_of_one_sample_is_merged_into_the_other_part(lone: str, size: int) -> None:
    """BatchNorm1d cannot train on one sample."""
    chosen = (torch.arange(size) == 1) if lone == "sam" else (torch.arange(size) != 1)
    joined = chosen & False if lone == "sam" or size == 2 else chosen | True
    data = torch.randn(size, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = Batch(data, torch.arange(size) % 3, torch.arange(size))
    found = []
    for sam_set in (chosen, joined):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
        method = Method(Objective(LOSS), sam_on_subset(sam_update(0.3), warmup=plain_gradient))
        member = make_state(module, method)
        member.sam_set = lambda index, sam_set=sam_set: sam_set[index]
        steps(member, [batch])
        found.append(module.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(("size", "share"), [(8, 1.0), (4, 0.5), (2, 0.25)])
def test_the_minimum_size_of_a_part_counts_the_samples_of_all_processes(size: int, share: float) -> None:
    smallest = min_fraction(nn.BatchNorm1d(2), size, share=share)
    assert 1 / 8 < smallest < 2 / 8
    assert min_fraction(nn.Linear(2, 2), size, share=share) < 1e-6


def test_loss_and_accuracy_count_every_sample_once() -> None:
    own = corner("mlp")
    batch = replace(own.batch, index=torch.arange(8))
    loss = float(F.cross_entropy(own.module(batch.x), batch.y).detach())
    right = int((own.module(batch.x).argmax(-1) == batch.y).sum())
    method = Method(Objective(LOSS), sam_on_subset(sam_update(0.3), warmup=plain_gradient))
    member = make_state(own.module, method)
    member.sam_set = lambda index: CHOSEN[index]
    (stats,) = steps(member, [batch])
    assert float(stats.loss) == pytest.approx(loss)
    assert int(stats.correct) == right


@pytest.mark.parametrize("name", ["sam", "asam", "gsam"])
def test_before_the_data_partition_sharpbalance_applies_sam_to_all_samples(name: str) -> None:
    from plateaux.methods.sharpbalance import sharpbalance

    build = {"sam": sam, "asam": asam, "gsam": gsam}[name]
    ends = []
    for method in (sharpbalance(LOSS, epochs=2, rho=0.3, sam_variant=name), build(LOSS, rho=0.3)):  # type: ignore[arg-type]
        own = corner("mlp")
        steps(make_state(own.module, method), [own.batch])
        ends.append(own.module.state_dict())
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_a_dry_run_of_an_update_that_divides_by_the_norm_of_the_gradient_succeeds() -> None:
    def normalized(params: TensorTree, context: StepContext) -> Generator[GradRequest, TensorTree, TensorTree]:
        gradient = yield GradRequest()
        size = float(gradient["weight"].norm())
        return {name: tensor / (1 / (1 / size)) for name, tensor in gradient.items()}

    assert count_gradients(normalized, 8) == 1


@pytest.mark.parametrize("reply", ["missing", "not a request", 1 / 3])
def test_an_update_that_fails_in_a_dry_run_is_reported(reply: object) -> None:
    def broken(params: TensorTree, context: StepContext) -> Generator[GradRequest, TensorTree, TensorTree]:
        gradient = yield GradRequest() if reply == "missing" else reply  # type: ignore[misc]
        return {"weight": gradient["head.weight" if reply == "missing" else "weight"]}

    with pytest.raises(RecipeError, match="The update of this method failed in a dry run with one parameter"):
        count_gradients(broken, 8)
