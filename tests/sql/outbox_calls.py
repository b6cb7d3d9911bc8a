"""Bodies that publish on commit, in a Django process; prints what has become of each as JSON.

python -m tests.sql.outbox_calls DATABASE_URL REDIS_URL
"""

from __future__ import annotations

import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from uuid import uuid4

from celery import Celery, chain, group
from kombu.exceptions import OperationalError

from celery_idempotent import Decision, Idempotency, IdempotentTask
from celery_idempotent.errors import StoreUnavailableError
from tests.sql import django_process
from tests.sql.databases import set_up_django
from tests.sql.django_process import effects, insert
from tests.sql.processes import dump_cases

set_up_django(sys.argv[1])

from django.db import IntegrityError, transaction  # noqa: E402 - Django has to be set up

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


@contextmanager
def interrupted_commit() -> Iterator[None]:
    """A signal comes after the next commit."""
    commit = DjangoSession.commit

    def die(session: DjangoSession) -> None:
        DjangoSession.commit = commit  # type: ignore[method-assign]
        session.commit()
        raise KeyboardInterrupt

    DjangoSession.commit = die  # type: ignore[method-assign]
    yield


@contextmanager
def broker_unavailable() -> Iterator[None]:
    send = app.amqp.send_task_message

    def refuse(*_: Any, **__: Any) -> None:
        raise OperationalError("connection refused")

    app.amqp.send_task_message = refuse
    try:
        yield
    finally:
        app.amqp.send_task_message = send


class Call(django_process.Call):
    def __init__(
        self, during: Callable[[str], Any], engine: Idempotency = idem, **options: Any
    ) -> None:
        super().__init__(engine, during, **options)

    @property
    def outboxes(self) -> int:
        """The number of rows of this call whose messages are not published."""
        key = str(self.function.idempotency_key_of(self.name))
        return Outcome.objects.filter(record_key=key, outbox__isnull=False).count()

    def result(self) -> list[Any]:
        """Calls it twice; returns both outcomes, the effects, and what was published."""
        return [self(), self(), effects(self.name), tasks(published())]


def forms() -> list[Any]:
    """Every form in which a message is published."""

    def during(name: str) -> None:
        on_commit(partial(notify.delay, name))
        on_commit(partial(notify.apply_async, (name,), countdown=1))
        on_commit(partial(notify.apply_async, kwargs={"order": name}, queue="celery"))
        on_commit(notify.s(name).delay)
        on_commit(notify.si(name).apply_async)
        on_commit(partial(bill.apply_async, ("7",), idempotency_key=uuid4()))
        on_commit(chain(notify.si(name), bill.si(name)).apply_async)
        on_commit(group([notify.s(name)] * 2).delay)

    call = Call(during)
    call()
    messages = published()
    return [*tasks(messages), len({task_id for _, task_id in messages}), call.outboxes]


def rolled_back() -> list[Any]:
    def during(name: str) -> None:
        on_commit(partial(notify.delay, name))
        raise ZeroDivisionError

    return Call(during).result()


def rolled_back_to_a_savepoint() -> list[Any]:
    def during(name: str) -> None:
        with transaction.atomic():
            on_commit(partial(notify.delay, name))
            transaction.set_rollback(True)
        on_commit(partial(bill.delay, name))

    return Call(during).result()


def interrupted_after_the_commit() -> list[Any]:
    """A signal handler raises KeyboardInterrupt."""
    call = Call(lambda name: on_commit(partial(notify.delay, name)))
    with interrupted_commit(), suppress(KeyboardInterrupt):
        call()
    return [*call.result(), call.outboxes]


def replayed_error_of_the_commit() -> list[Any]:
    """A deferred constraint fails: its error is the outcome, and nothing is published."""

    def during(name: str) -> None:
        on_commit(partial(notify.delay, name))

    def refuse(session: DjangoSession) -> None:
        DjangoSession.commit = commit  # type: ignore[method-assign]
        session.rollback()
        raise IntegrityError

    call = Call(during, replay_errors=(IntegrityError,))
    commit, DjangoSession.commit = DjangoSession.commit, refuse  # type: ignore[method-assign]
    return call.result()


def found_in_the_row() -> list[Any]:
    """As after a kill: the row has messages, and Redis has no record."""
    call = Call(lambda name: on_commit(chain(notify.si(name), bill.si(name)).apply_async))
    outboxes: list[Any] = []

    def keep(session: DjangoSession, statement: str, values: Any) -> Any:
        if "outbox = NULL WHERE id" in statement:
            outboxes.append(values)
            statement = statement.replace("outbox = NULL", "owner = owner")
        return execute(session, statement, values)

    execute, DjangoSession.execute = DjangoSession.execute, keep  # type: ignore[method-assign]
    first = call()
    DjangoSession.execute = execute  # type: ignore[method-assign]
    before = published()
    left = call.outboxes
    idem.executor.store.client.flushdb()
    again = call()
    after = published()
    idem.executor.store.client.flushdb()
    return [first, again, left, call.outboxes, before == after, tasks(after), call(), published()]


def broker_was_unavailable() -> list[Any]:
    call = Call(lambda name: on_commit(partial(notify.delay, name)))
    with broker_unavailable():
        refused = call()
    return [refused.partition(":")[0], effects(call.name), call.outboxes, *call.result()]


def expired_before_it_was_published() -> list[Any]:
    call = Call(lambda name: on_commit(partial(notify.delay, name)))
    with broker_unavailable():
        call()
    Outcome.objects.filter(outbox__isnull=False).update(expires_at=1)
    kept = idem.settings.transaction.purge(10)[0]
    return [kept, call(), effects(call.name), tasks(published()), call.outboxes]


def refused() -> list[Any]:
    """What is lost if the process dies, and messages that cannot be stored."""
    own: list[str] = []
    found = []
    for function in (
        lambda: own.append("called"),
        partial(own.append, "called"),
        partial(in_pickle.delay, "1"),
        partial(notify.delay, object()),
        partial(bill.apply_async, ("1",), idempotency_kee="1"),
        notify_by_another_app.delay,
    ):
        call = Call(lambda _, function=function: on_commit(function))
        found.append([call(), effects(call.name), own, published()])
    call = Call(lambda name: on_commit(partial(notify.delay, name)), without_app)
    return [*found, [call(), effects(call.name), own, published()]]


def encrypted() -> list[Any]:
    keys = [b64encode(bytes(32)).decode()]
    engine = Idempotency(app, transaction="default", encryption_keys=keys)
    call = Call(lambda name: on_commit(partial(notify.delay, name)), engine)
    with broker_unavailable():
        call()
    outbox = bytes(Outcome.objects.get(outbox__isnull=False).outbox)
    return [outbox[:6].decode(), b"body" in outbox, *call.result()]


def robust() -> list[Any]:
    """Django calls it; its author has declared that it may be lost."""
    called: list[str] = []

    def during(name: str) -> None:
        on_commit(lambda: called.append(name), robust=True)
        on_commit(lambda: 1 / 0, robust=True)

    return [*Call(during).result(), len(called)]


def permanently_refused() -> list[Any]:
    """A wrong argument is found when the message is published."""
    return Call(
        lambda name: (on_commit(partial(bill.delay, name, 2)), on_commit(partial(notify.delay, 1)))
    ).result()


def step() -> list[Any]:
    ends: list[Callable[[], Any]] = [lambda: None, lambda: 1 / 0]

    @idem.idempotent(key="{name}", name="ship", transaction=None)
    def ship(name: str) -> None:
        def book() -> None:
            insert(name)
            on_commit(partial(notify.delay, name))

        idem.current.step("book", book, transaction="default")
        ends.pop()()

    found = []
    name = uuid4().hex
    with broker_unavailable():
        try:
            ship(name)
        except StoreUnavailableError as error:
            found.append(type(error).__name__)
    while ends:
        with suppress(ZeroDivisionError):
            ship(name)
        found.append(tasks(published()))
    return [*found, effects(name)]


def batch() -> list[Any]:
    keys = [uuid4().hex for _ in range(2)]
    found: list[Any] = []
    for available in (False, True, True):
        with idem.begin_many(keys) as batch:
            for entry in batch:
                if entry.decision is Decision.RUN:
                    insert(entry.key)
                    on_commit(partial(notify.delay, entry.key))
            try:
                if available:
                    batch.complete_many()
                else:
                    with broker_unavailable():
                        batch.complete_many()
            except StoreUnavailableError as error:
                found.append(type(error).__name__)
        found.append([*(entry.decision.name for entry in batch), tasks(published())])
    return [*found, [effects(key) for key in keys]]


dump_cases(
    forms,
    rolled_back,
    rolled_back_to_a_savepoint,
    interrupted_after_the_commit,
    replayed_error_of_the_commit,
    found_in_the_row,
    broker_was_unavailable,
    expired_before_it_was_published,
    refused,
    encrypted,
    robust,
    permanently_refused,
    step,
    batch,
)
