"""Lost replies: the command is resent and gets the first reply."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from celery_idempotent.errors import StoreUnavailableError
from celery_idempotent.record.record import State
from celery_idempotent.store import scripts
from celery_idempotent.store.run_sync import run_sync
from tests.faults.proxy import Proxy
from tests.store.record_harness import HOLD_MS, OWNER, SECOND, RecordHarness, RecordReply, store_at
from tests.waiting import eventually


def warm(harness: RecordHarness) -> None:
    """Load all scripts, so that each call is one request."""
    for name in ("begin", "complete", "fail", "release", "extend", "save_step", "abandon",
                 "reserve", "continuation", "forget", "get"):  # fmt: skip
        harness.client.script_load(scripts.load(name).source)


@pytest.fixture
def warmed(proxied: RecordHarness) -> RecordHarness:
    warm(proxied)
    run_sync(proxied.store.ping())
    return proxied


def lose(proxy: Proxy, script: str) -> None:
    proxy.lose_reply(to=scripts.load(script).sha)


def assert_sent_twice(proxy: Proxy, script: str) -> None:
    assert proxy.pending == 0
    assert len(proxy.requests_with(scripts.load(script).sha)) == 2


def test_begin(warmed: RecordHarness, proxy: Proxy) -> None:
    lose(proxy, "begin")

    answer = warmed.begin()

    assert_sent_twice(proxy, "begin")
    assert (answer.case, answer.stored.attempt) == ("begun", 1)
    assert answer.record == warmed.record()
    assert warmed.complete(answer.token).case == "ok"


def test_begin_that_takes_over(warmed: RecordHarness, proxy: Proxy) -> None:
    dead = warmed.expired()
    proxy.requests.clear()
    lose(proxy, "begin")

    answer = warmed.begin()

    assert_sent_twice(proxy, "begin")
    assert (answer.case, answer.stored.attempt) == ("begun", 2)
    assert answer.token > dead.token


def test_begin_of_a_retry(warmed: RecordHarness, proxy: Proxy) -> None:
    warmed.held_for_retry()
    proxy.requests.clear()
    lose(proxy, "begin")

    assert warmed.begin().case == "begun"
    assert_sent_twice(proxy, "begin")


def test_begin_that_finds_the_task_poisoned(warmed: RecordHarness, proxy: Proxy) -> None:
    warmed.started()
    warmed.abandon()
    proxy.requests.clear()
    lose(proxy, "begin")

    answer = warmed.begin(max_attempts=1)

    assert_sent_twice(proxy, "begin")
    assert answer.case == "finished"
    assert answer.stored.body == b"poisoned"


@pytest.mark.parametrize(
    ("script", "call"),
    [
        ("complete", lambda harness, token: harness.complete(token)),
        ("fail", lambda harness, token: harness.fail(token)),
        ("release", lambda harness, token: harness.release(token)),
        ("release", lambda harness, token: harness.release(token, HOLD_MS)),
        ("extend", lambda harness, token: harness.extend(token)),
        ("save_step", lambda harness, token: harness.save_step(token)),
        ("abandon", lambda harness, token: harness.abandon()),
        ("abandon", lambda harness, token: harness.abandon(grace_ms=1000)),
    ],
    ids=["complete", "fail", "release", "hold", "extend", "save_step", "abandon", "grace"],
)
def test_other_transitions(
    warmed: RecordHarness,
    proxy: Proxy,
    script: str,
    call: Callable[[RecordHarness, int], RecordReply],
) -> None:
    token = warmed.started().token
    lose(proxy, script)

    answer = call(warmed, token)

    assert_sent_twice(proxy, script)
    assert answer.case == "ok"


def test_step_is_stored_once(warmed: RecordHarness, proxy: Proxy) -> None:
    token = warmed.started().token
    warmed.save_step(token, "one", b"1")
    once = warmed.record().body
    warmed.forget()
    token = warmed.started().token
    lose(proxy, "save_step")

    warmed.save_step(token, "one", b"1")

    assert warmed.record().body == once


def test_reserve(warmed: RecordHarness, proxy: Proxy) -> None:
    lose(proxy, "reserve")

    assert warmed.reserve().case == "reserved"
    assert_sent_twice(proxy, "reserve")
    assert warmed.begin().case == "begun"


def test_mark_continued(warmed: RecordHarness, proxy: Proxy) -> None:
    warmed.sending()
    lose(proxy, "continuation")

    assert warmed.mark_continued().case == "ok"
    assert_sent_twice(proxy, "continuation")


def test_get(warmed: RecordHarness, proxy: Proxy) -> None:
    done = warmed.completed()
    lose(proxy, "get")

    record = run_sync(warmed.store.get(warmed.key))

    assert_sent_twice(proxy, "get")
    assert record is not None
    assert record.token == done.token


def test_two_lost_replies_in_a_row(warmed: RecordHarness, proxy: Proxy) -> None:
    token = warmed.started().token
    lose(proxy, "complete")
    lose(proxy, "complete")

    assert warmed.complete(token).case == "ok"
    assert len(proxy.requests_with(scripts.load("complete").sha)) == 3


def test_a_lost_request_is_resent(warmed: RecordHarness, proxy: Proxy) -> None:
    proxy.lose_request(to=scripts.load("begin").sha)

    assert warmed.begin().case == "begun"
    assert_sent_twice(proxy, "begin")


def test_while_the_script_is_loaded(proxied: RecordHarness, proxy: Proxy) -> None:
    proxied.client.script_flush()
    proxy.lose_reply(to="begin: requests the right to run")

    answer = proxied.begin()

    assert proxy.pending == 0
    assert (answer.case, answer.stored.attempt) == ("begun", 1)


class TestNoReplyAtAll:
    """The call fails, and its message carries the execution id to the next delivery."""

    def test_begin_is_resent_and_answered(self, proxy: Proxy, harness: RecordHarness) -> None:
        warm(harness)
        short_timeout = RecordHarness(store_at(proxy.url + "?socket_timeout=1"), harness.client)
        proxy.swallow_reply(to=scripts.load("begin").sha)

        answer = short_timeout.begin()

        assert (answer.case, answer.stored.attempt) == ("begun", 1)

    def test_a_begin_that_timed_out_is_continued_by_the_next_delivery(
        self, proxy: Proxy, harness: RecordHarness
    ) -> None:
        warm(harness)
        short_timeout = RecordHarness(store_at(proxy.url + "?socket_timeout=0.1"), harness.client)
        for _ in range(3):
            proxy.swallow_reply(to=scripts.load("begin").sha)

        with pytest.raises(StoreUnavailableError, match="cannot be reached"):
            short_timeout.begin(execution_id=OWNER)
        eventually(lambda: harness.raw is not None)
        assert harness.record().state is State.STARTED

        assert harness.begin(task_id=SECOND).case == "held"
        answer = harness.begin(unanswered_ids=OWNER)
        assert (answer.case, answer.stored.attempt) == ("begun", 1)

    def test_a_late_reply_is_waited_for(self, warmed: RecordHarness, proxy: Proxy) -> None:
        proxy.delay_reply(to=scripts.load("begin").sha, seconds=0.3)

        sent = time.monotonic()
        assert warmed.begin().case == "begun"

        assert time.monotonic() - sent >= 0.3
        assert len(proxy.requests_with(scripts.load("begin").sha)) == 1
