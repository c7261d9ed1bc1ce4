"""Progress events: merging updates of a member, and the default callback."""

from __future__ import annotations

import logging
import pickle

import pytest

from plateaux.core.progress import MemberUpdate, Message, WorkDone, log_messages


def test_a_newer_update_replaces_what_it_sets_and_merges_metrics() -> None:
    first = MemberUpdate(0, epochs=4, epoch=1, steps=5, step=3, metrics={"loss": 0.5}, node="a", seconds_left=9.0)
    second = first.merge(MemberUpdate(0, epoch=2, metrics={"train loss": 0.4}))
    assert second == MemberUpdate(
        0, epochs=4, epoch=2, steps=5, metrics={"loss": 0.5, "train loss": 0.4}, node="a", seconds_left=9.0
    )
    assert (first.completed_epoch, second.completed_epoch) == (None, 2)


def test_scoring_does_not_complete_an_epoch_and_ends_with_the_next_update() -> None:
    scoring = MemberUpdate(0, epochs=4, epoch=2, scored=0.5)
    assert scoring.completed_epoch is None
    assert scoring.merge(MemberUpdate(0, epoch=2, step=1)).scored is None


def test_a_stored_update_has_no_unset_fields_and_is_read_back() -> None:
    update = MemberUpdate(3, epoch=2, metrics={"loss": 0.5})
    assert update.to_dict() == {"member": 3, "epoch": 2, "metrics": {"loss": 0.5}}
    assert MemberUpdate(**update.to_dict()) == update


def test_events_can_be_pickled() -> None:
    for event in (Message("text"), WorkDone(1, 2), MemberUpdate(0, metrics={"loss": 0.5})):
        assert pickle.loads(pickle.dumps(event)) == event


def test_by_default_only_messages_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="plateaux"):
        log_messages(Message("text"))
        log_messages(WorkDone(1, 2))
        log_messages(MemberUpdate(0))
    assert caplog.messages == ["text"]
