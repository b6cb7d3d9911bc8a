"""``celery idempotency rerun``: calls that have ended for good run again, once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import chord, group
from celery.result import AsyncResult
from celery.signals import before_task_publish
from cryptography.fernet import Fernet

from celery_idempotent import PoisonedTaskError, State, signals
from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.operations.calls import changes
from celery_idempotent.operations.cli.command import resolve_records
from tests.apps import run_command as celery
from tests.servers.rabbitmq import RabbitMQ
from tests.waiting import SOON, eventually
from tests.worker.harness import OpenShop, Shop
from tests.worker.tasks import OutOfStockError, errback, final, final_too, frail, pack, rejecting


@pytest.fixture(scope="module")
def extended_shop(open_shop: OpenShop) -> Iterator[Shop]:
    """A shop whose results have the arguments of the calls."""
    with open_shop(result_extended=True) as shop:
        shop.start_worker(concurrency=4)
        yield shop


def kept(shop: Shop) -> list[bytes]:
    """Returns the messages that are kept of all tasks."""
    return [shop.redis.get(name) for name in shop.redis.scan_iter("idem:{*}:message:*")]


def fail(shop: Shop, order: str, task: Any = final, times: int = 1, **options: Any) -> AsyncResult:
    """Calls a task that fails for good at first, and returns when its message is kept."""
    before = len(kept(shop))
    result = task.apply_async((order, times), **options)
    with pytest.raises(OutOfStockError):
        result.get(timeout=SOON)
    eventually(lambda: len(kept(shop)) > before, "the message is kept")
    return result


def kept_of(shop: Shop, task: Any, *args: Any) -> list[Any]:
    """Returns the names of the messages that are kept of this call."""
    return shop.redis.keys(f"idem:{{idem:{task.idempotency_key_of(*args)}}}:message:*")


def succeed(result: AsyncResult) -> Any:
    """Returns the value that replaces the failure of a task id."""
    eventually(lambda: result.app.AsyncResult(result.id).successful(), "it succeeds")
    return result.app.AsyncResult(result.id).result


def finished(shop: Shop, order: str, number: int) -> list[Any]:
    """Waits until so many executions have ended, and the broker is empty; returns all."""
    eventually(lambda: sum(bool(run.end) for run in shop.ledger.runs(order)) == number, "it runs")
    shop.wait_until_empty()
    return shop.ledger.runs(order)


def test_a_stored_error_runs_again(
    shop: Shop, order: str, caplog: pytest.LogCaptureFixture, restored_receivers: None
) -> None:
    caplog.set_level("INFO", "celery_idempotent")
    received: list[dict[str, Any]] = []
    signals.rerun.connect(lambda **details: received.append(details), weak=False)
    result = fail(shop, order)

    output = celery(shop.app, "rerun", str(final.idempotency_key_of(order, 1)), "--yes")

    assert "published: it runs again" in output
    (details,) = received
    assert (details["sender"], details["task_id"]) == (final, result.id)
    assert details["user"]
    (line,) = [line for line in caplog.messages if "again" in line]
    assert f"(FAILED, as task {result.id}: shop.final in queue celery)" in line
    assert succeed(result) == "found one"
    assert [run.task_id for run in shop.ledger.runs(order)] == [result.id] * 2
    assert final.idempotency_record(order, 1).state is State.COMPLETED
    assert final.delay(order, 1).get(timeout=SOON) == "found one"
    assert len(shop.ledger.runs(order)) == 2


def test_a_poisoned_task_runs_again(shop: Shop, order: str) -> None:
    task_id = poison(shop, order)

    celery(shop.app, "rerun", task_id, "--yes")

    assert succeed(shop.app.AsyncResult(task_id))["amount"] == 1
    assert len(shop.ledger.runs(order)) == 2


def test_a_rejected_duplicate_runs_again(shop: Shop, order: str) -> None:
    first, duplicate = reject(shop, order)

    celery(shop.app, "rerun", duplicate.id, "--yes")

    assert succeed(duplicate) == first.get()  # the key has its outcome by now
    assert len(shop.ledger.runs(order)) == 1
    eventually(lambda: not kept_of(shop, rejecting, order), "it is deleted")
    assert rejecting.idempotency_record(order).state is State.COMPLETED


def test_a_completed_call_runs_again_after_two_questions(extended_shop: Shop, order: str) -> None:
    shop = extended_shop
    shop.app.set_current()
    receipt = pack.delay(order, amount=7).get(timeout=SOON)
    key = str(pack.idempotency_key_of(order, amount=7))

    assert "Repeat the effect?" in celery(shop.app, "rerun", key, code=1, answer="y\nn\n")
    celery(shop.app, "rerun", key, "--yes", code=1, answer="")
    assert len(shop.ledger.runs(order)) == 1
    celery(shop.app, "rerun", key, answer="y\ny\n")

    finished(shop, order, 2)
    again = pack.delay(order, amount=7).get(timeout=SOON)
    assert again["amount"] == 7
    assert again != receipt
    assert len(shop.ledger.runs(order)) == 2


def test_what_has_not_ended_or_has_no_message_is_left_alone(shop: Shop, order: str) -> None:
    running = shop.ledger.start(pack, f"running {order}")
    assert "it has not ended" in celery(shop.app, "rerun", running.id, "--yes", code=1)

    pack.delay(order).get(timeout=SOON)
    key = str(pack.idempotency_key_of(order))
    output = celery(shop.app, "rerun", key, "--yes", "--completed", code=1)
    assert "publish the call again" in output

    failing = f"failing {order}"
    fail(shop, failing)
    for name in kept_of(shop, final, failing, 1):
        assert 0 < shop.redis.ttl(name) <= 86400
        shop.redis.delete(name)
    key = str(final.idempotency_key_of(failing, 1))
    assert "its message is not kept" in celery(shop.app, "rerun", key, "--yes", code=1)


def poison(shop: Shop, order: str) -> str:
    """Returns the task id of a call that has killed its process."""
    result = shop.ledger.start(frail, order)
    shop.ledger.kill(order)
    with pytest.raises(PoisonedTaskError):
        result.get(timeout=SOON)
    shop.ledger.release(order)
    eventually(lambda: order.encode() in b"".join(kept(shop)), "it is kept")
    return result.id


def reject(shop: Shop, order: str) -> tuple[AsyncResult, AsyncResult]:
    """Returns a call, which has completed, and its duplicate, which was rejected."""
    first = shop.ledger.start(rejecting, order)
    duplicate = rejecting.delay(order)
    eventually(lambda: kept_of(shop, rejecting, order), "it is kept")
    shop.ledger.release(order)
    first.get(timeout=SOON)
    return first, duplicate


def reject_and_forget(shop: Shop, order: str) -> str:
    """Returns the task id of a duplicate that was rejected; the outcome it met is forgotten."""
    _, duplicate = reject(shop, order)
    assert rejecting.idempotency_forget(order)
    return str(duplicate.id)


def complete(shop: Shop, order: str) -> str:
    """Returns the task id of a call that has completed."""
    result = pack.delay(order)
    result.get(timeout=SOON)
    return result.id


@contextmanager
def suspended(shop: Shop) -> Iterator[None]:
    """Lets messages wait in the queue during the block."""
    shop.app.control.cancel_consumer("celery", reply=True, timeout=1)
    try:
        yield
    finally:
        shop.control("add_consumer", "celery")


@pytest.mark.parametrize(
    "end",
    [
        lambda shop, order: fail(shop, order).id,
        pytest.param(poison, marks=pytest.mark.exhaustive),
        pytest.param(reject_and_forget, marks=pytest.mark.exhaustive),
        complete,
    ],
    ids=["a stored error", "poisoned", "a rejected duplicate", "completed"],
)
def test_four_people_click_at_once(extended_shop: Shop, order: str, end: Any) -> None:
    shop = extended_shop
    shop.app.set_current()
    task_id = end(shop, order)
    barrier, cases = threading.Barrier(4), []

    def click(user: str) -> None:
        tasks = app_tasks.tasks(shop.app)
        (target,) = resolve_records(tasks, (task_id,), None, may_be_absent=True)
        call = changes.find_ended(tasks, target)
        barrier.wait()
        cases.append(changes.rerun(call, user=user))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(click, "abcd"))

    assert "published" in cases
    assert len(finished(shop, order, 2 - (end is poison))) == 2


@pytest.mark.exhaustive
def test_one_message_waits_until_the_other_has_failed(shop: Shop, order: str) -> None:
    """Both messages are for the first error: if the first fails, the second does not run."""
    fail(shop, order, times=2)
    key = str(final.idempotency_key_of(order, 2))
    with suspended(shop):
        for _ in range(2):
            celery(shop.app, "rerun", key, "--yes")

    assert len(finished(shop, order, 2)) == 2
    celery(shop.app, "rerun", key, "--yes")
    assert finished(shop, order, 3), "it runs for the second error"


@pytest.mark.exhaustive
@pytest.mark.parametrize("lost", [False, True], ids=["a worker dies", "a message is lost"])
def test_a_rerun_is_not_lost_on_its_way(shop: Shop, order: str, lost: bool) -> None:
    """A worker dies after forgetting the error, or the message is lost and published again."""
    result = fail(shop, order)
    key = str(final.idempotency_key_of(order, 1))
    with suspended(shop):
        celery(shop.app, "rerun", key, "--yes")
        assert final.idempotency_record(order, 1).state is State.FAILED
        if lost:
            assert shop.redis.delete("celery")
            celery(shop.app, "rerun", key, "--yes")
        else:
            assert final.idempotency_forget(order, 1)  # and its message is redelivered
    assert succeed(result) == "found one"
    assert len(finished(shop, order, 2)) == 2
    assert kept_of(shop, final, order) == []


def test_all_that_has_failed_of_a_task(shop: Shop) -> None:
    orders, other = [uuid4().hex for _ in range(3)], uuid4().hex
    results = [fail(shop, order, final_too) for order in orders]
    fail(shop, other)

    output = celery(shop.app, "rerun", "--all", "--task", final_too.name, "--yes", "--json")
    cases = json.loads(output)

    assert {each["key"]: each["case"] for each in cases} == {
        str(final_too.idempotency_key_of(order, 1)): "published" for order in orders
    }
    assert [succeed(result) for result in results] == ["found one"] * 3
    assert len(shop.ledger.runs(other)) == 1


def test_expiry_and_retries_are_dropped_and_the_callback_runs_later(shop: Shop, order: str) -> None:
    links = {"link": pack.si(f"after {order}"), "link_error": errback.si(order)}
    result = fail(shop, order, expires=3600, countdown=0.1, **links)
    eventually(lambda: len(shop.ledger.notes(order)) == 1, "the errback has run")

    celery(shop.app, "rerun", result.id, "--yes")

    assert succeed(result) == "found one"
    shop.ledger.wait_for_run(f"after {order}")
    assert len(shop.ledger.notes(order)) == 1


def test_a_chord_counts_its_member_once(shop: Shop, order: str) -> None:
    shop.ledger.hold(f"other {order}")
    body = pack.si(f"body {order}")
    body.link_error(errback.si(order))
    whole = chord(group(final.s(order, 1), pack.s(f"other {order}")), body).apply_async()
    member = whole.parent.results[0]
    shop.ledger.wait_for_run(order)
    eventually(lambda: member.failed(), "the member has failed")
    bodies: list[Any] = []
    receiver = before_task_publish.connect(lambda body, **_: bodies.append(body), weak=False)
    celery(shop.app, "rerun", member.id, "--yes")
    before_task_publish.disconnect(receiver)
    # Before 5.7, Celery counts each return of a member; later ones, the first.
    assert [body[2]["chord"] for body in bodies] == [None]
    assert succeed(member) == "found one"
    shop.ledger.release(f"other {order}")

    eventually(lambda: shop.ledger.notes(order), "the chord has failed, and not run its body")
    assert shop.ledger.runs(f"body {order}") == []


def test_encryption_and_offloading(open_shop: OpenShop, order: str, tmp_path: Path) -> None:
    with open_shop(
        idempotency_encryption_keys=[Fernet.generate_key().decode()],
        idempotency_max_result_size=1200,
        idempotency_offload_backend=f"file://{tmp_path}",
    ) as shop:
        shop.start_worker()
        for padding in (0, 1000):
            result = fail(shop, f"{order} {padding}", headers={"padding": "x" * padding})
            (message,) = kept(shop)
            form, _, body = message.partition(b"\n")
            assert form == (b"@!json" if padding else b"!json")
            if padding:
                body = (tmp_path / body.decode()).read_bytes()
            assert order.encode() not in body

            celery(shop.app, "rerun", result.id, "--yes")
            assert succeed(result) == "found one"
            eventually(lambda: kept(shop) == [] == list(tmp_path.iterdir()), "it is deleted")


@pytest.mark.rabbitmq
def test_queue_and_priority_are_kept(rabbitmq: RabbitMQ, open_shop: OpenShop, order: str) -> None:
    name = f"queue-{uuid4().hex[:8]}"
    queue = {"exchange": name, "exchange_type": "topic", "binding_key": "orders.#"}
    queue["queue_arguments"] = {"x-max-priority": 9}
    settings = {
        "broker_url": rabbitmq.url,
        "task_queues": {name: queue, f"{name}-default": {"exchange": f"{name}-default"}},
        "task_default_queue": f"{name}-default",
        "accept_content": ["json", "yaml"],
    }
    with open_shop(**settings) as shop:
        worker = shop.start_worker("--queues", name)
        result = fail(
            shop, order, exchange=name, routing_key="orders.new", priority=7, serializer="yaml",
            headers={"tenant": "acme"},
        )  # fmt: skip
        worker.teardown()
        celery(shop.app, "rerun", result.id, "--yes")

        with shop.app.connection_for_read() as connection:
            message = eventually(lambda: connection.default_channel.basic_get(name, no_ack=True))
        delivered = message.delivery_info
        assert (delivered["exchange"], delivered["routing_key"]) == ("", name)
        assert message.properties["priority"] == 7
        assert message.properties["content_type"] == "application/json"
        assert message.properties["application_headers"]["tenant"] == "acme"
        assert message.properties["application_headers"]["id"] == result.id
