"""Branching: runs that share the epochs before a data partition start from one parent, with equal results."""

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
    return train(row(PAPER), tmp_path_factory.mktemp("parent") / "paper", **GIVEN.keywords())


@pytest.mark.parametrize(
    "method",
    [
        {"name": "sam", "rho": 0.2},
        {**PAPER, "rule": "released"},
        {**PAPER, "top_k": 0.1},
        {**PAPER, "partition_epoch": 3},
        {**PAPER, "score": "loss"},
    ],
    ids=["sam", "another rule", "another fraction", "a later partition", "another score"],
)
def test_a_branch_ends_at_the_weights_of_a_full_run(method: dict[str, Any], paper: Run, tmp_path: Path) -> None:
    branch = train(row(method), tmp_path / "branch", **GIVEN.keywords(), branch_from=paper.store.root)
    full = train(row(method), tmp_path / "full", **GIVEN.keywords())
    assert distance(weights(branch), weights(full)) == 0
    assert [branch.log(n) for n in range(3)] == [full.log(n) for n in range(3)]


def test_the_shared_epochs_are_not_trained_again(paper: Run, tmp_path: Path) -> None:
    events: list[Any] = []
    train(
        row({"name": "sam", "rho": 0.2}),
        tmp_path / "sam",
        **GIVEN.keywords(),
        branch_from=paper.store.root,
        progress=events.append,
    )
    assert {event.completed_epoch for event in events if isinstance(event, MemberUpdate)} - {None} == {3, 4}


def test_scores_of_the_same_kind_are_copied(paper: Run, tmp_path: Path) -> None:
    other = row({**PAPER, "rule": "released"})
    events: list[Any] = []
    branch = train(
        other, tmp_path / "released", **GIVEN.keywords(), branch_from=paper.store.root, progress=events.append
    )
    assert not any(getattr(event, "scored", None) for event in events)
    for number in range(3):
        name = sharpness_path(2, number)
        assert branch.store.get(name) == paper.store.get(name)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ({"name": "sam", "rho": 0.1}, {}, "rho: 0.2 -> 0.1"),
        ({"name": "deep_ensemble"}, {}, "deep_ensemble"),
        ({"name": "sam", "rho": 0.2}, {"train": {"epochs": 5}}, "epochs"),
        ({"name": "sam", "rho": 0.2}, {"members": 4}, "but this run needs 4"),
        ({**PAPER, "partition_epoch": 1}, {}, "but this run does after 1"),
    ],
)
def test_a_parent_that_trains_differently_is_rejected_with_the_difference(
    method: dict[str, Any], options: dict[str, Any], message: str, paper: Run, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=message):
        train(row(method, **options), tmp_path / "run", **GIVEN.keywords(), branch_from=paper.store.root)


def test_a_missing_parent_leaves_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        train(row({"name": "sam", "rho": 0.2}), tmp_path / "sam", **GIVEN.keywords(), branch_from=tmp_path / "nowhere")
    assert not (tmp_path / "sam").exists()


def test_a_parent_without_a_partition_checkpoint_is_rejected(tmp_path: Path) -> None:
    cleaned = train(row(PAPER, run={"keep_checkpoints": "none"}), tmp_path / "cleaned", **GIVEN.keywords())
    with pytest.raises(RunError, match="keep_checkpoints"):
        train(row({"name": "sam", "rho": 0.2}), tmp_path / "sam", **GIVEN.keywords(), branch_from=cleaned.store.root)


def test_a_branch_cannot_select_the_best_weights(paper: Run, tmp_path: Path) -> None:
    best = {"train": {"epochs": 4, "select": "best:accuracy"}, "data": {"validation_split": 4}}
    first = train(row(PAPER, **best), tmp_path / "first", **GIVEN.keywords())
    with pytest.raises(RunError, match="needs all epochs"):
        train(
            row({"name": "sam", "rho": 0.2}, **best),
            tmp_path / "second",
            **GIVEN.keywords(),
            branch_from=first.store.root,
        )
