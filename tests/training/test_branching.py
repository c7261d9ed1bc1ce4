"""The span before a meeting is trained once: SAM and every rule begin from it, and end as if they had not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import GIVEN, distance, recipe, weights

from plateaux.core.errors import RunError
from plateaux.core.progress import MemberUpdate
from plateaux.storage.run import Run, sharpness_path
from plateaux.training.train import train

OPTIONS = {"train": {"epochs": 4}, "run": {"keep_checkpoints": "last"}}


def row(method: dict[str, Any], **options: Any) -> Any:
    return recipe("deep_ensemble", "mlp", method=method, **{**OPTIONS, **options})


PAPER = {"name": "sharpbalance", "rho": 0.2, "partition_epoch": 2}


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(row(PAPER), tmp_path_factory.mktemp("span") / "paper", **GIVEN.keywords())


@pytest.mark.parametrize(
    "method",
    [
        {"name": "sam", "rho": 0.2},
        {**PAPER, "rule": "released"},
        {**PAPER, "top_k": 0.1, "step": "shared"},
        {**PAPER, "partition_epoch": 3},
        {**PAPER, "score": "loss"},
    ],
    ids=["sam", "another rule", "another share", "a later meeting", "another score"],
)
def test_a_run_that_begins_from_a_span_ends_as_one_that_does_not(
    method: dict[str, Any], paper: Run, tmp_path: Path
) -> None:
    begun = train(row(method), tmp_path / "begun", **GIVEN.keywords(), branch_from=paper.store.root)
    whole = train(row(method), tmp_path / "whole", **GIVEN.keywords())
    assert distance(weights(begun), weights(whole)) == 0
    assert [begun.log(n) for n in range(3)] == [whole.log(n) for n in range(3)]


def test_a_span_is_not_trained_again(paper: Run, tmp_path: Path) -> None:
    told: list[Any] = []
    train(
        row({"name": "sam", "rho": 0.2}),
        tmp_path / "sam",
        **GIVEN.keywords(),
        branch_from=paper.store.root,
        progress=told.append,
    )
    assert {event.completed_epoch for event in told if isinstance(event, MemberUpdate)} - {None} == {3, 4}


def test_scores_of_the_same_kind_come_along(paper: Run, tmp_path: Path) -> None:
    other = row({**PAPER, "rule": "released"})
    told: list[Any] = []
    begun = train(other, tmp_path / "released", **GIVEN.keywords(), branch_from=paper.store.root, progress=told.append)
    assert not any(getattr(event, "scored", None) for event in told)
    for number in range(3):
        name = sharpness_path(2, number)
        assert begun.store.get(name) == paper.store.get(name)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ({"name": "sam", "rho": 0.1}, {}, "rho: 0.2 -> 0.1"),
        ({"name": "deep_ensemble"}, {}, "deep_ensemble"),
        ({"name": "sam", "rho": 0.2}, {"train": {"epochs": 5}}, "epochs"),
        ({"name": "sam", "rho": 0.2}, {"members": 4}, "needs 4 to begin from"),
        ({**PAPER, "partition_epoch": 1}, {}, "after 1 already"),
    ],
)
def test_another_span_is_refused_with_the_difference(
    method: dict[str, Any], options: dict[str, Any], words: str, paper: Run, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=words):
        train(row(method, **options), tmp_path / "run", **GIVEN.keywords(), branch_from=paper.store.root)


def test_a_span_that_is_not_there_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        train(row({"name": "sam", "rho": 0.2}), tmp_path / "sam", **GIVEN.keywords(), branch_from=tmp_path / "nowhere")
    assert not (tmp_path / "sam").exists()


def test_a_run_without_a_kept_meeting_is_no_span(tmp_path: Path) -> None:
    tidy = train(row(PAPER, run={"keep_checkpoints": "none"}), tmp_path / "tidy", **GIVEN.keywords())
    with pytest.raises(RunError, match="keep_checkpoints"):
        train(row({"name": "sam", "rho": 0.2}), tmp_path / "sam", **GIVEN.keywords(), branch_from=tidy.store.root)


def test_best_weights_need_the_whole_course(paper: Run, tmp_path: Path) -> None:
    best = {"train": {"epochs": 4, "select": "best:accuracy"}, "data": {"validation_split": 4}}
    first = train(row(PAPER, **best), tmp_path / "first", **GIVEN.keywords())
    with pytest.raises(RunError, match="the whole course"):
        train(
            row({"name": "sam", "rho": 0.2}, **best),
            tmp_path / "second",
            **GIVEN.keywords(),
            branch_from=first.store.root,
        )
