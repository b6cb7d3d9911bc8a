"""A reply gets lost on its way: the client sends again, and the answer is the first one's."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from celery_idempotent.errors import StoreUnavailableError
from celery_idempotent.record.record import State
from celery_idempotent.store import scripts
from tests.faults.proxy import Proxy
from tests.store.record_harness import HOLD_MS, OWNER, SECOND, Answer, Scene, store_at
from tests.waiting import eventually


def warm(scene: Scene) -> None:
    """The server knows the scripts: one request is one call."""
    for name in ("begin", "complete", "fail", "release", "extend", "save_step", "abandon",
                 "reserve", "mark_continued", "forget", "get"):  # fmt: skip
        scene.client.script_load(scripts.load(name).source)


@pytest.fixture
def warmed(proxied: Scene) -> Scene:
    warm(proxied)
    proxied.store.ping()
    return proxied


def lose(proxy: Proxy, script: str) -> None:
    proxy.lose_reply(to=scripts.load(script).sha)


def assert_sent_twice(proxy: Proxy, script: str) -> None:
    assert proxy.pending == 0
    assert len(proxy.requests_with(scripts.load(script).sha)) == 2


def test_begin(warmed: Scene, proxy: Proxy) -> None:
    lose(proxy, "begin")

    answer = warmed.begin()

    assert_sent_twice(proxy, "begin")
    assert (answer.case, answer.there.attempt) == ("begun", 1)
    assert answer.record == warmed.record()
    assert warmed.complete(answer.token).case == "ok"


def test_begin_that_takes_over(warmed: Scene, proxy: Proxy) -> None:
    dead = warmed.expired()
    proxy.requests.clear()
    lose(proxy, "begin")

    answer = warmed.begin()

    assert_sent_twice(proxy, "begin")
    assert (answer.case, answer.there.attempt) == ("begun", 2)
    assert answer.token > dead.token


def test_begin_of_a_retry(warmed: Scene, proxy: Proxy) -> None:
    warmed.held_for_retry()
    proxy.requests.clear()
    lose(proxy, "begin")

    assert warmed.begin().case == "begun"
    assert_sent_twice(proxy, "begin")


def test_begin_that_finds_the_task_poisoned(warmed: Scene, proxy: Proxy) -> None:
    warmed.started()
    warmed.abandon()
    proxy.requests.clear()
    lose(proxy, "begin")

    answer = warmed.begin(max_attempts=1)

    assert_sent_twice(proxy, "begin")
    assert answer.case == "finished"
    assert answer.there.body == b"poisoned"


@pytest.mark.parametrize(
    ("script", "call"),
    [
        ("complete", lambda scene, token: scene.complete(token)),
        ("fail", lambda scene, token: scene.fail(token)),
        ("release", lambda scene, token: scene.release(token)),
        ("release", lambda scene, token: scene.release(token, HOLD_MS)),
        ("extend", lambda scene, token: scene.extend(token)),
        ("save_step", lambda scene, token: scene.step(token)),
        ("abandon", lambda scene, token: scene.abandon()),
        ("abandon", lambda scene, token: scene.abandon(grace_ms=1000)),
    ],
    ids=["complete", "fail", "release", "hold", "extend", "save_step", "abandon", "grace"],
)
def test_what_ends_or_goes_on(
    warmed: Scene, proxy: Proxy, script: str, call: Callable[[Scene, int], Answer]
) -> None:
    token = warmed.started().token
    lose(proxy, script)

    answer = call(warmed, token)

    assert_sent_twice(proxy, script)
    assert answer.case == "ok"


def test_step_is_kept_once(warmed: Scene, proxy: Proxy) -> None:
    token = warmed.started().token
    warmed.step(token, "one", b"1")
    once = warmed.record().body
    warmed.forget()
    token = warmed.started().token
    lose(proxy, "save_step")

    warmed.step(token, "one", b"1")

    assert warmed.record().body == once


def test_reserve(warmed: Scene, proxy: Proxy) -> None:
    lose(proxy, "reserve")

    assert warmed.reserve().case == "reserved"
    assert_sent_twice(proxy, "reserve")
    assert warmed.begin().case == "begun"


def test_dispatched(warmed: Scene, proxy: Proxy) -> None:
    warmed.completed()
    lose(proxy, "mark_continued")

    assert warmed.dispatched().case == "ok"
    assert_sent_twice(proxy, "mark_continued")


def test_look_up(warmed: Scene, proxy: Proxy) -> None:
    done = warmed.completed()
    lose(proxy, "get")

    record = warmed.store.look_up(warmed.key)

    assert_sent_twice(proxy, "get")
    assert record is not None
    assert record.token == done.token


def test_two_in_a_row(warmed: Scene, proxy: Proxy) -> None:
    token = warmed.started().token
    lose(proxy, "complete")
    lose(proxy, "complete")

    assert warmed.complete(token).case == "ok"
    assert len(proxy.requests_with(scripts.load("complete").sha)) == 3


def test_a_request_that_never_arrived_is_no_different(warmed: Scene, proxy: Proxy) -> None:
    proxy.lose_request(to=scripts.load("begin").sha)

    assert warmed.begin().case == "begun"
    assert_sent_twice(proxy, "begin")


def test_while_the_script_is_being_taught(proxied: Scene, proxy: Proxy) -> None:
    proxied.client.script_flush()
    proxy.lose_reply(to="begin: asks for the right to run")

    answer = proxied.begin()

    assert proxy.pending == 0
    assert (answer.case, answer.there.attempt) == ("begun", 1)


class TestNoReplyAtAll:
    """The client gives up, and its message carries the begin's id to the next pass."""

    def test_begin_is_resent_and_answered(self, proxy: Proxy, scene: Scene) -> None:
        warm(scene)
        impatient = Scene(store_at(proxy.url + "?socket_timeout=1"), scene.client)
        proxy.swallow_reply(to=scripts.load("begin").sha)

        answer = impatient.begin()

        assert (answer.case, answer.there.attempt) == ("begun", 1)

    def test_begin_that_is_given_up_is_known_to_the_next_pass(
        self, proxy: Proxy, scene: Scene
    ) -> None:
        warm(scene)
        impatient = Scene(store_at(proxy.url + "?socket_timeout=0.1"), scene.client)
        for _ in range(3):
            proxy.swallow_reply(to=scripts.load("begin").sha)

        with pytest.raises(StoreUnavailableError, match="cannot be reached"):
            impatient.begin(owner=OWNER)
        eventually(lambda: scene.raw is not None)
        assert scene.record().state is State.STARTED

        assert scene.begin(task_id=SECOND).case == "held"
        answer = scene.begin(prior=OWNER)
        assert (answer.case, answer.there.attempt) == ("begun", 1)

    def test_a_reply_that_comes_late_is_waited_for(self, warmed: Scene, proxy: Proxy) -> None:
        proxy.delay_reply(to=scripts.load("begin").sha, seconds=0.3)

        sent = time.monotonic()
        assert warmed.begin().case == "begun"

        assert time.monotonic() - sent >= 0.3
        assert len(proxy.requests_with(scripts.load("begin").sha)) == 1
