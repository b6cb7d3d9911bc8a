"""Lost replies: the command is resent and gets the first reply."""

from __future__ import annotations

import time
from typing import Any

import pytest

from celery_idempotent.core.record import State
from celery_idempotent.core.store import run_sync, scripts
from celery_idempotent.core.store.clock import LATE_AFTER
from celery_idempotent.errors import StoreUnavailableError
from tests.faults.proxy import Proxy
from tests.store.record_harness import CALLS, OWNER, SECOND, Harness, store_at
from tests.waiting import eventually


def warm(harness: Harness) -> None:
    """Load all scripts, so that each call is one request."""
    for name in ("begin", "settle", "extend", "abandon", "queue", "forget"):
        harness.client.script_load(scripts.load(name).source)


@pytest.fixture
def warmed(proxied: Harness) -> Harness:
    warm(proxied)
    run_sync(proxied.store.ping())
    return proxied


def lose(proxy: Proxy, script: str) -> None:
    proxy.lose_reply(to=scripts.load(script).sha)


def assert_sent_twice(proxy: Proxy, script: str) -> None:
    assert proxy.pending == 0
    assert len(proxy.requests_with(scripts.load(script).sha)) == 2


@pytest.mark.parametrize(
    ("given", "attempt"),
    [(None, 1), (Harness.dead, 2), (Harness.held_for_retry, 1)],
    ids=["absent", "a takeover", "a retry"],
)
def test_begin(warmed: Harness, proxy: Proxy, given: Any, attempt: int) -> None:
    before = given(warmed).token if given else 0
    proxy.requests.clear()
    lose(proxy, "begin")

    answer = warmed.begin()

    assert_sent_twice(proxy, "begin")
    assert (answer.case, answer.stored.attempt) == ("begun", attempt)
    assert answer.record == warmed.record()
    assert answer.token > before


@pytest.mark.parametrize(
    "call", ["complete", "fail", "release", "hold", "extend", "save_step", "reserve", "sent"]
)
def test_other_calls(warmed: Harness, proxy: Proxy, call: str) -> None:
    script = {"extend": "extend", "save_step": "extend", "reserve": "queue"}.get(call, "settle")
    given = {"reserve": Harness.forget, "sent": Harness.sending}
    given.get(call, Harness.started)(warmed)
    token = warmed.record().token if warmed.raw else 0
    proxy.requests.clear()
    lose(proxy, script)

    send = CALLS.get(call, Harness.mark_sent)
    assert send(warmed, token).case == ("reserved" if call == "reserve" else "ok")

    assert_sent_twice(proxy, script)


def test_two_lost_replies_in_a_row(warmed: Harness, proxy: Proxy) -> None:
    token = warmed.started().token
    lose(proxy, "settle")
    lose(proxy, "settle")

    assert warmed.complete(token).case == "ok"
    assert len(proxy.requests_with(scripts.load("settle").sha)) == 3


def test_a_lost_request_is_resent(warmed: Harness, proxy: Proxy) -> None:
    proxy.lose_request(to=scripts.load("begin").sha)

    assert warmed.begin().case == "begun"
    assert_sent_twice(proxy, "begin")


def test_while_the_script_is_loaded(proxied: Harness, proxy: Proxy) -> None:
    proxied.client.script_flush()
    proxy.lose_reply(to="begin: requests the right to run")

    answer = proxied.begin()

    assert proxy.pending == 0
    assert (answer.case, answer.stored.attempt) == ("begun", 1)


def test_the_next_copy_of_a_begin_is_sent_after_the_deadline(warmed: Harness, proxy: Proxy) -> None:
    """What Redis executes later, after an outage of the network, does nothing."""
    lose(proxy, "begin")
    lose(proxy, "settle")
    began_at = time.monotonic()
    token = warmed.begin().token
    assert time.monotonic() - began_at >= LATE_AFTER

    began_at = time.monotonic()
    warmed.complete(token)

    assert time.monotonic() - began_at < LATE_AFTER, "its token is enough"
    first, second = proxy.requests_with(scripts.load("begin").sha)
    assert first != second


class TestNoReplyAtAll:
    def test_begin_is_resent_and_answered(self, proxy: Proxy, harness: Harness) -> None:
        warm(harness)
        short_timeout = Harness(store_at(proxy.url + "?socket_timeout=1"), harness.client)
        proxy.swallow_reply(to=scripts.load("begin").sha)

        answer = short_timeout.begin()

        assert (answer.case, answer.stored.attempt) == ("begun", 1)

    def test_a_begin_that_timed_out_holds_the_key(self, proxy: Proxy, harness: Harness) -> None:
        warm(harness)
        short_timeout = Harness(store_at(proxy.url + "?socket_timeout=0.1"), harness.client)
        for _ in range(3):
            proxy.swallow_reply(to=scripts.load("begin").sha)

        with pytest.raises(StoreUnavailableError, match="cannot be reached"):
            short_timeout.begin(execution_id=OWNER)
        eventually(lambda: harness.raw is not None)
        assert harness.record().state is State.STARTED

        assert harness.begin(task_id=SECOND).case == "held"
        answer = harness.begin(execution_id=OWNER)
        assert (answer.case, answer.stored.attempt) == ("begun", 1)

    def test_a_late_reply_is_waited_for(self, warmed: Harness, proxy: Proxy) -> None:
        proxy.delay_reply(to=scripts.load("begin").sha, seconds=0.3)

        sent = time.monotonic()
        assert warmed.begin().case == "begun"

        assert time.monotonic() - sent >= 0.3
        assert len(proxy.requests_with(scripts.load("begin").sha)) == 1
