"""Calls in a Django process; prints the failures as JSON.

python -m tests.sql.django_calls DATABASE_URL REDIS_URL
"""

from __future__ import annotations

import sys
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import patch
from uuid import uuid4

from celery import Celery, chain, group
from kombu.exceptions import OperationalError as BrokerError

from celery_idempotent import Idempotency, IdempotentTask
from tests.sql.databases import dump_failures, set_up_django

set_up_django(sys.argv[1])

from django.core import checks  # noqa: E402 - Django has to be set up
from django.core.management import call_command  # noqa: E402 - Django has to be set up
from django.db import IntegrityError, OperationalError, connection, connections, router, transaction  # noqa: E402
from django.test.utils import CaptureQueriesContext, override_settings  # noqa: E402

from celery_idempotent.contrib.django.models import Outcome  # noqa: E402
from celery_idempotent.sql.django import DjangoSession  # noqa: E402

app = Celery(broker="memory://", set_as_current=False)
app.conf.update(idempotency_redis_url=sys.argv[2], idempotency_key_prefix=uuid4().hex)
idem = Idempotency(app, transaction="default")
without_app = Idempotency(sys.argv[2], key_prefix=uuid4().hex, transaction="default")


@app.task(shared=False, name="notify")
def notify(order: str, **options: Any) -> None:
    """Is published only."""


@app.task(shared=False, name="bill", base=IdempotentTask, idempotency_key="{order}")
def bill(order: str) -> None:
    """Is published only."""


@app.task(shared=False, name="in_pickle", serializer="pickle")
def in_pickle(order: str) -> None:
    """Cannot be read by this app."""


@Celery(broker="memory://", set_as_current=False).task(shared=False, lazy=False)
def notify_by_another_app() -> None:
    """Has another broker."""


def insert(name: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO effects (name, pid) VALUES (%s, 0)", [name])


def effects(name: str) -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT COUNT(*) FROM effects WHERE name = %s", [name])
        return int(cursor.fetchone()[0])


class Call:
    """A function with a transaction, and what it does after its effect."""

    def __init__(self, during: Any = lambda _: None, engine: Any = idem, **options: Any) -> None:
        self.name = uuid4().hex
        self.runs = 0

        @engine.idempotent(key="{name}", name="call", **options)
        def call(name: str) -> int:
            self.runs += 1
            insert(name)
            during(name)
            return self.runs

        self.function = call

    def __call__(self) -> Any:
        """Returns what the function does, or the name and text of its error."""
        try:
            return self.function(self.name)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def result(self) -> list[Any]:
        """Calls it twice; returns both outcomes, its runs and its effects."""
        return [self(), self(), self.runs, effects(self.name)]


class NamingCall(Call):
    """Of an error it returns the name alone."""

    def __call__(self) -> Any:
        outcome = super().__call__()
        return outcome.partition(":")[0] if isinstance(outcome, str) else outcome


def test_a_call_inside_atomic_is_refused() -> None:
    call = NamingCall()
    with transaction.atomic():
        outcome = call()
    assert outcome == "TransactionError"
    assert call.result() == [1, 1, 1, 1], "the key is free"


class ReadsFromReplica:
    """A database router."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return "replica"


def test_claim_and_outcome_are_never_read_from_a_replica() -> None:
    """The replica is unavailable, so that whatever is read from it fails."""
    away = {**connection.settings_dict, "NAME": "/nonexistent/replica.db", "PORT": "1"}
    call = NamingCall()
    routed = patch.object(router, "routers", [ReadsFromReplica()])
    with patch.dict(connections.databases, replica=away), routed:
        with suppress(OperationalError):
            Outcome.objects.first()
            raise AssertionError("the ORM's reads go where the router sends them")
        first = call()
        idem.executor.store.client.flushdb()
        assert [first, call(), call.runs, effects(call.name)] == [1, 1, 1, 1], "the row has it"


def test_nested_atomic_blocks_are_savepoints() -> None:
    def during(name: str) -> None:
        with transaction.atomic():
            insert(name)
            transaction.set_rollback(True)
        with transaction.atomic():
            insert(name)

    assert NamingCall(during).result() == [1, 1, 1, 2]


def test_a_body_cannot_end_its_transaction() -> None:
    """Django refuses it, or the outcome is not committed."""
    for end in (
        lambda: transaction.set_rollback(True),
        transaction.commit,
        transaction.rollback,
        connection.commit,
        connection.rollback,
        connection.close,
        lambda: transaction.set_autocommit(True),
        lambda: transaction.set_autocommit(False),
    ):
        call = NamingCall(lambda name, end=end: end())  # type: ignore[misc]
        (first, second, *counts), text = call.result(), str(end)
        assert first == second != 2, text
        assert first in ("TransactionError", "TransactionManagementError"), text
        assert counts == [2, 0], text


def test_a_commit_behind_django_blocks_the_key() -> None:
    def by_sql() -> None:
        with connection.cursor() as cursor:
            cursor.execute("COMMIT")

    for end in (by_sql, lambda: connection.connection.commit()):
        call = NamingCall(lambda name, end=end: end())  # type: ignore[misc]
        assert call.result() == ["TransactionError", "TransactionError", 1, 1]


def test_four_statements_more() -> None:
    """Than in a plain transaction: claim, savepoint, release, outcome."""
    with CaptureQueriesContext(connection) as plain, transaction.atomic():
        insert("plain")
    with CaptureQueriesContext(connection) as ours:
        NamingCall()()
    assert len(ours) - len(plain) == 4


def test_models_and_migrations_agree() -> None:
    # Exits if they differ.
    call_command("makemigrations", "celery_idempotent", check=True, dry_run=True, verbosity=0)


def test_the_body_uses_the_connection_of_the_alias() -> None:
    call = NamingCall(lambda name: idem.current.connection is connections["default"] or 1 / 0)
    assert call.result() == [1, 1, 1, 1]


def on_commit(function: Callable[[], Any], **options: Any) -> None:
    transaction.on_commit(function, **options)


def published() -> list[list[str]]:
    """Takes all messages from the broker: the task and the id of each."""
    found = []
    channel = app.connection_for_read().default_channel
    while (message := channel.basic_get("celery", no_ack=True)) is not None:
        found.append([message.headers["task"], message.headers["id"]])
    return found


def tasks(messages: list[list[str]]) -> list[str]:
    return sorted(task for task, _ in messages)


def broker_unavailable() -> Any:
    error = BrokerError("connection refused")
    return patch.object(app.amqp, "send_task_message", side_effect=error)


class PublishingCall(Call):
    """Its body publishes on commit."""

    @property
    def outboxes(self) -> int:
        """The number of rows of this call whose messages are not published."""
        key = str(self.function.idempotency_key_of(self.name))
        return Outcome.objects.filter(record_key=key, outbox__isnull=False).count()

    def result(self) -> list[Any]:
        """Calls it twice; returns both outcomes, the effects, and what was published."""
        return [self(), self(), effects(self.name), tasks(published())]


def test_every_form_of_a_message_is_published_with_an_id_of_its_own() -> None:
    def during(name: str) -> None:
        on_commit(partial(notify.delay, name))
        on_commit(partial(notify.apply_async, (name,), countdown=1))
        on_commit(partial(notify.apply_async, kwargs={"order": name}, queue="celery"))
        on_commit(notify.s(name).delay)
        on_commit(notify.si(name).apply_async)
        on_commit(partial(bill.apply_async, ("7",), idempotency_key=uuid4()))
        on_commit(chain(notify.si(name), bill.si(name)).apply_async)
        on_commit(group([notify.s(name)] * 2).delay)

    call = PublishingCall(during)
    call()
    messages = published()
    assert tasks(messages) == ["bill", *["notify"] * 8]
    assert (len({task_id for _, task_id in messages}), call.outboxes) == (9, 0)


def test_what_is_rolled_back_is_not_published() -> None:
    def during(name: str) -> None:
        on_commit(partial(notify.delay, name))
        raise ZeroDivisionError

    error = "ZeroDivisionError: "
    assert PublishingCall(during).result() == [error, error, 0, []]


def test_what_is_rolled_back_to_a_savepoint_is_not_published() -> None:
    def during(name: str) -> None:
        with transaction.atomic():
            on_commit(partial(notify.delay, name))
            transaction.set_rollback(True)
        on_commit(partial(bill.delay, name))

    assert PublishingCall(during).result() == [1, 1, 1, ["bill"]]


def test_a_signal_after_the_commit() -> None:
    """A signal handler raises KeyboardInterrupt."""
    call = PublishingCall(lambda name: on_commit(partial(notify.delay, name)))
    commit = DjangoSession.commit

    def interrupt(session: DjangoSession) -> None:
        commit(session)
        raise KeyboardInterrupt

    with patch.object(DjangoSession, "commit", interrupt), suppress(KeyboardInterrupt):
        call()
    assert [*call.result(), call.outboxes] == [1, 1, 1, ["notify"], 0]


def test_a_replayed_error_of_the_commit_publishes_nothing() -> None:
    """A deferred constraint fails: its error is the outcome, and nothing is published."""

    def refuse(session: DjangoSession) -> None:
        refused.stop()
        session.rollback()
        raise IntegrityError

    refused = patch.object(DjangoSession, "commit", refuse)
    refused.start()
    during = lambda name: on_commit(partial(notify.delay, name))  # noqa: E731
    call = PublishingCall(during, replay_errors=(IntegrityError,))
    error = "IntegrityError: "
    assert call.result() == [error, error, 0, []]


def test_messages_in_the_row_are_published_once_more_with_the_same_ids() -> None:
    """As after a kill: the row has messages, and Redis has no record."""
    call = PublishingCall(lambda name: on_commit(chain(notify.si(name), bill.si(name)).apply_async))

    def keep(session: DjangoSession, statement: str, values: Any) -> Any:
        if "outbox = NULL WHERE id" in statement:
            statement = statement.replace("outbox = NULL", "owner = owner")
        return execute(session, statement, values)

    execute = DjangoSession.execute
    with patch.object(DjangoSession, "execute", keep):
        first = call()
    before = published()
    left = call.outboxes
    idem.executor.store.client.flushdb()
    again = call()
    after = published()
    idem.executor.store.client.flushdb()
    assert (first, again, left, call.outboxes) == (1, 1, 1, 0)
    assert before == after
    assert tasks(after) == ["notify"]
    assert (call(), published()) == (1, [])


def test_the_broker_is_unavailable() -> None:
    call = PublishingCall(lambda name: on_commit(partial(notify.delay, name)))
    with broker_unavailable():
        refused = call()
    assert refused.startswith("StoreUnavailableError")
    assert (effects(call.name), call.outboxes) == (1, 1)
    assert call.result() == [1, 1, 1, ["notify"]]


def test_an_expired_row_is_kept_until_its_messages_are_published() -> None:
    call = PublishingCall(lambda name: on_commit(partial(notify.delay, name)))
    with broker_unavailable():
        call()
    Outcome.objects.filter(outbox__isnull=False).update(expires_at=1)
    kept = idem.settings.transaction.purge(10)[0]
    assert (kept, call(), effects(call.name)) == (0, 2, 2)
    assert (tasks(published()), call.outboxes) == (["notify"] * 2, 0)


def test_what_could_be_lost_is_refused_before_the_commit() -> None:
    """What is lost if the process dies, and messages that cannot be stored."""
    own: list[str] = []
    by_lambda = lambda: own.append("called")  # noqa: E731
    for function, engine, reason in (
        (by_lambda, idem, "<lambda>) would be lost if the process died"),
        (partial(own.append, "called"), idem, "on_commit(partial(builtins.list.append)) would be"),
        (partial(in_pickle.delay, "1"), idem, "in_pickle.delay) cannot be stored: Content"),
        (partial(notify.delay, object()), idem, "notify.delay) cannot be stored: EncodeError"),
        (partial(bill.apply_async, ("1",), idempotency_kee="1"), idem, "did you mean"),
        (partial(bill.apply_async, ("1",), idempotency_key=""), idem, "must be non-empty text"),
        (notify_by_another_app.delay, idem, "belongs to another Celery app"),
        (partial(notify.delay, "1"), without_app, "pass the Celery app to Idempotency()"),
    ):
        call = PublishingCall(lambda _, function=function: on_commit(function), engine)
        error = call()
        assert error.startswith("TransactionError: ")
        assert reason in error
        assert [effects(call.name), own, published()] == [0, [], []]


def test_messages_are_encrypted_like_results() -> None:
    keys = [b64encode(bytes(32)).decode()]
    engine = Idempotency(app, transaction="default", encryption_keys=keys)
    call = PublishingCall(lambda name: on_commit(partial(notify.delay, name)), engine)
    with broker_unavailable():
        call()
    outbox = bytes(Outcome.objects.get(outbox__isnull=False).outbox)
    assert outbox.startswith(b"!json\n")
    assert b"body" not in outbox
    assert call.result() == [1, 1, 1, ["notify"]]


def test_robust_functions_are_called_by_django() -> None:
    """Django calls it; its author has declared that it may be lost."""
    called: list[str] = []

    def during(name: str) -> None:
        on_commit(lambda: called.append(name), robust=True)
        on_commit(lambda: 1 / 0, robust=True)

    assert [*PublishingCall(during).result(), len(called)] == [1, 1, 1, [], 1]


def test_a_message_that_can_never_be_published_holds_up_no_other() -> None:
    """A wrong argument is found when the message is published."""
    call = PublishingCall(
        lambda name: (on_commit(partial(bill.delay, name, 2)), on_commit(partial(notify.delay, 1)))
    )
    assert call.result() == [1, 1, 1, ["notify"]]


def ship(order: str) -> str:
    return order


def messages(settings: dict[str, Any]) -> list[list[str]]:
    """Returns id, text and hint of each of our messages of ``manage.py check``."""
    plain = settings.pop("PLAIN", {})
    database = {"AUTOCOMMIT": True, **settings.pop("DATABASE", {})}
    connections.settings["default"].update(database)
    with override_settings(**{"CELERY_IDEMPOTENCY_TRANSACTION": "default", **settings}):
        app = Celery("shop", broker=sys.argv[2], backend=sys.argv[2])  # the current one from now on
        app.config_from_object("django.conf:settings", namespace="CELERY")
        app.task(name="shop.ship", base=IdempotentTask)(ship)
        app.task(name="shop.bill", shared=False, **plain)(ship)
        found = checks.run_checks(databases=["default"])
    ours = [message for message in found if str(message.id).startswith("celery_idempotent.")]
    return [[message.id.rpartition(".")[2], message.msg, message.hint] for message in ours]


MISTAKES: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"CELERY_IDEMPOTENCY_LEASE": -1}, "E001", ("idempotency_lease",)),
    ({"CELERY_IDEMPOTENCY_LEESE": 1}, "E001", ("idempotency_leese", "idempotency_lease")),
    ({"CELERY_IDEMPOTENCY_TRANSACTION": "other"}, "E002", ("'other'", "default")),
    ({"CELERY_IDEMPOTENCY_TRANSACTION": "no.module:engine"}, "E002", ("no.module:engine",)),
    ({"DATABASE": {"AUTOCOMMIT": False}}, "E002", ("AUTOCOMMIT",)),
    ({"PLAIN": {"idempotency_key": "{order}"}}, "E005", ("shop.bill", "base=IdempotentTask")),
]


def test_each_mistake_has_one_message_of_the_system_checks() -> None:
    for settings, number, texts in MISTAKES:
        ((found, text, hint),) = messages(dict(settings))
        assert found == number, settings
        assert all(each in f"{text} {hint}" for each in texts), text
    assert messages({}) == []


def rename(table: str, name: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO {name}")


def test_a_missing_table_is_a_warning() -> None:
    names = ["celery_idempotency_outcomes", "hidden"]
    rename(*names)
    ((found, text, hint),) = messages({})
    rename(*reversed(names))
    assert found == "W001"
    assert "celery_idempotency_outcomes" in text
    assert "manage.py migrate celery_idempotent --database default" in hint
    assert messages({}) == []


dump_failures(vars())
