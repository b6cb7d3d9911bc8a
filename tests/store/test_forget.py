"""forget: an operator's word."""

from __future__ import annotations

import pytest

from celery_idempotent.errors import CorruptRecordError
from celery_idempotent.store import commands
from tests.store.scene import FIRST, SECOND, Scene


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
    assert scene.forget(token=17).case == "absent"


def test_a_token_drops_only_its_own_record(scene: Scene) -> None:
    done = scene.completed()

    for other in (done.token - 1, done.token + 1, 0):
        answer = scene.forget(other)
        assert (answer.case, answer.record) == ("changed", done)
    assert scene.record() == done

    assert scene.forget(done.token).case == "ok"
    assert scene.raw is None


def test_a_token_that_was_taken_over_drops_nothing(scene: Scene) -> None:
    dead = scene.expired()
    heir = scene.started()

    assert scene.forget(dead.token).case == "changed"
    assert scene.record() == heir


def test_what_cannot_be_read_is_dropped(scene: Scene) -> None:
    for raw in (b"", b"S", b"Znewer", b"{}"):
        scene.put(raw)
        assert scene.forget().case == "ok"
        assert scene.raw is None


def test_what_cannot_be_read_is_no_tokens(scene: Scene) -> None:
    for raw in (b"", b"S", b"Znewer"):
        scene.put(raw)
        assert scene.store.execute(commands.forget(scene.key, 17)).case == "changed"
        assert scene.raw == raw


def test_another_kind_of_value_is_dropped_too(scene: Scene) -> None:
    scene.client.rpush(scene.name, "no record")
    scene.client.expire(scene.name, 60)

    with pytest.raises(CorruptRecordError):
        scene.forget(token=17)
    assert scene.forget().case == "ok"
    assert not scene.client.exists(scene.name)


def test_an_execution_under_way_is_refused_its_outcome(scene: Scene) -> None:
    running = scene.started()

    scene.forget()

    assert scene.complete(running.token).case == "lost"
    assert scene.begin(task_id=FIRST).token > running.token
