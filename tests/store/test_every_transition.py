"""Invariants of all transitions: an expiry, the fingerprint, growing tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_idempotent.errors import CorruptRecordError
from celery_idempotent.record.record import State
from celery_idempotent.store import commands
from celery_idempotent.store.run_sync import run_sync
from tests.store.record_harness import (
    HOLD_MS,
    LEASE_MS,
    NO_ARGUMENTS,
    OWNER,
    RESULT,
    RETENTION_MS,
    SECOND,
    RecordHarness,
    RecordReply,
)
from tests.unit.record.raw import raw_record
from tests.waiting import eventually

ROOT = b"root 8 b"

TRANSITIONS: dict[str, Callable[[RecordHarness], object]] = {
    "begin": lambda harness: harness.started(),
    "begin, again": lambda harness: [harness.begin(execution_id=b"same") for _ in range(2)],
    "begin, held": lambda harness: [harness.begin() for _ in range(2)],
    "takeover": lambda harness: (harness.expired(), harness.started()),
    "prior": lambda harness: (harness.started(execution_id=b"16 bytes of name"),
                            harness.started(unanswered_ids=b"16 bytes of name")),
    "extend": lambda harness: harness.extend(harness.started().token),
    "save_step": lambda harness: harness.save_step(harness.started().token),
    "complete": lambda harness: harness.completed(),
    "fail": lambda harness: harness.failed(),
    "poison": lambda harness: harness.poisoned(),
    "hold": lambda harness: harness.held_for_retry(),
    "hold, begin": lambda harness: (harness.held_for_retry(), harness.started()),
    "step, release": lambda harness: _release_with_step(harness, 0),
    "step, hold": lambda harness: _release_with_step(harness, HOLD_MS),
    "step, hold, reserve": lambda harness: (_release_with_step(harness, HOLD_MS),
    harness.reserve()),
    "abandon": lambda harness: (harness.started(), harness.abandon()),
    "abandon, grace": lambda harness: (harness.started(), harness.abandon(grace_ms=1000)),
    "abandon, begin": lambda harness: (harness.started(), harness.abandon(), harness.started()),
    "reserve": lambda harness: harness.reserved(),
    "reserve, again": lambda harness: (harness.reserved(), harness.reserved()),
    "reserve, begin": lambda harness: (harness.reserved(), harness.started()),
    "sending": lambda harness: harness.sending(),
    "sent": lambda harness: (harness.sending(), harness.mark_continued()),
    "failed, sending": lambda harness: harness.sending_error(),
    "failed, sent": lambda harness: (harness.sending_error(), harness.mark_continued()),
}  # fmt: skip


def _release_with_step(harness: RecordHarness, hold_ms: int) -> RecordReply:
    token = harness.started().token
    harness.save_step(token)
    return harness.release(token, hold_ms)


transitions = pytest.mark.parametrize("transition", TRANSITIONS)


@transitions
def test_every_record_expires(harness: RecordHarness, transition: str) -> None:
    TRANSITIONS[transition](harness)

    assert 0 < harness.left_ms() <= HOLD_MS + LEASE_MS + RETENTION_MS


@transitions
def test_the_fingerprint_is_kept(harness: RecordHarness, transition: str) -> None:
    TRANSITIONS[transition](harness)

    assert harness.record().fingerprint == harness.key.fingerprint


@transitions
def test_a_call_without_a_fingerprint_keeps_it(harness: RecordHarness, transition: str) -> None:
    TRANSITIONS[transition](harness)

    harness.begin(key=NO_ARGUMENTS)
    harness.reserve(key=NO_ARGUMENTS)

    assert harness.record().fingerprint == harness.key.fingerprint


@transitions
def test_the_token_never_decreases(harness: RecordHarness, transition: str) -> None:
    first = harness.started().token
    harness.release(first)

    TRANSITIONS[transition](harness)

    assert harness.record().token > first


class TestTokens:
    def test_grow_across_takeovers_releases_and_forgetting(self, harness: RecordHarness) -> None:
        ends: list[Callable[[int], object]] = [
            lambda token: harness.abandon(),
            harness.release,
            lambda token: harness.release(token, HOLD_MS),
            lambda token: (harness.complete(token), harness.forget()),
            lambda token: (harness.fail(token), harness.client.delete(harness.name)),
            lambda token: harness.forget(),
        ]

        tokens = []
        for end in ends * 3:
            tokens.append(harness.started().token)
            end(tokens[-1])

        assert tokens == sorted(set(tokens))

    def test_grow_after_a_record_expired(self, harness: RecordHarness) -> None:
        first = harness.completed().token
        harness.client.pexpire(harness.name, 1)
        eventually(lambda: harness.raw is None)

        assert harness.started().token > first

    def test_are_the_servers_time_in_microseconds(self, harness: RecordHarness) -> None:
        replies = []
        for _ in range(20):
            replies.append(harness.begin())
            harness.release(replies[-1].token)

        assert all(reply.token // 1000 == reply.now_ms for reply in replies)
        # A token that was rounded to fourteen digits would end in two zeros.
        assert any(reply.token % 100 for reply in replies)

    @pytest.mark.parametrize("last", [2**53 - 3, 9_007_199_254_740_001, 7_777_777_777_777_777])
    def test_grow_by_one_past_the_clock_to_the_last_digit(
        self, harness: RecordHarness, last: int
    ) -> None:
        # As after the server's clock was set back.
        harness.put(raw_record(b"S", token=last, at_ms=1, fingerprint=harness.key.fingerprint))

        successor = harness.started()

        assert successor.token == last + 1
        assert harness.extend(last).case == "lost"
        assert harness.complete(last).case == "lost"
        assert harness.complete(last + 1).case == "ok"

    @pytest.mark.parametrize("last", [2**53 - 3, 9_007_199_254_740_001])
    def test_grow_past_a_reservation_too(self, harness: RecordHarness, last: int) -> None:
        harness.put(
            raw_record(
                b"R",
                token=last,
                at_ms=1,
                fingerprint=harness.key.fingerprint,
                worker=b"",
                execution_id=b"",
            )
        )

        assert harness.started(task_id=SECOND).token == last + 1

    @pytest.mark.parametrize("last", [2**53 - 3, 9_007_199_254_740_001])
    def test_grow_from_reservation_to_reservation(self, harness: RecordHarness, last: int) -> None:
        ahead = harness.now_ms() + HOLD_MS
        harness.put(
            raw_record(b"R", token=last, at_ms=ahead, task_id=b"a", worker=b"", execution_id=b"")
        )

        assert harness.reserve("a").token == last + 1

    def test_are_outdated_by_abandon(self, harness: RecordHarness) -> None:
        token = harness.started().token

        harness.abandon(grace_ms=LEASE_MS)

        assert harness.record().token > token


@pytest.mark.parametrize("raw", [
    b"", b"S", b"S" * 14, raw_record()[:30], raw_record(b"Z"), b"{}", raw_record(b"s"),
    bytes(range(200)),
], ids=["empty", "letter", "short", "cut", "newer", "json", "lower", "bytes"])  # fmt: skip
class TestDamaged:
    def test_begin_and_reserve_reply_corrupt(self, harness: RecordHarness, raw: bytes) -> None:
        harness.put(raw)

        begin = run_sync(harness.store.execute(commands.begin(
            harness.key, execution_id=b"o", unanswered_ids=b"", root=ROOT, task_id="a",
            worker="w", lease_ms=LEASE_MS,
            retention_ms=RETENTION_MS, max_attempts=5, error_ms=1000,
        )))  # fmt: skip
        reserve = run_sync(harness.store.execute(commands.reserve(harness.key, "a", HOLD_MS)))

        assert (begin.case, begin.raw) == ("corrupt", raw)
        assert (reserve.case, reserve.raw) == ("corrupt", raw)
        assert harness.raw == raw

    def test_other_transitions_reply_lost(self, harness: RecordHarness, raw: bytes) -> None:
        harness.put(raw)
        token = 1_763_726_400_123_457

        for settle in (
            commands.complete(harness.key, token, RESULT, 1000),
            commands.fail(harness.key, token, RESULT, 1000),
            commands.release(harness.key, token, hold_ms=0, retention_ms=1000, root=ROOT),
            commands.save_step(harness.key, token, b"s", lease_ms=1000, retention_ms=1000),
            commands.abandon(harness.key, "a", "w", root=ROOT, grace_ms=0),
            commands.mark_continued(harness.key, ROOT, OWNER),
        ):
            assert run_sync(harness.store.execute(settle)).case == "lost"
        assert harness.raw == raw


def test_a_value_of_another_type_is_a_corrupt_record(harness: RecordHarness) -> None:
    harness.client.hset(harness.name, "field", "value")
    harness.client.expire(harness.name, 60)
    calls: list[Callable[[], object]] = [
        harness.begin,
        harness.reserve,
        lambda: harness.complete(17),
        lambda: harness.fail(17),
        lambda: harness.release(17),
        lambda: harness.save_step(17),
        harness.abandon,
        harness.mark_continued,
        lambda: run_sync(harness.store.get(harness.key)),
    ]

    for call in calls:
        with pytest.raises(CorruptRecordError, match=str(harness.key)):
            call()
    assert harness.client.hgetall(harness.name) == {b"field": b"value"}


def test_an_expired_record_leaves_nothing_behind(harness: RecordHarness) -> None:
    assert harness.release(harness.started().token).case == "ok"
    assert harness.completed().state is State.COMPLETED
    harness.forget()

    assert harness.client.dbsize() == 0
