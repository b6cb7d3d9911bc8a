"""forget: an operator's word."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from celery_idempotent.errors import CorruptRecordError
from celery_idempotent.record.record import Record, State
from celery_idempotent.store import commands
from celery_idempotent.store.commands import UNREADABLE
from tests.store.record_harness import FIRST, SECOND, WORKER, Scene
from tests.unit.record.raw import raw_record


def shown(token: int) -> Record:
    return Record(State.STARTED, "shop.charge:digest", "shop.charge", FIRST, WORKER, token, 1)


@pytest.mark.parametrize(
    "given",
    [
        Scene.started,
        Scene.expired,
        Scene.reserved,
        Scene.held_for_retry,
        Scene.completed,
        Scene.failed,
        Scene.poisoned,
    ],
    ids=lambda given: given.__name__,
)
def test_any_record_is_dropped(scene: Scene, given: object) -> None:
    given(scene)  # type: ignore[operator]

    assert scene.forget().case == "ok"
    assert scene.raw is None
    assert scene.begin(task_id=SECOND).there.attempt == 1


def test_there_may_be_nothing(scene: Scene) -> None:
    assert scene.forget().case == "absent"
    assert scene.forget(shown(17)).case == "absent"
    assert scene.forget(UNREADABLE).case == "absent"


def test_what_was_shown_is_told_by_its_token(scene: Scene) -> None:
    done = scene.completed()

    for other in (done.token - 1, done.token + 1, 0):
        answer = scene.forget(replace(done, token=other))
        assert (answer.case, answer.record) == ("changed", done)
    assert scene.record() == done

    assert scene.forget(done).case == "ok"
    assert scene.raw is None


def test_a_lease_that_was_taken_over_since_is_not_dropped(scene: Scene) -> None:
    dead = scene.expired()
    heir = scene.started()

    assert scene.forget(dead).case == "changed"
    assert scene.record() == heir


@pytest.mark.parametrize("since", [Scene.complete, Scene.fail], ids=["completed", "failed"])
def test_an_outcome_that_was_not_shown_is_not_dropped(scene: Scene, since: Any) -> None:
    running = scene.started()
    since(scene, running.token)
    outcome = scene.record()

    answer = scene.forget(running)

    assert outcome.token == running.token
    assert (answer.case, answer.record) == ("changed", outcome)
    assert scene.record() == outcome


def test_an_execution_that_was_not_shown_is_not_dropped(scene: Scene) -> None:
    reserved = scene.reserved()
    scene.put(raw_record(b"S", token=reserved.token))

    assert scene.forget(reserved).case == "changed"
    assert scene.state is State.STARTED


@pytest.mark.parametrize("since", [
    lambda scene, running: scene.extend(running.token),
    lambda scene, running: scene.step(running.token),
], ids=["extended", "a step further"])  # fmt: skip
def test_an_execution_that_goes_on_is_still_what_was_shown(scene: Scene, since: Any) -> None:
    running = scene.started()
    since(scene, running)

    assert scene.forget(running).case == "ok"
    assert scene.raw is None


@pytest.mark.parametrize("given", [Scene.completed, Scene.failed], ids=["completed", "failed"])
def test_so_is_an_outcome_whose_continuation_has_gone_out(scene: Scene, given: Any) -> None:
    outcome = given(scene)
    assert scene.dispatched(outcome.task_id).case == "ok"

    assert scene.forget(outcome).case == "ok"
    assert scene.raw is None


def test_what_was_damaged_is_not_dropped_once_it_can_be_read(scene: Scene) -> None:
    done = scene.completed()

    answer = scene.forget(UNREADABLE)

    assert (answer.case, answer.record) == ("changed", done)
    assert scene.record() == done


class TestErrorsOfEndedTaskIds:
    """To all but copies of their messages there is nothing."""

    def test_are_dropped_as_if_they_were_not_there(self, scene: Scene) -> None:
        scene.end_with_error(scene.started().token)
        assert scene.begin().case == "finished"

        assert scene.forget().case == "absent"
        assert scene.raw is None
        assert scene.begin().case == "begun"

    def test_are_not_what_was_shown(self, scene: Scene) -> None:
        running = scene.started()
        scene.end_with_error(running.token)

        assert scene.forget(running).case == "absent"
        assert scene.forget(UNREADABLE).case == "absent"
        assert scene.begin().case == "finished"


def test_what_cannot_be_read_is_dropped(scene: Scene) -> None:
    for raw in (b"", b"S", b"Znewer", b"{}"):
        scene.put(raw)
        assert scene.forget().case == "ok"
        assert scene.raw is None
        scene.put(raw)
        assert scene.forget(UNREADABLE).case == "ok"
        assert scene.raw is None


def test_what_cannot_be_read_is_no_tokens(scene: Scene) -> None:
    for raw in (b"", b"S", b"Znewer"):
        scene.put(raw)
        assert scene.store.execute(commands.forget(scene.key, shown(17))).case == "changed"
        assert scene.raw == raw


def test_another_kind_of_value_is_dropped_too(scene: Scene) -> None:
    scene.client.rpush(scene.name, "no record")
    scene.client.expire(scene.name, 60)

    with pytest.raises(CorruptRecordError):
        scene.forget(shown(17))
    assert scene.forget(UNREADABLE).case == "ok"
    assert not scene.client.exists(scene.name)

    scene.client.rpush(scene.name, "no record")
    assert scene.forget().case == "ok"
    assert not scene.client.exists(scene.name)


def test_an_execution_under_way_is_refused_its_outcome(scene: Scene) -> None:
    running = scene.started()

    scene.forget()

    assert scene.complete(running.token).case == "lost"
    assert scene.begin(task_id=FIRST).token > running.token
