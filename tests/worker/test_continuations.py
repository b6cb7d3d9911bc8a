"""The continuation of a call is sent once, even if its message is delivered twice.

The message of a worker that dies after storing the outcome is redelivered. The second delivery
sends only what the first one has not sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from celery import chain, chord, group
from celery.canvas import Signature
from celery.result import AsyncResult
from kombu.exceptions import EncodeError
from redis import Redis

from celery_idempotent import ResultNotStoredError, State
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON, eventually
from tests.worker.canvas_tasks import follow_up, hand_over, hand_over_badly, report
from tests.worker.harness import FAST_REDELIVERY, OpenShop, Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import OutOfStockError, final, pack


def linked(task: Signature, order: str) -> AsyncResult:
    return task.apply_async(link=report.s(order))


def chained(task: Signature, order: str) -> AsyncResult:
    return chain(task, report.s(order)).delay()


def in_a_chord(task: Signature, order: str) -> AsyncResult:
    return chord([task, pack.s(f"another {order}")])(report.s(order))


def in_a_group_in_a_chain(task: Signature, order: str) -> AsyncResult:
    members = group(task.set(immutable=True), pack.si(f"another {order}"))
    return chain(pack.si(f"first {order}"), members, report.s(order)).delay()


def before_a_chord(task: Signature, order: str) -> AsyncResult:
    members = [follow_up.s(f"one {order}"), follow_up.s(f"two {order}")]
    return chain(task, chord(members, report.s(order))).delay()


CANVASES = [linked, chained, in_a_chord, in_a_group_in_a_chain, before_a_chord]
#: The default of ``idempotency_lease``, in seconds.
LEASE = 60
#: The keys in which Celery counts the finished parts of chords.
CHORD_COUNTS = "celery-taskset-meta-*.j"
MOMENTS = ["before", "after"]
#: Celery counts a task in its chord after it has stored the result.
DEATHS = [*product(CANVASES, MOMENTS), (in_a_chord, "stored"), (in_a_group_in_a_chain, "stored")]


@pytest.fixture(scope="module")
def dying(shared_shop: Shop) -> None:
    """Published together, because the pool may need five seconds to detect a dead process."""
    shared_shop.app.set_current()
    for canvas, moment in DEATHS:
        name = f"{canvas.__name__} {moment}"
        shared_shop.ledger.kill_once(moment, name)
        canvas(pack.s(name).set(task_id=name), name)


@pytest.mark.core
@pytest.mark.exhaustive
@pytest.mark.usefixtures("dying")
@pytest.mark.parametrize(("canvas", "moment"), DEATHS)
def test_continuation_is_sent_once_if_the_worker_dies_before_while_or_after_it_is_sent(
    shop: Shop, ledger: Ledger, canvas: Callable[..., AsyncResult], moment: str
) -> None:
    name = f"{canvas.__name__} {moment}"
    # If a child dies before its parent has read that it accepted the job, Celery gives the job
    # to another child, and the lease ends by itself.
    eventually(lambda: ledger.notes(name), "the continuation has run", LEASE + SOON)
    shop.wait_until_empty(LEASE + SOON)

    (note,) = ledger.notes(name)
    (run,) = ledger.runs(name)
    record = pack.idempotency_record(name)
    assert (record.state, record.token) == (State.COMPLETED, run.token)
    # Celery finds the success, or its redelivery is a replay.
    assert pack.AsyncResult(name).get(timeout=SOON) == record.result
    assert run.attempt == 1
    if canvas is in_a_chord:
        first, second = json.loads(note)
        assert first["receipt"] != second["receipt"], "the chord counts each member once"


@pytest.mark.core
@pytest.mark.parametrize("canvas", CANVASES)
def test_continuation_is_sent_once_if_the_message_is_redelivered(
    shop: Shop, ledger: Ledger, order: str, canvas: Callable[..., AsyncResult]
) -> None:
    others = shop.redis.keys(CHORD_COUNTS)
    canvas(pack.s(order).set(task_id=order, queue="kept"), order)
    message = shop.deliver_kept(order)
    eventually(lambda: ledger.notes(order), "the continuation has run")
    shop.wait_until_empty()

    shop.replay(message, order)
    assert len(ledger.notes(order)) == 1
    assert len(ledger.runs(order)) == 1
    assert shop.redis.keys(CHORD_COUNTS) == others, "no chord counts the redelivery"


# Celery cannot publish the callback, stores FAILURE and sends ``task_failure``.
@pytest.mark.core
@pytest.mark.exhaustive
def test_callback_is_sent_after_the_death_of_the_broker(open_shop: OpenShop, order: str) -> None:
    with RedisServer.start(config={"appendonly": "yes"}) as broker:
        url = f"{broker.url.rpartition('/')[0]}/0"
        timeouts = {"socket_timeout": 1, "socket_connect_timeout": 1}
        settings = {
            "broker_url": url,
            "broker_transport_options": {**timeouts, **FAST_REDELIVERY},
            "task_publish_retry": False,
            "broker_connection_max_retries": None,
        }
        with open_shop(**settings) as shop, Redis.from_url(url) as client:
            worker = shop.start_worker()
            result = shop.ledger.start(pack, order, task_id=order, link=report.s(order))
            broker.kill()
            shop.ledger.release(order)
            eventually(lambda: result.state == "FAILURE", "the callback was not published")
            broker.restart()
            # kombu's transport does not always survive the death of its server.
            worker.container.restart()

            eventually(lambda: shop.ledger.notes(order), "the callback has run")
            # Read anew each time: a result that is ready, the FAILURE too, is read once.
            eventually(lambda: pack.AsyncResult(result.id).state == "SUCCESS", "it is replaced")
            eventually(lambda: not client.hlen("unacked"), "the messages are acknowledged")
            assert len(shop.ledger.runs(order)) == 1
            assert len(shop.ledger.notes(order)) == 1


# ``self.replace``
@pytest.mark.core
def test_task_and_duplicates_get_the_result_of_a_replacement(ledger: Ledger, order: str) -> None:
    receipts = [hand_over.delay(order).get(timeout=SOON) for _ in range(3)]

    assert receipts == [pack.delay(f"replacement of {order}").get(timeout=SOON)] * 3
    assert len(ledger.runs(order)) == len(ledger.runs(f"replacement of {order}")) == 1


@pytest.mark.core
def test_replacement_that_cannot_be_published_releases_the_key(ledger: Ledger, order: str) -> None:
    with pytest.raises(EncodeError):
        hand_over_badly.delay(order).get(timeout=SOON)

    assert hand_over_badly.delay(order).get(timeout=SOON) == "handled here"
    assert [run.end for run in ledger.runs(order)] == ["EncodeError", "returned"]


@pytest.mark.core
@pytest.mark.parametrize("to", ["silent", "ignored"])
def test_duplicates_do_not_wait_for_an_ignored_result(ledger: Ledger, order: str, to: str) -> None:
    replaced = hand_over.delay(order, to)
    ledger.wait_for_run(f"replacement of {order}")
    ledger.wait_for_signal(replaced.id, "completed")

    with pytest.raises(ResultNotStoredError, match="ignore_result"):
        hand_over.delay(order, to).get(timeout=SOON)

    assert len(ledger.runs(order)) == 1


@pytest.mark.core
def test_errback_of_a_failed_replacement_runs_once(shop: Shop, ledger: Ledger, order: str) -> None:
    """A redelivery of the replaced message sends nothing."""
    errback = report.si("failed", order)
    hand_over.apply_async((order, "flaky"), task_id=order, link_error=errback, queue="kept")
    message = shop.deliver_kept(order)
    eventually(lambda: ledger.notes(order), "the errback has run")

    shop.replay(message, order)
    assert len(ledger.notes(order)) == 1
    assert len(ledger.runs(order)) == 1


@pytest.mark.core
def test_nested_canvas_that_is_published_twice_completes_twice(ledger: Ledger, order: str) -> None:
    def nested(name: str) -> Any:
        members = group(chain(pack.s(order), follow_up.s(order)), pack.s(order))
        return chord([members, pack.s(f"other {order}")], report.s(name)).delay()

    ends = [nested(f"{name} {order}").get(timeout=SOON) for name in ("one", "two")]

    assert ends[0] == ends[1]
    assert len(ledger.runs(order)) == 1
    assert [len(ledger.notes(f"{name} {order}")) for name in ("one", "two")] == [1, 1]


# A duplicate with another task id is a separate call: its replay continues its own canvas.
def test_two_chains_with_the_same_running_head_both_complete(ledger: Ledger, order: str) -> None:
    ledger.hold(order)
    first = chain(pack.s(order), follow_up.s(f"first {order}")).delay()
    ledger.wait_for_run(order)
    second = chain(pack.s(order), follow_up.s(f"second {order}")).delay()
    ledger.wait_for_signal(second.parent.id, "conflicted")
    ledger.release(order)

    assert first.get(timeout=SOON)[0] == second.get(timeout=SOON)[0]
    assert ledger.notes(f"first {order}") == ledger.notes(f"second {order}") == ["followed up"]
    assert len(ledger.runs(order)) == 1


def test_chord_with_duplicates_in_its_header_runs_its_body_once(ledger: Ledger, order: str) -> None:
    header = [pack.s(order), pack.s(f"another {order}"), pack.s(order), pack.s(order)]

    receipts = chord(header)(report.s(order)).get(timeout=SOON)

    assert receipts[0] == receipts[2] == receipts[3] != receipts[1]
    assert [json.loads(note) for note in ledger.notes(order)] == [receipts]
    assert len(ledger.runs(order)) == 1


def test_replayed_error_stops_the_chain_of_a_duplicate(ledger: Ledger, order: str) -> None:
    for _ in range(2):
        with pytest.raises(OutOfStockError):
            chain(final.s(order), follow_up.s(order)).delay().parent.get(timeout=SOON)

    assert len(ledger.runs(order)) == 1
    assert ledger.notes(order) == []


def test_errbacks_of_both_callers_run(ledger: Ledger, order: str) -> None:
    for caller in ("first", "second"):
        errback = report.si(caller, f"{caller} {order}")
        final.apply_async((order,), link_error=errback).get(timeout=SOON, propagate=False)

    for caller in ("first", "second"):
        eventually(lambda name=caller: ledger.notes(f"{name} {order}"), f"{caller} errback")
    assert len(ledger.runs(order)) == 1
