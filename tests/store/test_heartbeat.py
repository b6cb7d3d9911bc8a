"""The heartbeat with a real server."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from celery_idempotent.core.clock import lease_now
from celery_idempotent.core.lease import heartbeat
from celery_idempotent.core.lease.heartbeat import Heartbeat
from celery_idempotent.core.store import commands, run_sync, scripts
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.transport.server import ServerTransport
from tests.faults.proxy import Proxy
from tests.flow.deliveries import PACKAGE, SignalAtLine
from tests.servers.redis_server import RedisServer
from tests.store import deployments
from tests.store.record_harness import (
    CALLS,
    RENEWED_MS,
    SECOND,
    Harness,
    Holder,
    await_later_deadline,
    calls,
    deadline,
    keys,
    store_at,
)
from tests.waiting import POLL_INTERVAL, SOON, eventually

#: The other files test the scripts on every kind of server.
pytestmark = deployments.on(deployments.PLAIN[0])

EXTEND = scripts.load("extend").sha


def extensions(harness: Harness) -> int:
    """Return how many extensions the server has replied to."""
    return calls(harness.client, "evalsha") + calls(harness.client, "eval")


def test_a_lease_outlives_its_length(harness: Harness) -> None:
    holder = Holder(harness, harness.key).renewed()

    first_end = holder.begun.at_ms
    eventually(lambda: harness.now_ms() > first_end + 2 * RENEWED_MS)
    assert harness.begin(task_id=SECOND).case == "held"
    assert holder.lease.trusted
    assert not holder.losses


def test_stop_renewal_ends_the_extensions(harness: Harness) -> None:
    gone, other = (Holder(harness, key).renewed() for key in keys(2))

    gone.stop_renewal()
    # A request that was being sent extends both; the next one extends one.
    await_later_deadline(harness, other.lease.key, than=deadline(harness, other.lease.key))
    last = deadline(harness, gone.lease.key)

    await_later_deadline(harness, other.lease.key, than=deadline(harness, other.lease.key))
    assert deadline(harness, gone.lease.key) == last
    assert harness.heart.leases() == (other.lease,)


def test_a_long_execution_is_logged_with_its_place(harness: Harness, caplog: Any) -> None:
    caplog.set_level("INFO", "celery_idempotent")
    holders = [Holder(harness, key) for key in keys(2)]
    for holder in holders:
        holder.lease.started_at, holder.lease.log_due = lease_now() - 1_000, 0.0
        holder.renewed()

    eventually(lambda: caplog.messages)
    for holder in holders:
        await_later_deadline(harness, holder.lease.key, than=holder.begun.at_ms + RENEWED_MS)

    (line,) = caplog.messages  # the next one when the time has doubled
    assert re.match(r"The execution of \S+ and 1 others has lasted 100\d s, and is at /", line)
    assert re.search(r"test_heartbeat\.py:\d+ test_a_long\w+ > \S+waiting\.py:\d+ eventually", line)


def test_a_body_that_is_stuck_in_a_handler_of_the_log_keeps_its_lease(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "celery_idempotent")
    holder = Holder(harness, harness.key)
    holder.lease.log_due = 0.0

    with caplog.handler.lock:  # as while it writes to a pipe that is full
        holder.renewed()
        await_later_deadline(harness, harness.key, than=holder.begun.at_ms + 3 * RENEWED_MS)

    eventually(lambda: "has lasted" in caplog.text)


@pytest.mark.exhaustive
def test_leases_share_a_round_trip(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    trips: list[int] = []
    send = ServerTransport.send

    def counting(transport: ServerTransport, *commands: Sequence[Any], **how: Any) -> Any:
        trips.append(len(commands))
        return send(transport, *commands, **how)

    harness.client.script_load(scripts.load("extend").source)
    # Long enough for all of them to begin within one interval on a busy machine.
    holders = [Holder(harness, key, lease_ms=3_000) for key in keys(20)]
    monkeypatch.setattr(ServerTransport, "send", counting)
    together = lease_now()
    for holder in holders:
        holder.lease.renewed(together)
        holder.renewed()

    eventually(lambda: len(trips) >= 3)
    assert trips[:3] == [20, 20, 20]


def test_a_lease_not_yet_due_waits_for_its_turn(proxied: Harness, proxy: Proxy) -> None:
    one, other = keys(2)
    Holder(proxied, one, 300).renewed()
    late = Holder(proxied, other, 60_000).renewed()

    eventually(lambda: len(proxy.requests_with(EXTEND)) >= 3)
    assert deadline(proxied, late.lease.key) == late.begun.at_ms
    assert all(b"0" * 21 + b"1" not in request for request in proxy.requests_with(EXTEND))


def test_a_short_lease_is_not_kept_waiting_by_a_long_one(harness: Harness) -> None:
    one, other = keys(2)
    short, long = Holder(harness, one, 300), Holder(harness, other, 60_000).renewed()
    # The thread sleeps for twenty seconds.
    eventually(lambda: harness.heart.renewer(harness.store).wakes_at == long.lease.due)

    short.renewed()

    eventually(lambda: deadline(harness, short.lease.key) > short.begun.at_ms, seconds=2)


@pytest.mark.exhaustive
def test_a_missing_reply_does_not_lose_the_lease(proxied: Harness, proxy: Proxy) -> None:
    # The connection stays open without a reply, as behind a firewall that has dropped it.
    holder = Holder(proxied, proxied.key, lease_ms=1200)
    proxy.swallow_reply(to=EXTEND)

    holder.renewed()

    eventually(lambda: proxied.now_ms() > holder.begun.at_ms + 1200)
    assert proxy.pending == 0
    assert proxied.begin(task_id=SECOND).case == "held"
    assert holder.lease.trusted


@pytest.mark.parametrize("successor", ["runs", "has completed", "none"])
def test_a_lease_that_is_taken_over_is_noticed_once(harness: Harness, successor: str) -> None:
    holder = Holder(harness, harness.key)
    harness.forget()
    if successor != "none":
        token = harness.started(task_id=SECOND).token
    if successor == "has completed":
        harness.complete(token)
    before = harness.raw

    holder.renewed()

    eventually(lambda: holder.losses > 0)
    assert holder.lease.lost
    assert not holder.lease.trusted
    assert harness.heart.leases() == ()
    assert harness.raw == before
    assert holder.losses == 1


@pytest.mark.parametrize("end", ["complete", "fail", "hold"])
def test_the_end_of_the_execution_does_not_lose_the_lease(harness: Harness, end: str) -> None:
    holder = Holder(harness, harness.key)
    CALLS[end](harness, holder.lease.token)
    before = extensions(harness)

    holder.renewed()  # as if a renewal was in progress when the outcome was stored

    eventually(lambda: extensions(harness) >= before + 3)
    assert not holder.losses
    assert not holder.lease.lost


def test_a_reply_after_stop_renewal_is_ignored(proxied: Harness, proxy: Proxy) -> None:
    released, other = (Holder(proxied, key) for key in keys(2))
    run_sync(proxied.store.execute(commands.forget(released.lease.key)))
    for holder in (released, other):
        proxy.delay_reply(to=EXTEND, seconds=0.2)
        holder.renewed()
    eventually(lambda: bool(proxy.requests_with(EXTEND)))

    released.stop_renewal()

    eventually(lambda: deadline(proxied, other.lease.key) > other.begun.at_ms + RENEWED_MS)
    assert released.losses == 0


def test_the_thread_starts_with_the_first_lease(harness: Harness) -> None:
    before = {*threading.enumerate()}  # those of other tests may end meanwhile
    heart = Heartbeat()
    assert {*threading.enumerate()} <= before

    holders = [Holder(harness, key).renewed(heart) for key in keys(3)]

    (thread,) = {*threading.enumerate()} - before
    assert (thread.name, thread.daemon) == ("idempotency-heartbeat", True)
    for holder in holders:
        holder.stop_renewal(heart)


def test_a_thread_that_is_starting_is_not_replaced(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under gevent, other greenlets go on while a thread starts."""
    one, other = (Holder(harness, key) for key in keys(2))
    start = threading.Thread.start

    def start_later(thread: threading.Thread) -> None:
        monkeypatch.undo()
        other.renewed()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    one.renewed()
    assert not caplog.text


def test_the_thread_ends_without_a_lease_for_a_while(harness: Harness, monkeypatch: Any) -> None:
    monkeypatch.setattr(heartbeat, "IDLE_SECONDS", 0.01)
    for key in keys(2):
        holder = Holder(harness, key).renewed()
        thread = harness.heart.renewer(harness.store).thread
        assert thread is not None
        await_later_deadline(harness, key, than=holder.begun.at_ms + RENEWED_MS)
        holder.stop_renewal()

        thread.join(SOON)
        assert not thread.is_alive()


def test_an_error_leaves_the_others(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = (Holder(harness, key) for key in keys(2))

    def explode(raw: bytes) -> None:
        raise RuntimeError("in a handler")

    bad.lease.on_lost = explode
    run_sync(harness.store.execute(commands.forget(bad.lease.key, force=True)))

    bad.renewed()
    good.renewed()

    eventually(lambda: deadline(harness, good.lease.key) > good.begun.at_ms + RENEWED_MS)
    assert "in a handler" in caplog.text
    assert harness.heart.leases() == (good.lease,)


def test_an_unreadable_record_is_logged_and_other_leases_are_extended(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = (Holder(harness, key) for key in keys(2))
    name = harness.store.name(bad.lease.key)
    harness.client.delete(name)
    harness.client.rpush(name, "no record")
    harness.client.expire(name, 60)

    for holder in (bad, good):
        holder.renewed()

    for renewals in (1, 3):
        await_later_deadline(harness, good.lease.key, than=good.begun.at_ms + renewals * RENEWED_MS)
    assert caplog.text.count(f"The lease of {bad.lease.key} could not be extended") == 1
    assert not bad.losses, "the server has not replied lost"


def test_leases_of_two_stores_are_extended(harness: Harness, server: RedisServer) -> None:
    elsewhere = Harness(store_at(server.url, prefix="other"), harness.client)
    for each in (harness, elsewhere):
        holder = Holder(each, each.key).renewed(harness.heart)
        await_later_deadline(each, each.key, than=holder.begun.at_ms + RENEWED_MS)
    await_later_deadline(harness, harness.key, than=deadline(harness, harness.key))


class TestFrozenServer:
    def test_trust_ends_and_comes_back(self, harness: Harness, server: RedisServer) -> None:
        holder = Holder(harness, harness.key).renewed()
        assert holder.lease.trusted

        server.pause()
        try:
            eventually(lambda: not holder.lease.trusted)
            assert not holder.losses, "the server has not replied lost"
        finally:
            server.resume()

        eventually(lambda: holder.lease.trusted)
        assert harness.begin(task_id=SECOND).case == "held"

    @pytest.mark.exhaustive
    def test_leases_on_other_servers_are_extended(self, harness: Harness) -> None:
        """As many servers as would use up the lease, if one request followed the other."""
        with ExitStack() as stack:
            others = [stack.enter_context(RedisServer.start(deployments.ANY)) for _ in range(6)]
            frozen = []
            for other in others:
                there = Harness(store_at(other.url), stack.enter_context(other.client()))
                frozen.append(Holder(there, there.key, 2_000).renewed(harness.heart))
            holder = Holder(harness, harness.key, 2_000).renewed()
            for other in others:
                other.pause()

            while harness.now_ms() < holder.begun.at_ms + 2 * 2_000:
                time.sleep(POLL_INTERVAL)
                assert holder.lease.trusted
                assert harness.begin(task_id=SECOND).case == "held"
            assert not any(each.lease.trusted for each in frozen)
            for each in (*frozen, holder):
                each.stop_renewal(harness.heart)

    def test_an_unreachable_server_is_logged_and_tried_again(
        self, harness: Harness, server: RedisServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        holder = Holder(harness, harness.key)
        server.kill()

        holder.renewed()

        eventually(lambda: "1 lease not extended" in caplog.text)
        assert not holder.losses
        server.restart()
        eventually(lambda: holder.losses == 1)  # the server restarted empty


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_has_its_own_heartbeat(harness: Harness) -> None:
    def is_renewed(holder: Holder) -> None:
        await_later_deadline(harness, holder.lease.key, deadline(harness, holder.lease.key))
        assert harness.heart.leases() == (holder.lease,)

    own, childs = (Holder(harness, key) for key in keys(2))
    is_renewed(own.renewed())
    if (child := os.fork()) == 0:
        code = 1
        with suppress(BaseException):
            assert harness.heart.leases() == ()
            is_renewed(childs.renewed())
            code = 7
        os._exit(code)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    is_renewed(own)


# A heartbeat thread that is interrupted, dies or is stuck: leases are still extended.


#: Where a signal may be delivered: the package, and Python's own modules for threads.
FILES = (PACKAGE, threading.__file__)


class SignalError(Exception):
    """Raised by a signal handler of the user."""


@pytest.fixture
def signal_error() -> Iterator[None]:
    def trigger(*_: Any) -> None:
        raise SignalError

    before = signal.signal(signal.SIGALRM, trigger)
    yield
    signal.signal(signal.SIGALRM, before)


def interrupt_at(at: int, call: Any, *args: Any) -> str:
    """Call it and raise at its `at`-th line; return that place, or nothing if there is none."""
    injected = SignalAtLine(at, signal.SIGALRM, FILES)
    # Python's own condition variables raise RuntimeError after the interruption.
    with suppress(SignalError, RuntimeError), injected.armed():
        call(*args)
    return injected.where


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("method", ["start_renewal", "stop_renewal"])
@pytest.mark.exhaustive
def test_a_signal_at_any_line_does_not_stop_the_heartbeat(
    harness: Harness, signal_error: None, first: bool, method: str
) -> None:
    """The first lease starts the thread, which is most of the work of `start_renewal`."""
    at = 0
    while True:
        at += 1
        heart = Heartbeat()
        interrupted, other = (Holder(harness, key) for key in keys(2))
        if not first:
            other.start_renewal(heart)
        if method == "stop_renewal":
            interrupted.start_renewal(heart)
        where = interrupt_at(at, getattr(interrupted, method), heart)

        other.start_renewal(heart)
        interrupted.stop_renewal(heart)
        try:
            await_later_deadline(harness, other.lease.key, than=deadline(harness, other.lease.key))
        except BaseException as error:
            error.add_note(f"interrupted at {where}")
            raise
        assert heart.leases() == (other.lease,)
        other.stop_renewal(heart)
        harness.client.flushall()
        if not where:
            break
    assert at > 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_died_is_replaced(harness: Harness, monkeypatch: Any, caplog: Any) -> None:
    replaced: list[bool] = []
    harness.heart.on_replaced = lambda: replaced.append(True)
    first, second = (Holder(harness, key) for key in keys(2))
    with monkeypatch.context() as patch:
        patch.setattr(RecordStore, "extend", lambda *_: (_ for _ in ()).throw(SystemExit))
        first.renewed()
        thread = harness.heart.renewer(harness.store).thread
        eventually(lambda: not thread.is_alive())
    assert not caplog.records

    second.renewed()

    for holder in (first, second):
        await_later_deadline(harness, holder.lease.key, than=deadline(harness, holder.lease.key))
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("ERROR", "The idempotency heartbeat has died; another thread goes on with 2 leases")
    ]
    assert replaced == [True]


def test_a_thread_that_is_stuck_is_replaced(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (Holder(harness, key, lease_ms=900) for key in keys(2))
    extend, free = RecordStore.extend, threading.Event()

    def stuck(*args: Any) -> Any:
        monkeypatch.undo()
        free.wait(30)
        return extend(*args)

    monkeypatch.setattr(RecordStore, "extend", stuck)
    first.renewed()
    eventually(lambda: not first.lease.trusted)  # the execution's `check()` raises

    def noticed() -> bool:
        second.renewed()
        second.stop_renewal()
        return bool(caplog.records)

    eventually(noticed)
    await_later_deadline(harness, first.lease.key, than=deadline(harness, first.lease.key))
    eventually(lambda: first.lease.trusted)
    (record,) = (r for r in caplog.records if r.levelname == "ERROR")
    assert "s late; another thread goes on with" in record.message
    free.set()
