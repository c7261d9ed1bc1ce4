"""OOD scores compared with slow references and closed forms, and their properties."""

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


def reference(name: str, logits: np.ndarray) -> float:  # type: ignore[type-arg]
    """The slow reference of a score for one sample `[M, C]`."""
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
def test_every_score_equals_its_reference(name: str, members: int, samples: int, classes: int) -> None:
    logits = table_of(members, samples, classes)
    found = OOD_SCORES[name](logits)
    assert found.shape == (samples,)
    assert found.dtype == torch.float64
    for i in range(samples):
        assert float(found[i]) == pytest.approx(reference(name, logits[:, i].numpy()), rel=1e-10, abs=1e-13)


def test_scores_of_members_confident_in_different_classes() -> None:
    logits = torch.full((3, 1, 5), -1e4, dtype=torch.float64)
    for m in range(3):
        logits[m, 0, m] = 1e4
    found = {name: float(score_name(logits)) for name, score_name in OOD_SCORES.items()}
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
def test_diversity_scores_of_equal_members_are_exact(members: int, dtype: torch.dtype) -> None:
    logits = table_of(1, 200, 10).to(dtype).expand(members, -1, -1)
    assert OOD_SCORES["mutual_information"](logits).unique().tolist() == [0.0]
    assert OOD_SCORES["variance"](logits).unique().tolist() == [0.0]
    assert OOD_SCORES["pds"](logits).unique().tolist() == [1.0]
    for name in ("max_probability", "entropy", "energy", "max_logit"):
        assert torch.allclose(OOD_SCORES[name](logits), OOD_SCORES[name](logits[:1]), rtol=1e-12)


def test_mutual_information_of_nearly_equal_members_is_not_negative() -> None:
    logits = table_of(1, 2000, 10) + 1e-9 * table_of(3, 2000, 10, seed=1)
    assert (OOD_SCORES["mutual_information"](logits) >= 0).all()


@pytest.mark.parametrize("name", DIVERSITY)
def test_diversity_scores_of_a_single_member_are_constant(name: str) -> None:
    inside, outside = OOD_SCORES[name](table_of(1, 50, 10)), OOD_SCORES[name](table_of(1, 40, 10, seed=1, scale=0.1))
    assert compare({name: inside.numpy()}, {name: outside.numpy()})[name]["auroc"] == Estimate(0.5, 0.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("logit", [-math.inf, -1e4])
def test_a_class_with_probability_zero_changes_nothing(name: str, logit: float) -> None:
    logits = table_of(3, 8, 4)
    wider = torch.cat([logits, torch.full((3, 8, 2), logit, dtype=torch.float64)], -1)
    assert torch.allclose(OOD_SCORES[name](wider), OOD_SCORES[name](logits), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_nan_logits_give_nan_scores(name: str) -> None:
    logits = table_of(2, 3, 4)
    logits[1, 1, 2] = math.nan
    assert OOD_SCORES[name](logits).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_logits_are_scored_in_float64(name: str, dtype: torch.dtype) -> None:
    logits = table_of(3, 50, 10, scale=4.0).to(dtype)
    assert torch.equal(OOD_SCORES[name](logits), OOD_SCORES[name](logits.double()))


def test_confident_samples_are_not_tied() -> None:
    # In float32 both have probability 1.
    logits = torch.tensor([[[20.0, 0.0], [25.0, 0.0]]])
    surer = OOD_SCORES["max_probability"](logits)
    assert surer[1] < surer[0]


def test_the_output_of_a_sample_does_not_depend_on_its_batch() -> None:
    # The mutual information published with SED takes off the batch's mean of the entropies.
    logits = table_of(3, 12, 5)
    for score_name in OOD_SCORES.values():
        assert torch.allclose(score_name(logits)[:4], score_name(logits[:, :4]), rtol=1e-12, atol=1e-15)
        assert score_name(logits[:, :0]).shape == (0,)


@given(
    members=st.integers(1, 5), samples=st.integers(1, 8), classes=st.integers(1, 6), seed=st.integers(0, 99),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]), data=st.data(),
)  # fmt: skip
@settings(max_examples=80)
def test_scores_are_in_range_and_independent_of_member_order(
    members: int, samples: int, classes: int, seed: int, scale: float, data: st.DataObject
) -> None:
    logits = table_of(members, samples, classes, seed=seed, scale=scale)
    order = data.draw(st.permutations(range(members)))
    found = {name: score_name(logits) for name, score_name in OOD_SCORES.items()}
    for name, score_name in OOD_SCORES.items():
        assert torch.allclose(score_name(logits[order]), found[name], rtol=1e-9, atol=1e-12), name
    slack = 1e-12
    assert ((found["max_probability"] >= -1 - slack) & (found["max_probability"] <= -1 / classes + slack)).all()
    assert ((found["entropy"] >= -slack) & (found["entropy"] <= math.log(classes) + slack)).all()
    assert (found["mutual_information"] >= 0).all()
    assert (found["mutual_information"] <= found["entropy"] + slack).all()
    assert (found["mutual_information"] <= math.log(members) + slack).all()
    assert ((found["pds"] >= 1) & (found["pds"] <= min(members, classes) + slack)).all()
    assert (found["variance"] >= 0).all()


def scored(logits: Tensor) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    return {name: score_name(logits).numpy() for name, score_name in OOD_SCORES.items()}


def test_compare_returns_all_metrics_of_every_score() -> None:
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


def test_out_of_distribution_samples_change_the_metrics() -> None:
    # A pipeline of a peer reported its inside entropy as the outside one for a long time.
    inside, near, far = table_of(3, 200, 10, scale=4.0), table_of(3, 200, 10, seed=1, scale=3.0), table_of(3, 200, 10)
    here, there = compare(scored(inside), scored(near)), compare(scored(inside), scored(far))
    assert all(here[name]["auroc"] != there[name]["auroc"] for name in NAMES)
    assert all(numbers["auroc"].value == 0.5 for numbers in compare(scored(inside), scored(inside)).values())


def test_mismatched_or_nan_scores_are_rejected() -> None:
    one = {"entropy": np.ones(3)}
    with pytest.raises(ValueError, match=r"\['entropy'\].*\['energy'\]"):
        compare(one, {"energy": np.ones(3)})
    with pytest.raises(DataError, match="entropy is NaN for 1 of 2 out-of-distribution samples"):
        compare(one, {"entropy": np.array([1.0, math.nan])})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(4, 3), (0, 4, 3), (2, 4, 0)])
def test_inputs_that_are_not_logits_are_rejected(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="members, samples, classes"):
        OOD_SCORES[name](torch.zeros(shape))


def test_the_definition_states_the_positive_class() -> None:
    assert "out of distribution is the positive class" in DEFINITION
    assert "\n" not in DEFINITION
