"""Alarm scores against slow twins and closed forms; what they must be for one member, and that they heed the data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp, softmax
from scipy.stats import entropy as scipy_entropy
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.core.types import Estimate
from plateaux.ensembles.ood_scores import DEFINITION, OOD_SCORES, compare

NAMES = list(OOD_SCORES)
DIVERSITY = ["mutual_information", "pds", "variance"]


def table_of(members: int, samples: int, classes: int, *, seed: int = 0, scale: float = 2.0) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return scale * torch.randn(members, samples, classes, generator=chance, dtype=torch.float64)


def twin(name: str, logits: np.ndarray) -> float:  # type: ignore[type-arg]
    """The slow twin of a score for one sample `[M, C]`."""
    p = softmax(logits, axis=1)
    mean = p.mean(0)
    if name == "max_probability":
        return float(-mean.max())
    if name == "entropy":
        return float(scipy_entropy(mean))
    if name == "mutual_information":
        return float(scipy_entropy(mean) - np.mean([scipy_entropy(row) for row in p]))
    if name == "pds":
        return float(sum(max(row[c] for row in p) for c in range(p.shape[1])))
    if name == "variance":
        return float(p.var(0, ddof=1 if len(p) > 1 else 0).sum())
    if name == "energy":
        return float(-np.mean([logsumexp(row) for row in logits]))
    return float(-logits.mean(0).max())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("members", "samples", "classes"), [(1, 9, 4), (2, 1, 2), (3, 20, 10), (5, 7, 100), (4, 6, 1)])
def test_every_score_is_what_its_slow_twin_says(name: str, members: int, samples: int, classes: int) -> None:
    table = table_of(members, samples, classes)
    found = OOD_SCORES[name](table)
    assert found.shape == (samples,)
    assert found.dtype == torch.float64
    for i in range(samples):
        assert float(found[i]) == pytest.approx(twin(name, table[:, i].numpy()), rel=1e-10, abs=1e-13)


def test_scores_of_members_that_are_each_sure_of_another_class() -> None:
    table = torch.full((3, 1, 5), -1e4, dtype=torch.float64)
    for m in range(3):
        table[m, 0, m] = 1e4
    found = {name: float(alarm(table)) for name, alarm in OOD_SCORES.items()}
    assert found == pytest.approx(
        {
            "max_probability": -1 / 3,
            "entropy": math.log(3),
            "mutual_information": math.log(3),
            "pds": 3.0,
            "variance": 3 * (1 / 3),  # 0, 0, 1: variance 1/3 by M - 1, in three classes
            "energy": -1e4,
            "max_logit": 1e4 / 3,
        }
    )


@pytest.mark.parametrize("members", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_members_that_agree_differ_by_exactly_nothing(members: int, dtype: torch.dtype) -> None:
    table = table_of(1, 200, 10).to(dtype).expand(members, -1, -1)
    assert OOD_SCORES["mutual_information"](table).unique().tolist() == [0.0]
    assert OOD_SCORES["variance"](table).unique().tolist() == [0.0]
    assert OOD_SCORES["pds"](table).unique().tolist() == [1.0]
    for name in ("max_probability", "entropy", "energy", "max_logit"):
        assert torch.allclose(OOD_SCORES[name](table), OOD_SCORES[name](table[:1]), rtol=1e-12)


def test_members_that_all_but_agree_have_no_negative_information() -> None:
    table = table_of(1, 2000, 10) + 1e-9 * table_of(3, 2000, 10, seed=1)
    assert (OOD_SCORES["mutual_information"](table) >= 0).all()


@pytest.mark.parametrize("name", DIVERSITY)
def test_diversity_of_one_member_tells_nothing_apart(name: str) -> None:
    inside, outside = OOD_SCORES[name](table_of(1, 50, 10)), OOD_SCORES[name](table_of(1, 40, 10, seed=1, scale=0.1))
    assert compare({name: inside.numpy()}, {name: outside.numpy()})[name]["auroc"] == Estimate(0.5, 0.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("logit", [-math.inf, -1e4])
def test_a_class_that_nobody_gives_a_chance_changes_nothing(name: str, logit: float) -> None:
    table = table_of(3, 8, 4)
    wider = torch.cat([table, torch.full((3, 8, 2), logit, dtype=torch.float64)], -1)
    assert torch.allclose(OOD_SCORES[name](wider), OOD_SCORES[name](table), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_logits_that_are_nan_give_scores_that_are_nan(name: str) -> None:
    table = table_of(2, 3, 4)
    table[1, 1, 2] = math.nan
    assert OOD_SCORES[name](table).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_of_few_digits_are_scored_in_many(name: str, dtype: torch.dtype) -> None:
    table = table_of(3, 50, 10, scale=4.0).to(dtype)
    assert torch.equal(OOD_SCORES[name](table), OOD_SCORES[name](table.double()))


def test_confident_samples_are_no_ties() -> None:
    # In float32 both have probability 1.
    table = torch.tensor([[[20.0, 0.0], [25.0, 0.0]]])
    surer = OOD_SCORES["max_probability"](table)
    assert surer[1] < surer[0]


def test_no_sample_feels_the_others_of_its_batch() -> None:
    # The mutual information published with SED takes off the batch's mean of the entropies.
    table = table_of(3, 12, 5)
    for alarm in OOD_SCORES.values():
        assert torch.allclose(alarm(table)[:4], alarm(table[:, :4]), rtol=1e-12, atol=1e-15)
        assert alarm(table[:, :0]).shape == (0,)


@given(
    members=st.integers(1, 5), samples=st.integers(1, 8), classes=st.integers(1, 6), seed=st.integers(0, 99),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]), data=st.data(),
)  # fmt: skip
@settings(deadline=None, max_examples=80)
def test_scores_stay_in_their_range_and_do_not_heed_the_order_of_members(
    members: int, samples: int, classes: int, seed: int, scale: float, data: st.DataObject
) -> None:
    table = table_of(members, samples, classes, seed=seed, scale=scale)
    order = data.draw(st.permutations(range(members)))
    found = {name: alarm(table) for name, alarm in OOD_SCORES.items()}
    for name, alarm in OOD_SCORES.items():
        assert torch.allclose(alarm(table[order]), found[name], rtol=1e-9, atol=1e-12), name
    slack = 1e-12
    assert ((found["max_probability"] >= -1 - slack) & (found["max_probability"] <= -1 / classes + slack)).all()
    assert ((found["entropy"] >= -slack) & (found["entropy"] <= math.log(classes) + slack)).all()
    assert (found["mutual_information"] >= 0).all()
    assert (found["mutual_information"] <= found["entropy"] + slack).all()
    assert (found["mutual_information"] <= math.log(members) + slack).all()
    assert ((found["pds"] >= 1) & (found["pds"] <= min(members, classes) + slack)).all()
    assert (found["variance"] >= 0).all()


def scored(table: Tensor) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    return {name: alarm(table).numpy() for name, alarm in OOD_SCORES.items()}


def test_compare_says_of_every_score_how_well_it_does() -> None:
    inside, outside = table_of(3, 200, 10, scale=4.0), table_of(3, 150, 10, seed=1, scale=0.5)
    found = compare(scored(inside), scored(outside))
    assert list(found) == NAMES
    y = np.repeat([0, 1], [200, 150])
    for name, numbers in found.items():
        assert list(numbers) == ["auroc", "aupr out", "aupr in", "fpr95"]
        both = np.concatenate([OOD_SCORES[name](inside).numpy(), OOD_SCORES[name](outside).numpy()])
        assert numbers["auroc"].value == pytest.approx(roc_auc_score(y, both))
        assert numbers["aupr out"].value == pytest.approx(average_precision_score(y, both))
        assert numbers["aupr in"].value == pytest.approx(average_precision_score(1 - y, -both))
        assert numbers["fpr95"].value == pytest.approx(np.mean(both[:200] >= np.sort(both[200:])[150 - 143]))
        assert all(value.stderr is not None for value in numbers.values())
    for name in ("max_probability", "entropy", "energy", "max_logit"):  # outside logits are small: larger scores
        assert found[name]["auroc"].value > 0.95


def test_what_is_outside_changes_the_numbers() -> None:
    # A pipeline of a peer reported its inside entropy as the outside one for a long time.
    inside, near, far = table_of(3, 200, 10, scale=4.0), table_of(3, 200, 10, seed=1, scale=3.0), table_of(3, 200, 10)
    here, there = compare(scored(inside), scored(near)), compare(scored(inside), scored(far))
    assert all(here[name]["auroc"] != there[name]["auroc"] for name in NAMES)
    assert all(numbers["auroc"].value == 0.5 for numbers in compare(scored(inside), scored(inside)).values())


def test_scores_that_do_not_match_or_are_no_numbers_are_refused() -> None:
    one = {"entropy": np.ones(3)}
    with pytest.raises(ValueError, match=r"\['entropy'\].*\['energy'\]"):
        compare(one, {"energy": np.ones(3)})
    with pytest.raises(DataError, match="entropy is no number for 1 of 2 outside samples"):
        compare(one, {"entropy": np.array([1.0, math.nan])})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(4, 3), (0, 4, 3), (2, 4, 0)])
def test_what_is_no_table_of_logits_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="members, samples, classes"):
        OOD_SCORES[name](torch.zeros(shape))


def test_the_convention_says_which_samples_are_positive() -> None:
    assert "out of distribution is the positive class" in DEFINITION
    assert "\n" not in DEFINITION
