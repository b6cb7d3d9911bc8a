"""extend: the heartbeat's word."""

from __future__ import annotations

import pytest

from celery_idempotent.errors import CorruptRecordError
from celery_idempotent.key.key import Key
from celery_idempotent.store import commands
from celery_idempotent.store.commands import Extension
from celery_idempotent.store.scripts import Reply
from tests.store.record_harness import LEASE_MS, RESULT, RETENTION_MS, SECOND, SHORT_MS, Scene

pytestmark = pytest.mark.core


def test_a_lease_ends_that_long_from_now(scene: Scene) -> None:
    running = scene.started(lease_ms=1000)

    answer = scene.extend(running.token)

    assert answer.case == "ok"
    assert scene.record().at_ms == answer.now_ms + LEASE_MS


def test_nothing_but_the_deadline_changes(scene: Scene) -> None:
    running = scene.started()
    scene.step(running.token)
    before = scene.raw
    assert before is not None

    scene.extend(running.token, lease_ms=2 * LEASE_MS)

    after = scene.raw
    assert after is not None
    assert after[:9] == before[:9]
    assert after[15:] == before[15:]


def test_a_lease_may_be_shortened(scene: Scene) -> None:
    running = scene.started()

    answer = scene.extend(running.token, lease_ms=SHORT_MS)

    assert scene.record().at_ms == answer.now_ms + SHORT_MS


def test_the_record_is_remembered_that_much_longer(scene: Scene) -> None:
    running = scene.started()
    scene.client.pexpire(scene.name, 60_000)

    scene.extend(running.token)

    assert LEASE_MS + RETENTION_MS - 5000 < scene.left_ms() <= LEASE_MS + RETENTION_MS


def test_a_lease_that_ran_out_is_still_its_holders(scene: Scene) -> None:
    running = scene.expired()

    assert scene.extend(running.token).case == "ok"
    assert scene.begin(task_id=SECOND).case == "held"


def test_a_lease_that_was_taken_over_is_lost(scene: Scene) -> None:
    stale = scene.expired()
    rival = scene.started(task_id=SECOND)

    answer = scene.extend(stale.token)

    assert answer.case == "lost"
    assert answer.record == rival == scene.record()


def test_a_finished_execution_has_no_lease(scene: Scene) -> None:
    done = scene.completed()

    answer = scene.extend(done.token)

    assert (answer.case, answer.record) == ("lost", done)
    assert scene.record() == done


def test_a_key_that_was_forgotten_is_lost(scene: Scene) -> None:
    running = scene.started()
    scene.forget()

    assert scene.extend(running.token)[:2] == ("lost", None)
    assert scene.raw is None


def test_each_of_many_gets_its_own_answer(scene: Scene) -> None:
    keys = [Key("shop.charge", f"{number:022}") for number in range(4)]
    tokens = [scene.started(key=key).token for key in keys]
    scene.store.execute(commands.complete(keys[1], tokens[1], RESULT, RETENTION_MS))
    scene.client.delete(scene.store.name(keys[2]))
    scene.client.rpush(scene.store.name(keys[2]), "not a record")
    scene.client.expire(scene.store.name(keys[2]), 60)

    answers = scene.store.extend(
        [
            Extension(key, token, LEASE_MS, RETENTION_MS)
            for key, token in zip(keys, tokens, strict=True)
        ]
    )

    cases = [answer.case if isinstance(answer, Reply) else type(answer) for answer in answers]
    assert cases == ["ok", "lost", CorruptRecordError, "ok"]
    assert str(keys[2]) in str(answers[2])


def test_none_to_extend_is_no_trouble(scene: Scene) -> None:
    assert scene.store.extend([]) == []
