"""Fused completion: Celery's result is written with the record, or a replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import celery
import pytest
from celery import chord, signals
from celery.backends.redis import RedisBackend
from celery.exceptions import Ignore, Reject
from celery.states import FAILURE, PENDING, STARTED, SUCCESS
from celery.worker.request import Request
from redis import CredentialProvider

from celery_idempotent import IdempotentTask
from celery_idempotent.contrib.sqlalchemy import metadata
from celery_idempotent.core.store import scripts
from celery_idempotent.core.store.node import THRESHOLD
from celery_idempotent.signals import begin_replied, completed
from celery_idempotent.signals import replayed as replayed_signal
from tests.conftest import exhaustive_except
from tests.faults.proxy import Proxy
from tests.flow.deliveries import (
    BY_CELERY,
    FUSED,
    Deliveries,
    Offer,
    begin_elsewhere,
    long_text,
    meta_of,
    pay,
    recorded,
    sent_by,
)
from tests.servers.redis_server import RedisServer
from tests.sql.databases import effects, new_engine
from tests.store.deployments import RECORDS, RESULTS
from tests.waiting import SOON

SETTINGS: dict[str, dict[str, Any]] = {
    "json": {},
    "pickle": {"result_serializer": "pickle"},
    "yaml": {"result_serializer": "yaml"},
    "msgpack": {"result_serializer": "msgpack"},
    "extended": {"result_extended": True},
    "expiry": {"result_expires": 77},
    "no expiry": {"result_expires": None},
    "key prefix": {"result_backend_transport_options": {"global_keyprefix": "shop"}},
    # An older Celery ignores this setting.
    "compression": {"result_compression": "gzip"},
    "result is not stored": {"idempotency_store_result": False},
    "result is encrypted": {
        "idempotency_encryption_keys": ("MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=",)
    },
}


class TestResult:
    """What the backend has is what Celery writes."""

    @pytest.mark.core
    @pytest.mark.parametrize(
        "settings", exhaustive_except(SETTINGS, "json", "extended", "pickle", "result is encrypted")
    )
    def test_is_as_without_it(self, server: RedisServer, offer: Offer, settings: str) -> None:
        found = []
        orders = ["third", "duplicate"] if settings != "result is not stored" else ["third"]
        setex = "SETEX" if settings != "no expiry" else "SET"
        by_celery = [setex if name == "SETEX" else name for name in BY_CELERY]
        for is_on in (True, False):
            with server.client() as client:
                client.flushall()
            deliveries = offer(idempotency_fused_completion=is_on, **SETTINGS[settings])
            sent = sent_by(server, deliveries, group_id="a group")
            assert sent == (FUSED if is_on else by_celery)
            for order in orders:
                options = {"task_id": f"the {order} {is_on}", "group_id": f"the group of {order}"}
                message = deliveries.delivered("third", **options)
                key = deliveries.app.backend.get_key_for_task(message.id)
                with server.client() as client:
                    expires, size = client.ttl(key), client.strlen(key)
                meta = meta_of(deliveries, message.id)
                assert meta.pop("date_done")
                assert meta.pop("task_id") == message.id
                found.append((meta, expires, size + is_on))

        by_order = zip(found[: len(orders)], found[len(orders) :], strict=True)
        for (fused, expires, size), (plain, plain_expires, plain_size) in by_order:
            assert fused == plain
            assert fused["result"] == {"receipt": "third"}
            assert fused["group_id"].startswith("the group of ")
            assert abs(expires - plain_expires) <= 5
            if settings != "compression":
                assert size == plain_size

    def test_lists_the_messages_that_the_body_has_sent(self, offer: Offer) -> None:
        def order(self: Any, order: str) -> str:
            if order == "parent":
                self.apply_async(("child",), task_id="the child")
            return order

        deliveries = offer(order)
        message = deliveries.delivered("parent")

        ((child, _), *_) = meta_of(deliveries, message.id)["children"]
        assert child[0] == "the child"


class TestObservers:
    """Handlers and signals notice nothing."""

    NAMES = ("task_prerun", "task_success", "task_postrun", "task_failure", "task_retry")

    class Observed(IdempotentTask):
        """Notes what its handlers see."""

        abstract = True
        notes: list[Any]

        def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
            self.notes.append(("on_success", retval, self.request.ignore_result))

        def after_return(self, status: str, retval: Any, *_: Any) -> None:
            self.notes.append(("after_return", status, retval, type(self.backend).__name__))

    @pytest.mark.core
    @pytest.mark.parametrize("is_on", [True, False])
    def test_are_called_as_ever(self, offer: Offer, is_on: bool) -> None:
        deliveries = offer(base=self.Observed, idempotency_fused_completion=is_on)
        notes = type(deliveries.task).notes = []
        receivers = []  # signals have weak references to them
        for name in self.NAMES:

            def receive(name: str = name, sender: Any = None, **details: Any) -> None:
                seen = details.get("result", details.get("retval")), details.get("state")
                stored = sender.AsyncResult(sender.request.id).state
                notes.append((name, *seen, sender.request.ignore_result, stored))

            getattr(signals, name).connect(receive, sender=deliveries.task)
            receivers.append(receive)
        deliveries.delivered("order")
        value = {"receipt": "order"}
        first = notes.copy()
        notes.clear()
        deliveries.delivered("order")

        assert first == [
            ("task_prerun", None, None, False, PENDING),
            ("on_success", value, False),
            ("task_success", value, None, False, SUCCESS),
            ("after_return", SUCCESS, value, "RedisBackend"),
            ("task_postrun", value, SUCCESS, False, SUCCESS),
        ]
        assert notes == [note for note in first if note[0].startswith("task_")], "of a duplicate"

    def test_a_use_of_the_backend_costs_no_read(self, server: RedisServer, offer: Offer) -> None:
        deliveries = offer()

        def receive(sender: Any, **_: Any) -> None:
            assert sender.backend is not None

        completed.connect(receive, sender=deliveries.task)

        assert sent_by(server, deliveries) == FUSED


class TestOtherEnds:
    """Nothing is written but by Celery."""

    @pytest.mark.exhaustive
    @pytest.mark.core
    def test_a_refused_result_is_never_seen(self, server: RedisServer, offer: Offer) -> None:
        def lose(self: Any, order: str) -> str:
            self.idempotency_forget(order, force=True)
            begin_elsewhere(self, order)
            return order

        deliveries = offer(lose)
        message = deliveries.publish("order")

        with server.client() as client, client.pubsub(ignore_subscribe_messages=True) as subscriber:
            key = deliveries.app.backend.get_key_for_task(message.id)
            subscriber.subscribe(key)
            subscriber.get_message(timeout=SOON)
            end = deliveries.deliver(message)
            client.publish(key, "end")
            received = next(filter(None, iter(lambda: subscriber.get_message(timeout=SOON), 0)))

        assert end.state == "ignored", "it is put back, and gets the other's outcome"
        assert received["data"] == b"end"
        assert meta_of(deliveries, message.id)["status"] == PENDING

    @pytest.mark.parametrize(
        ("error", "state"),
        [
            (Ignore(), PENDING),
            (Reject("no", requeue=False), PENDING),
            (ValueError("no"), FAILURE),
            (None, FAILURE),
        ],
        ids=["Ignore", "Reject", "an error", "a value that cannot be encoded"],
    )
    def test_a_body_that_raises(self, offer: Offer, error: Exception | None, state: str) -> None:
        def fail(self: Any, order: str) -> Any:
            if error is not None:
                raise error
            return object()

        deliveries = offer(fail)
        message = deliveries.delivered("order")

        assert meta_of(deliveries, message.id)["status"] == state


class TestEarlierResult:
    """A success stays; any other state is replaced."""

    def test_a_state_of_the_body_is_replaced(self, server: RedisServer, offer: Offer) -> None:
        def report(self: Any, order: str) -> str:
            self.update_state(state="PROGRESS", meta={"percent": 50})
            return order

        deliveries = offer(report, options={"track_started": True})
        sent = sent_by(server, deliveries)

        assert sent[-1] == "EVALSHA"

    def test_a_success_of_the_body_stays(self, offer: Offer) -> None:
        def report(self: Any, order: str) -> str:
            self.update_state(state=SUCCESS, meta="early")
            return "late"

        deliveries = offer(report)
        message = deliveries.delivered("order")

        assert meta_of(deliveries, message.id)["result"] == "early"

    @pytest.mark.skipif(celery.VERSION < (5, 7), reason="new in Celery 5.7")
    def test_a_compressed_one_is_left_to_celery(self, server: RedisServer, offer: Offer) -> None:
        deliveries = offer(options={"track_started": True}, result_compression="gzip")
        sent = sent_by(server, deliveries)

        assert sent[-5:] == BY_CELERY[2:]

    @pytest.mark.parametrize("lost", ["expired", "overwritten"])
    def test_a_redelivery_restores_it(self, offer: Offer, lost: str) -> None:
        deliveries = offer()
        message = deliveries.delivered("order")
        backend = deliveries.app.backend
        key = backend.get_key_for_task(message.id)
        if lost == "expired":
            backend.client.delete(key)
        else:
            backend.client.set(key, backend.encode({"status": STARTED, "result": None}))

        deliveries.deliver(message)

        assert meta_of(deliveries, message.id)["result"] == {"receipt": "order"}


@pytest.mark.parametrize("has_record", [True, False], ids=["with a record", "without a record"])
def test_a_transaction(server: RedisServer, offer: Offer, tmp_path: Path, has_record: bool) -> None:
    def book(self: Any, order: str) -> str:
        self.idempotency.connection.execute(effects.insert().values(name=order, pid=0))
        if not has_record:
            store = self.idempotency_configuration.executor.store
            store.client.delete(store.name(self.idempotency_key_of(order)))
        return order

    engine = new_engine(f"sqlite:///{tmp_path}/shop.db")
    metadata.create_all(engine)
    effects.create(engine)
    deliveries = offer(book, options={"idempotency_transaction": engine})
    with recorded(server) as sent:
        message = deliveries.delivered("order")

    assert ("SETEX" in sent) == (not has_record), "the row decides, and Celery writes its value"
    assert meta_of(deliveries, message.id)["result"] == "order"
    with engine.connect() as connection:
        assert len(connection.execute(effects.select()).all()) == 1
    engine.dispose()


def test_the_documented_rights_suffice(server: RedisServer, offer: Offer) -> None:
    rules = f"{RECORDS} {RESULTS}".replace(">password", ">secret").split()
    address = server.url.partition("://")[2].rpartition("@")[2]
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "limited", "reset", *rules)
        try:
            deliveries = offer(result_backend=f"redis://limited:secret@{address}")

            assert sent_by(server, deliveries) == FUSED
        finally:
            admin.acl_deluser("limited")


# Replays: one script writes the value of a duplicate as Celery's result.

RECEIPT = {"receipt": "order"}


def replayed(server: RedisServer, deliveries: Deliveries, **options: Any) -> list[str]:
    """Returns what a duplicate of `order` sends; its reference, which has no reply, is left out.

    Sent before: all scripts, over open connections.
    """
    deliveries.delivered("order")
    deliveries.delivered("order", **options)
    return sent_by_duplicate(server, deliveries, deliveries.publish("order", **options))


def sent_by_duplicate(server: RedisServer, deliveries: Deliveries, duplicate: Request) -> list[str]:
    with recorded(server) as sent:
        assert deliveries.deliver(duplicate).state == "success"
    return [name for name in sent if name != "SET"]


@pytest.mark.core
def test_a_replay_takes_two_round_trips(server: RedisServer, offer: Offer) -> None:
    deliveries = offer()

    assert replayed(server, deliveries) == ["EVALSHA", "EVALSHA"]


@pytest.mark.core
def test_a_redelivery_reads_its_result_only(server: RedisServer, offer: Offer) -> None:
    deliveries = offer()
    deliveries.delivered("warm-up")
    message = deliveries.delivered("order")
    first = meta_of(deliveries, message.id)

    assert sent_by_duplicate(server, deliveries, message) == ["EVALSHA", "GET"]
    assert meta_of(deliveries, message.id) == first


def test_a_record_that_is_forgotten_before_the_write(server: RedisServer, offer: Offer) -> None:
    """Its outcome was decided, and the duplicate has it."""
    deliveries = offer()
    deliveries.delivered("order")
    duplicate = deliveries.publish("order")

    def forget(sender: Any, **_: Any) -> None:
        sender.idempotency_forget("order")

    replayed_signal.connect(forget, sender=deliveries.task)
    deliveries.deliver(duplicate)

    assert deliveries.task.idempotency_record("order") is None
    assert meta_of(deliveries, duplicate.id)["result"] == RECEIPT


def fail(self: Any, order: str) -> None:
    raise KeyError(order)


@pytest.mark.parametrize("case", ["off", "callback"])
def test_other_calls_are_left_to_celery(server: RedisServer, offer: Offer, case: str) -> None:
    deliveries = offer(idempotency_fused_completion=case != "off")
    deliveries.delivered("order")
    link = deliveries.task.si("next") if case == "callback" else None
    deliveries.delivered("order", link=link)  # loads the scripts
    deliveries.purge()  # what followed it
    duplicate = deliveries.publish("order", link=link)

    sent = sent_by_duplicate(server, deliveries, duplicate)

    assert sent[:1] + sent[-5:] == ["EVALSHA", *BY_CELERY[2:]]
    assert sent.count("EVALSHA") == 1


def test_an_error_is_left_to_celery(server: RedisServer, offer: Offer) -> None:
    deliveries = offer(fail, options={"idempotency_replay_errors": (KeyError,)})
    deliveries.delivered("order")
    with recorded(server) as sent:
        duplicate = deliveries.delivered("order")

    assert sent.count("EVALSHA") == 1
    assert meta_of(deliveries, duplicate.id)["status"] == FAILURE


@pytest.mark.parametrize("losses", [1, 20])
def test_lost_requests(server: RedisServer, offer: Offer, losses: int) -> None:
    """After the first one the script is sent again; in an outage Celery writes the result."""
    with Proxy(server.url) as proxy:
        deliveries = offer(result_backend=proxy.url)
        replayed(server, deliveries)
        duplicate = deliveries.publish("order")
        for _ in range(losses):
            proxy.lose_request(to=scripts.load("settle").sha)
        proxy.requests.clear()

        assert deliveries.deliver(duplicate).state == "success"

        assert bool(proxy.requests_with("SETEX")) == (losses > 1)
        assert meta_of(deliveries, duplicate.id)["result"] == RECEIPT


def test_an_open_breaker_sends_nothing(server: RedisServer, offer: Offer) -> None:
    deliveries = offer()
    replayed(server, deliveries)
    breaker = deliveries.task.idempotency_configuration.executor.store.node.breaker

    def trip(**_: Any) -> None:
        for _ in range(THRESHOLD):
            breaker.record_failure()

    begin_replied.connect(trip, sender=deliveries.task, weak=False)
    sent = sent_by_duplicate(server, deliveries, deliveries.publish("order"))

    assert breaker.open
    assert sent[0] == "EVALSHA"
    assert sent[-4:] == BY_CELERY[-4:]
    assert sent.count("EVALSHA") == 1


# Where it is off, and the worker's results are written by Celery alone.


class OwnBackend(RedisBackend):
    """A result backend of the user's."""


class Credentials(CredentialProvider):
    """The default user's, who needs none."""

    def get_credentials(self) -> tuple[str, str]:
        return "default", "any"


class OwnCall(IdempotentTask):
    """A task that changes the value."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return {"value": super().__call__(*args, **kwargs)}


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "option": ({"idempotency_fused_completion": False}, "idempotency_fused_completion"),
    "option of a task": (
        {"options": {"idempotency_fused_completion": False}}, "idempotency_fused_completion",
    ),
    "other database": ({"idempotency_redis_url": "{url}1"}, "different servers, databases"),
    "other user": (
        {"idempotency_redis_url": "redis://default@{address}/0"}, "different servers, databases",
    ),
    "subclass": (
        {"result_backend": f"{__name__}:OwnBackend+{{url}}0", "idempotency_redis_url": "{url}0"},
        "OwnBackend",
    ),
    "ignored": ({"options": {"ignore_result": True}}, "ignore_result"),
    "shadow": ({"idempotency_shadow": True}, "idempotency_shadow"),
    "replicas": ({"idempotency_wait_replicas": 1}, "replicas"),
}  # fmt: skip


CALLS: dict[str, Callable[[Any], Any]] = {
    "link": lambda task: task.apply_async(("order",), link=task.si("next")),
    "link_error": lambda task: task.apply_async(("order",), link_error=task.si("next")),
    "chain": lambda task: (task.si("order") | task.si("next")).apply_async(),
    "chord": lambda task: chord([task.si("order")])(task.si("next")),
    "chain of the body": lambda task: task.delay("add to the chain"),
    "ignore_result": lambda task: task.apply_async(("order",), ignore_result=True),
}


class TestWhereItIsOff:
    """Celery writes the result, and `fusion_obstacle` names the reason."""

    @pytest.mark.parametrize("case", CASES)
    def test_for_a_task(self, server: RedisServer, offer: Offer, case: str) -> None:
        how, reason = CASES[case]
        address = server.url.partition("://")[2].partition("/")[0].rpartition("@")[2]
        url = server.url.rpartition("/")[0] + "/"
        filled = {
            name: value.format(url=url, address=address) if isinstance(value, str) else value
            for name, value in how.items()
        }
        deliveries = offer(**filled)

        assert reason in deliveries.task.idempotency_configuration.fusion_obstacle

    @pytest.mark.parametrize(
        ("how", "commands"),
        [
            pytest.param({}, FUSED, marks=pytest.mark.core),
            ({"base": OwnCall}, FUSED),
            ({"result_backend": "{url}?credential_provider=" + f"{__name__}:Credentials"}, FUSED),
            ({"idempotency_fused_completion": False}, BY_CELERY),
            ({"body": long_text, "idempotency_max_result_size": 300}, BY_CELERY),
            ({"options": {"idempotency_redis_client": True}}, BY_CELERY),
        ],
        ids=[
            *("on", "an own call", "one credential provider for both"),
            *("off", "a large result", "a client of the user"),
        ],
    )
    def test_a_run_takes_two_round_trips_or_four(
        self, server: RedisServer, offer: Offer, how: dict[str, Any], commands: list[str]
    ) -> None:
        if "options" in how:
            how = {"options": {"idempotency_redis_client": server.client}}
        if "result_backend" in how:
            how = {"result_backend": how["result_backend"].format(url=server.url)}

        assert sent_by(server, offer(**{"body": pay, **how})) == commands

    def test_with_a_backend_of_the_task(self, server: RedisServer, offer: Offer) -> None:
        deliveries = offer()
        task = deliveries.task
        deliveries.delivered("in the app's")
        task.backend = backend = RedisBackend(f"{server.url.rpartition('/')[0]}/1", app=task.app)
        message = deliveries.delivered("order")

        assert backend.get_task_meta(message.id)["result"] == {"receipt": "order"}
        assert deliveries.app.backend.get(backend.get_key_for_task(message.id)) is None
        backend.result_consumer.stop()
        backend.client.close()

    def test_an_instrumentation_leaves_it_on(self, server: RedisServer, offer: Offer) -> None:
        deliveries = offer()
        deliveries.app.finalize()
        cls = type(deliveries.task)
        original = cls.__call__
        cls.__call__ = lambda self, *args, **kwargs: original(self, *args, **kwargs)

        assert sent_by(server, deliveries) == FUSED

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("call", CALLS)
    def test_for_a_call(self, server: RedisServer, offer: Offer, call: str) -> None:
        deliveries = offer()
        deliveries.delivered("warm-up")
        CALLS[call](deliveries.task)
        message = deliveries.next()

        with recorded(server) as sent:
            deliveries.deliver(message)

        assert sent[:2] == FUSED
        assert ("SETEX" in sent) == (call not in ("link_error", "ignore_result"))

    def test_for_an_eager_call(self, offer: Offer) -> None:
        deliveries = offer(task_always_eager=True, task_store_eager_result=True)

        result = deliveries.task.delay("order")

        assert result.get() == {"receipt": "order"}
        assert meta_of(deliveries, result.id)["status"] == SUCCESS
