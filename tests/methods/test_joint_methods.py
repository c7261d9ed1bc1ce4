"""Joint methods against reference implementations; inactive members; unlabeled samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import GIVEN, NETS, distance, make_state, recipe, trained
from reference import joint as reference
from torch import Tensor, nn

from plateaux.config.builders.data import build_data, build_loader, build_training_data, train_val_split
from plateaux.config.builders.model import build_member
from plateaux.config.builders.training import build_method
from plateaux.config.components import Components
from plateaux.config.experiment import Experiment
from plateaux.core.errors import DataError, RecipeError
from plateaux.core.member import MemberModule
from plateaux.core.method import Method, Objective
from plateaux.core.types import Batch, derive_seed
from plateaux.data.loader import MemberLoader, cyclic_indices
from plateaux.data.sources import InMemorySource, UnlabeledData, from_tensors
from plateaux.distributed.executors.local import SINGLE_PROCESS, local
from plateaux.methods.a2d import a2d
from plateaux.methods.divdis import divdis
from plateaux.methods.sed import random_members, sed
from plateaux.optim import losses
from plateaux.optim.losses import cross_entropy, disagreement, l1_distance, mutual_information, sample_hardness
from plateaux.optim.sam import get_update, trace_requests
from plateaux.storage.run import Run
from plateaux.storage.run_info import UnlabeledInfo
from plateaux.training.loop.setup import build_train_states, shared_lr_schedulers
from plateaux.training.loop.state import INACTIVE, StepOptions
from plateaux.training.loop.step import step
from plateaux.training.recipe_rules import check
from plateaux.training.train import train

CPU = torch.device("cpu")
LOSS = cross_entropy()
ON, MODES = ("unlabeled", "labeled", "both"), ("joint", "sequential")
A2D = [{"diversity_weight": 0.7, "disagree_on": on, "training": mode} for on in ON for mode in MODES]
DIVDIS = [
    {
        "diversity_weight": 3.0,
        "regularizer_weight": 2.0,
        "disagree_on": on,
        "diversity": mode,
        "regularizer": name,
        "class_ratio": shares,
    }
    for on, mode, name, shares in [
        ("unlabeled", "mi", "kl_backward", ()),
        ("unlabeled", "mi", "kl_forward", ()),
        ("labeled", "mi", "entropy", ()),
        ("both", "l1", "kl_backward", ()),
        ("unlabeled", "l1", "ratio", (0.2, 0.5, 0.3)),
    ]
]
SED = [{"diversity_weight": 0.6, "floor": 1e-3}, {"diversity_weight": 0.6, "floor": 5.0}]
WRITTEN = [(a2d, reference.a2d, options) for options in A2D]
WRITTEN += [(divdis, reference.divdis, options) for options in DIVDIS]
WRITTEN += [(partial(sed, members_per_step="all"), reference.sed, options) for options in SED]


def problem(
    rows: int = 3, size: int = 4, unlabeled: int = 3, classes: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Batch]:
    draw = torch.Generator().manual_seed(5)
    y = torch.randint(classes, (size,), generator=draw)
    table = 2 * torch.randn(rows, size + unlabeled, classes, generator=draw, dtype=torch.float64)
    return table.to(dtype), Batch(torch.zeros(size, 1), y, torch.arange(size))


def loss_and_gradient(
    make: Callable[..., Method], options: dict[str, Any], table: Tensor, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Return the losses, and the gradient of what a step descends."""
    objective = make(LOSS, **options).objective
    table = (table if objective.extra_inputs else table[:, : len(batch)]).clone().requires_grad_()
    found = objective.loss(table, batch)
    (gradient,) = torch.autograd.grad(found.mean(1).sum(), table)
    return found.detach(), gradient


def label_of(value: Any) -> str:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else ""


@pytest.mark.parametrize(("make", "slow", "options"), WRITTEN, ids=label_of)
def test_losses_and_gradients_equal_the_reference(make, slow, options) -> None:
    table, batch = problem(unlabeled=3 if make is not WRITTEN[-1][0] else 0)
    if not make(LOSS, **options).objective.extra_inputs:
        table = table[:, : len(batch)]
    found, gradient = loss_and_gradient(make, options, table, batch)
    plain, labels = table.tolist(), batch.y.tolist()
    truth = slow(plain, plain, labels, **options)
    torch.testing.assert_close(found, torch.tensor(truth, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    slopes = reference.slopes(lambda moved: slow(moved, plain, labels, **options), plain)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("make", "slow", "options"), WRITTEN, ids=label_of)
def test_probabilities_of_exactly_zero_and_one_give_finite_losses_and_gradients(
    make, slow, options, dtype: torch.dtype
) -> None:
    table, batch = problem(dtype=dtype)
    sure = 1e4 * torch.nn.functional.one_hot(table.argmax(-1), 3).to(dtype)
    assert set(sure.softmax(-1).unique().tolist()) == {0.0, 1.0}
    for rows in (sure, sure[:1].expand(3, -1, -1), torch.cat([sure[:2], table[2:]])):
        for each in loss_and_gradient(make, options, rows.contiguous(), batch):
            assert each.isfinite().all()


def test_the_a2d_loss_is_zero_if_members_are_certain_of_different_classes() -> None:
    different = torch.eye(3, dtype=torch.float64)[:, None]  # three members, each certain of a different class
    others = ~torch.eye(3, dtype=torch.bool)
    assert disagreement(different)[others].abs().max() < 1e-6
    agreeing = torch.eye(3, dtype=torch.float64)[:1, None].expand(3, -1, -1)
    assert disagreement(agreeing)[others].min() == pytest.approx(-math.log(1e-7))
    drawn_at_random = problem()[0].softmax(-1)
    assert disagreement(drawn_at_random)[others].min() > -1e-6


def test_members_with_constant_predictions_have_no_mutual_information() -> None:
    constant = problem(rows=4, size=1, unlabeled=0)[0].softmax(-1).expand(-1, 9, -1)
    assert mutual_information(constant).abs().max() < 1e-14
    one_constant = torch.cat([constant[:1, :9], problem(rows=1, size=9, unlabeled=0)[0].softmax(-1)])
    assert mutual_information(one_constant).abs().max() < 1e-14


def test_members_that_always_agree_have_maximal_mutual_information() -> None:
    sure = torch.eye(5, dtype=torch.float64).expand(2, -1, -1)
    torch.testing.assert_close(mutual_information(sure)[0, 1], torch.tensor(math.log(5), dtype=torch.float64))
    assert l1_distance(sure)[0, 1] == 0
    assert l1_distance(torch.stack([sure[0], sure[0].roll(1, 0)]))[0, 1] == -2


def test_mutual_information_does_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(rows=5)[0].softmax(-1)
    whole = mutual_information(p)
    monkeypatch.setattr(losses, "MAX_JOINT_ENTRIES", 2 * 9)  # two pairs at a time
    torch.testing.assert_close(mutual_information(p), whole, rtol=0, atol=1e-15)
    assert mutual_information(p[:1]).tolist() == [[0.0]]


def test_the_mean_hardness_is_the_inverse_of_the_mean_loss_above_the_floor() -> None:
    table, batch = problem(unlabeled=0)
    alike = torch.nn.functional.cross_entropy(table.mean(0), batch.y)
    assert sample_hardness(table, batch, floor=1e-3).mean() == pytest.approx(float(1 / alike))
    fitted = 1e4 * torch.nn.functional.one_hot(batch.y, 3).double().expand(3, -1, -1)
    assert sample_hardness(fitted, batch, floor=1e-3).tolist() == [0.0] * 4
    nearly = 12 * torch.nn.functional.one_hot(batch.y, 3).double().expand(3, -1, -1)
    alpha = sample_hardness(nearly, batch, floor=1e-3)
    assert 0 < alpha.max() < 100  # without the floor: 80,000
    assert not sample_hardness(table.requires_grad_(), batch, floor=1e-3).requires_grad


@pytest.mark.parametrize("mode", ["joint", "sequential"])
def test_a2d_with_zero_diversity_weight_is_a_deep_ensemble_on_the_same_batches(mode: str, tmp_path: Path) -> None:
    weak = {"method": {"diversity_weight": 0.0, "training": mode}}
    mine = trained(recipe("a2d", "conv_bn", **weak), tmp_path / "weak")
    alone = trained(recipe("deep_ensemble", "conv_bn", data={"shuffle": "shared"}), tmp_path / "alone")
    assert distance(mine, alone) == 0  # BatchNorm's statistics too: unlabeled samples have no effect


def test_the_first_member_of_sequential_a2d_equals_that_of_a_deep_ensemble(tmp_path: Path) -> None:
    mine = trained(recipe("a2d, sequential", "mlp"), tmp_path / "mine")
    alone = trained(recipe("deep_ensemble", "mlp", data={"shuffle": "shared"}), tmp_path / "alone")
    assert distance(mine[:1], alone[:1]) == 0
    assert distance(mine[1:2], alone[1:2]) > 1e-4


def test_a2d_makes_members_disagree_on_unlabeled_samples(tmp_path: Path) -> None:
    found = {}
    for strength in (0.0, 3.0):
        row = recipe("a2d", samples=120, batch=20, method={"diversity_weight": strength}, train={"epochs": 15})
        run = train(row, tmp_path / str(strength), **GIVEN.keywords())
        data = build_training_data(row, GIVEN)
        x, _ = data.unlabeled.source.fetch(data.unlabeled.ids)
        rows = []
        for number in range(3):
            module = build_member(row, data, number, GIVEN)
            module.load_state_dict(run.weights(number))
            rows.append(module(x).argmax(-1))
        found[strength] = float((rows[0] != rows[1]).float().mean())
    assert found[3.0] > found[0.0]


# Active and inactive members.


def heads(count: int, method: Method) -> list[Any]:
    made = []
    for number in range(count):
        module = nn.Linear(2, 3).double()
        nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(number))
        one = make_state(module, method, number=number)
        one.optimizer = torch.optim.AdamW(one.params.values(), lr=0.1, weight_decay=0.5)
        made.append(one)
    return made


def points(number: int = 0, size: int = 6) -> Batch:
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(size, 2, generator=draw, dtype=torch.float64)
    return Batch(x, torch.randint(3, (size,), generator=draw), torch.arange(size), seed=derive_seed("points", number))


def state(one: Any) -> list[Tensor]:
    held = [value for slots in one.optimizer.state.values() for value in slots.values()]
    return [each.detach().clone() for each in [*one.params.values(), *held]]


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_inactive_members_run_no_forward_pass_and_do_not_change(mode: str) -> None:
    method = sed(LOSS, update="sam", rho=0.1)
    members = heads(5, method)
    ran: list[int] = []
    for one in members:
        one.module.register_forward_hook(lambda *_, number=one.number: ran.append(number))
    executor = local(mode=mode)
    for number in range(6):
        batch = points(number)
        chosen = random_members(2)(5, batch.seed)
        before = [state(one) for one in members]
        ran.clear()
        stats_per_member = step(executor, members, [batch] * 5, StepOptions())
        assert [i for i, stats in enumerate(stats_per_member) if stats is not INACTIVE] == chosen
        assert mode == "vmap" or ran == chosen * 2  # at the current and at the perturbed weights
        for i, one in enumerate(members):
            now = state(one)
            same = len(now) == len(before[i]) and all(map(torch.equal, now, before[i]))
            assert same == (i not in chosen)
            assert all(param.grad is None for param in one.params.values())


def test_every_member_is_active_equally_often() -> None:
    counts = Counter(i for number in range(3000) for i in random_members(2)(6, derive_seed("step", number)))
    assert sorted(counts) == list(range(6))
    assert all(abs(count - 1000) < 5 * math.sqrt(3000 * (1 / 3) * (2 / 3)) for count in counts.values())
    assert random_members(4)(3, 1) == [0, 1, 2]


def by_hand(row: Any) -> list[dict[str, Tensor]]:
    """Train SED with a custom loop: draw active members, apply the formula with autograd, advance all schedulers."""
    data = build_data(row, GIVEN)
    ids, _ = train_val_split(row, data)
    feed = build_loader(row, data, 0, shared=True, device=CPU, ids=ids)
    modules = [build_member(row, data, number, GIVEN) for number in range(row.members)]
    optimizers = [
        torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.1)
        for module, lr in zip(modules, row.optimizer.lr, strict=True)
    ]
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=feed.steps() * row.train.epochs) for o in optimizers
    ]
    for epoch in range(row.train.epochs):
        for batch in feed.epoch(epoch):
            chosen = random_members(2)(row.members, batch.seed)
            logits = {i: modules[i](batch.x) for i in chosen}
            log_p = {i: logits[i].log_softmax(-1) for i in chosen}
            hard = torch.nn.functional.cross_entropy(sum(logits.values()) / 2, batch.y, reduction="none").detach()
            alpha = hard / max(float(hard.mean()), 1e-3) ** 2
            total = torch.zeros((), dtype=torch.float64)
            for mine, other in (chosen, chosen[::-1]):
                p, q = log_p[other].exp(), log_p[mine].exp()
                y = p.argmax(-1, keepdim=True)
                p, q = p.gather(1, y)[:, 0], q.gather(1, y)[:, 0]
                pair = -(p * (1 - q) + q * (1 - p) + 1e-7).log()
                total = total - log_p[mine].gather(1, batch.y[:, None]).mean() + 0.5 * (alpha * pair).mean()
            for i in chosen:
                optimizers[i].zero_grad()
            total.backward()
            for i in chosen:
                optimizers[i].step()
            for schedule, optimizer in zip(schedules, optimizers, strict=True):
                optimizer._opt_called = True
                schedule.step()
    return [{name: each.detach() for name, each in module.state_dict().items()} for module in modules]


def inactive_recipe(**sections: Any) -> Any:
    optimizer = {"name": "AdamW", "lr": [0.05, 0.1, 0.1, 0.02], "weight_decay": 0.1}
    row = recipe("sed", "mlp", precision="fp64", members=4, train={"epochs": 3, "precision": "fp64"}).to_dict()
    return type(recipe()).from_dict({**row, "optimizer": optimizer, **sections})


def test_training_with_inactive_members_equals_a_custom_loop(tmp_path: Path) -> None:
    row = inactive_recipe()
    assert distance(trained(row, tmp_path / "run"), by_hand(row)) < 1e-12


def test_a_scheduler_by_epochs_also_advances_for_inactive_members(tmp_path: Path) -> None:
    row = inactive_recipe(lr_scheduler=[{"name": "step", "step_size": 1, "gamma": 0.5}], run={"log_every": 1})
    run = train(row, tmp_path / "run", **GIVEN.keywords())
    lines = [line for number in range(4) for line in run.log(number) if "lr" in line]
    assert lines
    firsts = row.optimizer.lr
    for number in range(4):
        for line in run.log(number):
            if "lr" in line:
                assert line["lr"] == firsts[number] * 0.5 ** line["epoch"]


def test_members_share_a_scheduler_if_their_learning_rates_are_equal() -> None:
    row = inactive_recipe()
    made = build_train_states(
        Experiment(row, GIVEN), build_data(row, GIVEN), range(4), SINGLE_PROCESS, device=CPU, steps=3
    )
    assert len(shared_lr_schedulers(made)) == 3
    assert made[1].shared_lr_scheduler is made[2].shared_lr_scheduler
    plain = inactive_recipe(lr_scheduler=[])
    assert (
        shared_lr_schedulers(
            build_train_states(
                Experiment(plain, GIVEN), build_data(plain, GIVEN), [0, 1], SINGLE_PROCESS, device=CPU, steps=3
            )
        )
        == ()
    )


def test_random_pairs_of_two_members_equal_all_members(tmp_path: Path) -> None:
    pair = trained(recipe("sed", "mlp", members=2), tmp_path / "pair")
    everyone = trained(recipe("sed", "mlp", members=2, method={"members_per_step": "all"}), tmp_path / "all")
    assert distance(pair, everyone) == 0


def test_a_member_that_was_never_active_logs_no_loss(tmp_path: Path) -> None:
    row = recipe("sed", "mlp", members=9, samples=7, train={"epochs": 1}, run={"log_every": 1})
    run = train(row, tmp_path / "run", **GIVEN.keywords())
    is_active = ["train loss" in run.log(number)[-1] for number in range(9)]
    assert sum(is_active) == 2
    assert all(progress.finished for progress in run.all_progress())


def test_no_member_may_be_active_and_unknown_members_are_rejected() -> None:
    inactive = Method(Objective(LOSS, gather="members", active=lambda members, key: []))
    members = heads(2, inactive)
    before = [state(one) for one in members]
    assert step(SINGLE_PROCESS, members, [points()] * 2, StepOptions()) == [INACTIVE] * 2
    for one, held in zip(members, before, strict=True):
        assert all(map(torch.equal, state(one), held))
    unknown = Method(Objective(LOSS, gather="members", active=lambda members, key: [0, 2]))
    with pytest.raises(RecipeError, match=r"active members \[0, 2\]; valid members are 0 to 1"):
        step(SINGLE_PROCESS, heads(2, unknown), [points()] * 2, StepOptions())


def test_independent_members_may_be_inactive() -> None:
    one_by_one = Method(Objective(LOSS, active=lambda members, key: [key % members]))
    members = heads(3, one_by_one)
    found = [step(SINGLE_PROCESS, members, [replace(points(), seed=number)] * 3, StepOptions()) for number in range(3)]
    assert [[stats is not INACTIVE for stats in stats_per_member] for stats_per_member in found] == torch.eye(
        3
    ).bool().tolist()


# Unlabeled samples.


def test_cyclic_indices_contain_every_sample_once_per_pass() -> None:
    ids = torch.arange(10, 17)
    row = torch.cat([cyclic_indices(ids, start, 5, 3) for start in range(0, 70, 5)])
    for start in range(0, 70, 7):
        assert sorted(row[start : start + 7].tolist()) == ids.tolist()
    assert not torch.equal(row[:7], row[7:14])
    assert torch.equal(cyclic_indices(ids, 12, 20, 3), row[12:32])  # more than a pass at once


def feed(**options: Any) -> MemberLoader:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (11, 3, 4, 4), dtype=torch.uint8, generator=draw)
    other = InMemorySource(x[:9].flip(0), torch.zeros(9, dtype=torch.int64))
    defaults: dict[str, Any] = {
        "batch_size": 4,
        "seed": 1,
        "classes": 2,
        "mean": (0.5,) * 3,
        "std": (0.25,) * 3,
        "unlabeled_batch_size": 3,
    }
    defaults["unlabeled"] = UnlabeledData("other", other, torch.tensor([0, 2, 4, 6, 8]))
    return MemberLoader(InMemorySource(x, torch.arange(11) % 2), torch.arange(11), **{**defaults, **options})


def test_unlabeled_samples_are_normalized_like_the_training_data() -> None:
    own = feed()
    rows = [each for epoch in range(5) for batch in own.epoch(epoch) for each in batch.extra["unlabeled"]]
    assert len(rows) == 5 * 3 * 3
    source = own.unlabeled.source.x.float() / 255
    known = {i: (source[i] - 0.5) / 0.25 for i in own.unlabeled.ids.tolist()}
    counts = Counter(i for row in rows for i, each in known.items() if torch.allclose(row, each, atol=1e-6))
    assert counts == dict.fromkeys([0, 2, 4, 6, 8], 9)


def test_resuming_in_the_middle_of_an_epoch_gives_the_same_unlabeled_samples() -> None:
    whole = [batch.extra["unlabeled"] for batch in feed().epoch(2)]
    rest = [batch.extra["unlabeled"] for batch in feed().epoch(2, start=1)]
    assert all(map(torch.equal, whole[1:], rest))
    assert not torch.equal(whole[0], whole[1])


def test_the_shards_of_a_batch_concatenate_to_its_unlabeled_samples() -> None:
    whole = [batch.extra["unlabeled"] for batch in feed().epoch(0)]
    halves = [list(feed().epoch(0, shard=lambda n, i=i: slice(n * i // 2, n * (i + 1) // 2))) for i in range(2)]
    for both, left, right in zip(whole, *halves, strict=True):
        assert torch.equal(both, torch.cat([left.extra["unlabeled"], right.extra["unlabeled"]]))


def test_a_batch_without_unlabeled_samples_has_no_extra_inputs() -> None:
    assert all(batch.extra == {} for batch in feed(unlabeled=None).epoch(0))


def test_the_run_stores_the_ids_of_its_unlabeled_samples(tmp_path: Path) -> None:
    row = recipe("a2d")
    facts = train(row, tmp_path / "run", **GIVEN.keywords()).info.data.unlabeled
    extra = build_training_data(row, GIVEN).unlabeled
    assert facts == UnlabeledInfo("spirals", extra.source.fingerprint(), tuple(extra.ids.tolist()))
    assert len(set(facts.ids)) == 13
    assert list(facts.ids) == sorted(facts.ids)
    assert facts == Run.open(tmp_path / "run").info.data.unlabeled
    assert build_training_data(row.replaced(seed=8), GIVEN).unlabeled.ids.tolist() != list(facts.ids)


def test_a_name_without_a_count_selects_all_samples_and_a_test_only_data_set_its_test_samples() -> None:
    row = recipe("a2d", "conv", data={"unlabeled": "cases:static"})
    assert build_training_data(row, GIVEN).unlabeled.ids.tolist() == list(range(17))
    only_test = recipe(
        "a2d", "conv", data={"unlabeled": "tests.methods.test_joint_methods:data_without_training_images@3"}
    )
    found = build_training_data(only_test, Components(trust=("cases", "tests.methods.test_joint_methods"))).unlabeled
    assert len(found.source) == 5
    assert len(found.ids) == 3


def data_without_training_images() -> Any:
    """Return five test images and no training images."""
    x = torch.zeros(5, 2, 6, 6)
    return from_tensors((x[:0], torch.zeros(0, dtype=torch.int64)), (x, torch.zeros(5, dtype=torch.int64)), classes=1)


def test_unlabeled_samples_can_be_passed_in_python(tmp_path: Path) -> None:
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    components = replace(GIVEN, unlabeled=InMemorySource(x, torch.zeros(6, dtype=torch.int64)))
    row = recipe("deep_ensemble", method={"name": "a2d"})
    run = train(row, tmp_path / "run", **components.keywords())
    assert run.info.data.unlabeled.ids == tuple(range(6))


@pytest.mark.parametrize(
    ("unlabeled", "message"),
    [
        (None, r"'a2d' needs unlabeled samples: set data.unlabeled"),
        ("spirals@1001", "count from 1 to 1000"),
        ("spirals@0", "count from 1 to 1000"),
        ("spirals@many", "write name@count"),
        ("cases:static@5", r"shape \[2, 6, 6\], but 'blobs' has shape \[2\]"),
    ],
)
def test_unlabeled_samples_that_cannot_be_loaded_are_rejected(
    unlabeled: str | None, message: str, tmp_path: Path
) -> None:
    tree = recipe("a2d").to_dict()
    tree["data"] = {**tree["data"], "unlabeled": unlabeled} if unlabeled else {"name": "blobs"}
    with pytest.raises(RecipeError, match=message):
        train(type(recipe()).from_dict(tree), tmp_path / "run", **GIVEN.keywords())
    assert not (tmp_path / "run").exists()


def test_unused_unlabeled_samples_give_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="does not use unlabeled samples"):
        check(Experiment(recipe("deep_ensemble", data={"unlabeled": "spirals@5"}), GIVEN))


def test_an_empty_unlabeled_set_is_rejected() -> None:
    nothing = UnlabeledData(
        "none", InMemorySource(torch.zeros(2, 3, 4, 4), torch.zeros(2)), torch.zeros(0, dtype=torch.int64)
    )
    with pytest.raises(DataError, match="no training samples"):
        feed(unlabeled=nothing)


def test_call_preserving_buffers_changes_no_buffers() -> None:
    row = recipe("deep_ensemble", "conv_bn")
    module = build_member(row, build_data(row, GIVEN), 0, GIVEN).train()
    x = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    buffers = dict(module.named_buffers())
    before = {name: each.clone() for name, each in buffers.items()}
    out = MemberModule(module, buffers=buffers).call_preserving_buffers(x)
    assert all(torch.equal(before[name], each) for name, each in buffers.items())
    assert torch.equal(
        out, MemberModule(module, buffers=buffers)(x)
    )  # with the statistics of these samples all the same
    assert not all(torch.equal(before[name], each) for name, each in buffers.items())
    compiled = torch.compile(module, backend="eager")
    now = {name: each.clone() for name, each in buffers.items()}
    assert torch.equal(MemberModule(compiled, buffers=buffers).call_preserving_buffers(x), out)
    assert all(torch.equal(now[name], each) for name, each in buffers.items())


# Options.


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("sed", {"members_per_step": 1}, "compares pairs of members"),
        ("sed", {"floor": 0.0}, "set a value above 0"),
        ("sed", {"rho": 0.1, "update": "plain"}, "has no effect with method.update = 'plain'"),
        ("divdis", {"regularizer": "ratio"}, "it needs the share of every class"),
        ("divdis", {"class_ratio": [0.5, 0.5]}, "only 'ratio' uses class_ratio"),
        ("a2d", {"diversity_weight": [0.1, 0.2, 0.3]}, "only rho may differ"),
        ("a2d", {"disagree_on": "nowhere"}, "disagree_on = 'nowhere'"),
    ],
)
def test_invalid_options_are_rejected(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check(Experiment(recipe(method, method=options), GIVEN))


@pytest.mark.parametrize("method", ["a2d", "divdis", "sed"])
def test_losses_of_full_batches_reject_gradient_accumulation(method: str) -> None:
    with pytest.raises(
        RecipeError, match=r"needs full batches for its loss, so optimizer\.gradient_accumulation_steps must be 1"
    ):
        check(Experiment(recipe(method, optimizer={"gradient_accumulation_steps": 2}), GIVEN))


def test_a2d_on_labeled_samples_supports_gradient_accumulation(tmp_path: Path) -> None:
    row = partial(recipe, "a2d on labelled, climbing", precision="fp64")
    pieces = trained(row(optimizer={"gradient_accumulation_steps": 3}), tmp_path / "pieces")
    assert distance(pieces, trained(row(), tmp_path / "whole")) < 1e-12


@pytest.mark.parametrize(("name", "gradients"), [("plain", 1), ("sam", 2), ("asam", 2), ("gsam", 2)])
def test_every_joint_method_supports_every_update(name: Any, gradients: int) -> None:
    assert len(trace_requests(get_update(name), 4)) == gradients
    for method in ("a2d", "divdis", "sed"):
        made = build_method(recipe(method, method={"update": name}), 0, GIVEN)
        assert len(trace_requests(made.update, 4)) == gradients


def test_members_of_a_joint_method_may_have_different_rho() -> None:
    row = recipe("sed", method={"update": "sam", "rho": [0.1, 0.2, 0.3]})
    assert check(Experiment(row, GIVEN))


def test_every_network_of_the_case_table_has_unlabeled_samples() -> None:
    assert all("@" in net.unlabelled for net in NETS.values())
