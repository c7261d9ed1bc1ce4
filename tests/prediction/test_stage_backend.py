"""A predictor with a cascade runs each member only on the remaining inputs, and gives the answers of `predict`."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from digit_runs import SMALL_MLP, train_digits
from torch import nn

from plateaux.core.errors import RecipeError
from plateaux.deploy.load_predictor import load_predictor
from plateaux.deploy.predict import predict
from plateaux.ensembles.answers import Answers, AnswerSettings, answer_by_members
from plateaux.ensembles.cascade import Cascade
from plateaux.ensembles.ensemble import Ensemble
from plateaux.prediction.calibration import calibrate
from plateaux.prediction.load import ModuleBackend

pytestmark = pytest.mark.xdist_group("deployed_cascade")  # one worker trains the run once


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = train_digits(tmp_path_factory.mktemp("run"), members=4, epochs=3, model=SMALL_MLP)
    calibrate(out, cascade={"max_harm": 0.05}, target_risk=0.1)
    return out


class Counting(nn.Module):
    """A member that counts the rows it was given, and returns fixed logits by the number in the input."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)
        self.rows: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(x))
        return self.table[x[:, 0].long()]


def test_a_predictor_with_a_cascade_gives_the_answers_of_predict(run: Path, images: torch.Tensor) -> None:
    found, expected = load_predictor(run)(images), predict(run, split="test")
    assert found.members_queried is not None
    assert expected.members_queried is not None
    assert found.members_queried.tolist() == expected.members_queried.tolist()
    assert len(set(found.members_queried.tolist())) > 1
    assert found.label.tolist() == expected.label.tolist()
    assert np.allclose(found.probabilities, expected.probabilities, atol=1e-5)
    assert np.allclose(found.ood_score, expected.ood_score, atol=1e-5)
    assert np.allclose(found.uncertainty.mutual_information, expected.uncertainty.mutual_information, atol=1e-5)
    assert found.prediction_set is not None
    assert expected.prediction_set is not None
    assert int((found.prediction_set != expected.prediction_set).sum()) <= 1
    assert np.array_equal(found.abstain, expected.abstain)
    record = found.to_records()[0]
    assert record["members_queried"] == found.members_queried[0]


def test_batches_threads_and_single_inputs_give_equal_answers(run: Path, images: torch.Tensor) -> None:
    predictor = load_predictor(run)
    whole = predictor(images)
    assert whole.members_queried is not None
    parts = load_predictor(run, max_batch=7)(images)
    assert np.array_equal(parts.members_queried, whole.members_queried)
    assert np.allclose(parts.probabilities, whole.probabilities, atol=1e-6)
    with ThreadPoolExecutor(4) as pool:
        singles = list(pool.map(predictor, images[:40]))
    assert [int(one.members_queried[0]) for one in singles if one.members_queried is not None] == [
        *whole.members_queried[:40]
    ]


def test_members_run_only_on_inputs_that_no_earlier_stage_answered() -> None:
    sure, other, unsure = [8.0, 0.0, 0.0], [0.0, 8.0, 0.0], [0.5, 0.0, 0.0]
    # Input 0: members 0 and 1 agree. Input 1: they disagree, so no later stage agrees. Input 2: never sure enough.
    # Input 3: unsure after two members, sure after three.
    tables = [
        [sure, sure, unsure, [1.5, 0.0, 0.0]],
        [sure, other, unsure, [1.5, 0.0, 0.0]],
        [sure, sure, unsure, [9.0, 0.0, 0.0]],
        [sure, sure, unsure, sure],
    ]
    members = [Counting(torch.tensor(table)) for table in tables]
    cascade = Cascade(4, (2, 3), 0.7, "harm", 0.01, 0.9, 1000, 0, 2.0)
    x = np.array([[0.0], [1.0], [2.0], [3.0], [0.0]], dtype=np.float32)
    settings = AnswerSettings("variance", cascade=cascade)
    backend = ModuleBackend(Ensemble(members), settings)
    found = backend({"x": x})
    assert found["members_queried"].tolist() == [2, 4, 4, 3, 2]
    assert [member.rows for member in members] == [[5], [5], [3], [2]]
    complete = torch.stack([torch.tensor(table) for table in tables])[:, x[:, 0].astype(int)]
    queried = cascade.members_queried(complete)
    assert queried.tolist() == found["members_queried"].tolist()
    expected = answer_by_members(Answers(settings), complete, queried)
    for name, values in zip(settings.outputs, expected, strict=True):
        assert np.array_equal(found[name], values.numpy()), name
    for member in members:
        member.rows.clear()
    backend({"x": x[[0, 4]]})
    assert [member.rows for member in members] == [[2], [2], [], []]
    unused = Cascade(4, (2,), None, "harm", 0.01, 0.9, 10, 0, 4.0)
    found = ModuleBackend(Ensemble(members), AnswerSettings(cascade=unused))({"x": x})
    assert [member.rows[-1] for member in members] == [5, 5, 5, 5]
    assert found["members_queried"].tolist() == [4] * 5


def test_named_inputs_are_queried_by_rows() -> None:
    class Named(Counting):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            assert len(x) == len(mask)
            return super().forward(x)

    table = torch.tensor([[8.0, 0.0], [0.1, 0.0]])
    members = [Named(table) for _ in range(3)]
    cascade = Cascade(3, (1, 2), 0.9, "harm", 0.01, 0.9, 1000, 0, 2.0)
    x = {"x": np.array([[0.0], [1.0], [1.0]]), "mask": np.ones((3, 1))}
    assert ModuleBackend(Ensemble(members), AnswerSettings(cascade=cascade))(x)["members_queried"].tolist() == [1, 3, 3]
    assert [member.rows for member in members] == [[3], [2], [2]]


def test_a_score_that_compares_members_needs_two_members(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    calibrate(copy, cascade={"max_harm": 0.2, "stages": (1, 2)})
    assert "mutual information is 0" in load_predictor(copy).remark
    with pytest.raises(RecipeError, match="compares members"):
        load_predictor(copy, ood_score="mutual_information")
    assert load_predictor(copy, ood_score="energy").ood_score == "energy"
