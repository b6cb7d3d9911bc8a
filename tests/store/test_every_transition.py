"""What holds whatever happens: an expiry, the fingerprint, growing tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_idempotent.errors import CorruptRecordError
from celery_idempotent.record.record import State
from celery_idempotent.store import commands
from tests.store.record_harness import (
    HOLD_MS,
    LEASE_MS,
    NO_ARGUMENTS,
    RESULT,
    RETENTION_MS,
    SECOND,
    Answer,
    Scene,
)
from tests.unit.record.raw import raw_record
from tests.waiting import eventually

TRANSITIONS: dict[str, Callable[[Scene], object]] = {
    "begin": lambda scene: scene.started(),
    "begin, again": lambda scene: [scene.begin(owner=b"same") for _ in range(2)],
    "begin, held": lambda scene: [scene.begin() for _ in range(2)],
    "takeover": lambda scene: (scene.expired(), scene.started()),
    "prior": lambda scene: (scene.started(owner=b"16 bytes of name"),
                            scene.started(prior=b"16 bytes of name")),
    "extend": lambda scene: scene.extend(scene.started().token),
    "save_step": lambda scene: scene.step(scene.started().token),
    "complete": lambda scene: scene.completed(),
    "fail": lambda scene: scene.failed(),
    "poison": lambda scene: scene.poisoned(),
    "hold": lambda scene: scene.held_for_retry(),
    "hold, begin": lambda scene: (scene.held_for_retry(), scene.started()),
    "step, release": lambda scene: _release_with_step(scene, 0),
    "step, hold": lambda scene: _release_with_step(scene, HOLD_MS),
    "step, hold, reserve": lambda scene: (_release_with_step(scene, HOLD_MS), scene.reserve()),
    "abandon": lambda scene: (scene.started(), scene.abandon()),
    "abandon, grace": lambda scene: (scene.started(), scene.abandon(grace_ms=1000)),
    "abandon, begin": lambda scene: (scene.started(), scene.abandon(), scene.started()),
    "reserve": lambda scene: scene.reserved(),
    "reserve, again": lambda scene: (scene.reserved(), scene.reserved()),
    "reserve, begin": lambda scene: (scene.reserved(), scene.started()),
    "mark_continued": lambda scene: (scene.completed(), scene.dispatched()),
    "failed, dispatched": lambda scene: (scene.failed(), scene.dispatched()),
}  # fmt: skip


def _release_with_step(scene: Scene, hold_ms: int) -> Answer:
    token = scene.started().token
    scene.step(token)
    return scene.release(token, hold_ms)


transitions = pytest.mark.parametrize("transition", TRANSITIONS)


@transitions
def test_nothing_stays_for_ever(scene: Scene, transition: str) -> None:
    TRANSITIONS[transition](scene)

    assert 0 < scene.left_ms() <= HOLD_MS + LEASE_MS + RETENTION_MS


@transitions
def test_the_fingerprint_is_kept(scene: Scene, transition: str) -> None:
    TRANSITIONS[transition](scene)

    assert scene.record().fingerprint == scene.key.fingerprint


@transitions
def test_a_caller_without_arguments_does_not_wipe_it_out(scene: Scene, transition: str) -> None:
    TRANSITIONS[transition](scene)

    scene.begin(key=NO_ARGUMENTS)
    scene.reserve(key=NO_ARGUMENTS)

    assert scene.record().fingerprint == scene.key.fingerprint


@transitions
def test_the_token_never_falls(scene: Scene, transition: str) -> None:
    first = scene.started().token
    scene.release(first)

    TRANSITIONS[transition](scene)

    assert scene.record().token > first


class TestTokens:
    def test_grow_across_takeovers_releases_and_forgetting(self, scene: Scene) -> None:
        ends: list[Callable[[int], object]] = [
            lambda token: scene.abandon(),
            scene.release,
            lambda token: scene.release(token, HOLD_MS),
            lambda token: (scene.complete(token), scene.forget()),
            lambda token: (scene.fail(token), scene.client.delete(scene.name)),
            lambda token: scene.forget(),
        ]

        tokens = []
        for end in ends * 3:
            tokens.append(scene.started().token)
            end(tokens[-1])

        assert tokens == sorted(set(tokens))

    def test_grow_when_a_record_expires_by_itself(self, scene: Scene) -> None:
        first = scene.completed().token
        scene.client.pexpire(scene.name, 1)
        eventually(lambda: scene.raw is None)

        assert scene.started().token > first

    def test_are_the_servers_microseconds(self, scene: Scene) -> None:
        answers = []
        for _ in range(20):
            answers.append(scene.begin())
            scene.release(answers[-1].token)

        assert all(answer.token // 1000 == answer.now_ms for answer in answers)
        # Fourteen digits of sixteen would end in two zeros each time.
        assert any(answer.token % 100 for answer in answers)

    @pytest.mark.parametrize("last", [2**53 - 3, 9_007_199_254_740_001, 7_777_777_777_777_777])
    def test_grow_by_one_past_the_clock_to_the_last_digit(self, scene: Scene, last: int) -> None:
        # As after a backward step of the server's clock.
        scene.put(raw_record(b"S", token=last, at_ms=1, fingerprint=scene.key.fingerprint))

        heir = scene.started()

        assert heir.token == last + 1
        assert scene.extend(last).case == "lost"
        assert scene.complete(last).case == "lost"
        assert scene.complete(last + 1).case == "ok"

    @pytest.mark.parametrize("last", [2**53 - 3, 9_007_199_254_740_001])
    def test_grow_past_a_reservation_too(self, scene: Scene, last: int) -> None:
        scene.put(
            raw_record(
                b"R", token=last, at_ms=1, fingerprint=scene.key.fingerprint, worker=b"", owner=b""
            )
        )

        assert scene.started(task_id=SECOND).token == last + 1

    @pytest.mark.parametrize("last", [2**53 - 3, 9_007_199_254_740_001])
    def test_grow_from_reservation_to_reservation(self, scene: Scene, last: int) -> None:
        ahead = scene.now_ms() + HOLD_MS
        scene.put(raw_record(b"R", token=last, at_ms=ahead, task_id=b"a", worker=b"", owner=b""))

        assert scene.reserve("a").token == last + 1

    def test_abandoning_outdates_them(self, scene: Scene) -> None:
        token = scene.started().token

        scene.abandon(grace_ms=LEASE_MS)

        assert scene.record().token > token


@pytest.mark.parametrize("raw", [
    b"", b"S", b"S" * 14, raw_record()[:30], raw_record(b"Z"), b"{}", raw_record(b"s"),
    bytes(range(200)),
], ids=["empty", "letter", "short", "cut", "newer", "json", "lower", "bytes"])  # fmt: skip
class TestDamaged:
    def test_nobody_begins_or_reserves(self, scene: Scene, raw: bytes) -> None:
        scene.put(raw)

        begin = scene.store.execute(commands.begin(
            scene.key, owner=b"o", prior=b"", task_id="a", worker="w", lease_ms=LEASE_MS,
            retention_ms=RETENTION_MS, max_attempts=5, error_ms=1000,
        ))  # fmt: skip
        reserve = scene.store.execute(commands.reserve(scene.key, "a", HOLD_MS))

        assert (begin.case, begin.raw) == ("corrupt", raw)
        assert (reserve.case, reserve.raw) == ("corrupt", raw)
        assert scene.raw == raw

    def test_nobody_settles(self, scene: Scene, raw: bytes) -> None:
        scene.put(raw)
        token = 1_763_726_400_123_457

        for settle in (
            commands.complete(scene.key, token, RESULT, 1000),
            commands.fail(scene.key, token, RESULT, 1000),
            commands.release(scene.key, token, hold_ms=0, retention_ms=1000),
            commands.step(scene.key, token, b"s", lease_ms=1000, retention_ms=1000),
            commands.abandon(scene.key, "a", "w", grace_ms=0),
            commands.dispatched(scene.key, "a"),
        ):
            assert scene.store.execute(settle).case == "lost"
        assert scene.raw == raw


def test_a_value_of_another_kind_is_a_corrupt_record_to_all(scene: Scene) -> None:
    scene.client.hset(scene.name, "field", "value")
    scene.client.expire(scene.name, 60)
    calls: list[Callable[[], object]] = [
        scene.begin,
        scene.reserve,
        lambda: scene.complete(17),
        lambda: scene.fail(17),
        lambda: scene.release(17),
        lambda: scene.step(17),
        scene.abandon,
        scene.dispatched,
        lambda: scene.store.look_up(scene.key),
    ]

    for call in calls:
        with pytest.raises(CorruptRecordError, match=str(scene.key)):
            call()
    assert scene.client.hgetall(scene.name) == {b"field": b"value"}


def test_a_state_that_is_gone_leaves_nothing_behind(scene: Scene) -> None:
    assert scene.release(scene.started().token).case == "ok"
    assert scene.completed().state is State.COMPLETED
    scene.forget()

    assert scene.client.dbsize() == 0
