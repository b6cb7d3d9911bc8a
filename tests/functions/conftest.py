"""An engine for each test.

Also functions, blocks and steps that are the same for blocking code and for coroutines, and values
to return.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from celery_idempotent import Decision, Idempotency, State
from celery_idempotent.core.key.rule import KeyRule
from celery_idempotent.core.store import commands, run_sync
from tests.servers.redis_server import RedisServer

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def abandon(idem: Idempotency, key: str) -> None:
    """Ends the lease of the execution of `key`, as if its process had died."""
    name, store = idem.key_of(key), idem.executor.store
    record = run_sync(store.get(name))
    assert record is not None
    command = commands.abandon(name, record.task_id, record.worker, grace_ms=0, reason="")
    run_sync(store.execute(command))


def decisions(entries: Iterable[Any]) -> list[Decision]:
    return [entry.decision for entry in entries]


class Shop:
    """Makes idempotent functions of a kind, ``blocking`` or ``async``; calls of both block."""

    def __init__(self, idem: Idempotency, run: Run, kind: str) -> None:
        self.idem = idem
        self.kind = kind
        #: The orders whose function has run.
        self.runs: list[Any] = []
        self._run = run

    def idempotent(self, body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Returns an idempotent function that runs `body`."""
        options = {"key": "order:{order}", "name": "shop.charge", **options}
        if self.kind == "blocking":

            def charge(order: str, amount: int = 0) -> Any:
                self.runs.append(order)
                return body(order)

            return self.idem.idempotent(**options)(charge)

        async def acharge(order: str, amount: int = 0) -> Any:
            self.runs.append(order)
            await asyncio.sleep(0)
            return body(order)

        call = self.idem.idempotent(**options)(acharge)
        return lambda *args, **kwargs: self._run(call(*args, **kwargs))

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs `coroutine` in an event loop of its own."""
        return self._run(coroutine)

    def state(self, order: str) -> State | None:
        """Returns the state of the order's record."""
        signature = inspect.signature(lambda order, amount=0: None)
        rule = KeyRule("shop.charge", "order:{order}", signature, lambda *arguments: arguments)
        key = rule.derive((order,), {})
        record = run_sync(self.idem.executor.store.get(key))
        return record and record.state


class Money:
    """A type that only pickle can serialize."""

    def __init__(self, cents: int) -> None:
        self.cents = cents

    def __repr__(self) -> str:
        return f"Money({self.cents})"


class Point(NamedTuple):
    x: int
    y: int


def same(one: Any, other: Any) -> bool:
    """Returns whether two values are equal, and all of their parts have the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (set, frozenset)):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    return repr(one) == repr(other)  # NaN does not equal itself


class Calls:
    """Calls functions, blocks and steps of a kind, ``blocking`` or ``async``; all calls block."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._loop = asyncio.new_event_loop()

    def close(self, idem: Idempotency) -> None:
        """Closes the connections of `idem` and the event loop."""
        idem.close()
        if not self._loop.is_closed():
            self._loop.run_until_complete(idem.aclose())
            self._loop.close()

    def function(
        self, idem: Idempotency, body: Callable[[str], Any], **options: Any
    ) -> Callable[[str], Any]:
        """Returns an idempotent function that returns what `body` returns."""
        options = {"name": "shop.charge", "key": "{order}", **options}
        if self._kind == "blocking":

            def charge(order: str) -> Any:
                return body(order)

            return idem.idempotent(**options)(charge)

        async def acharge(order: str) -> Any:
            return body(order)

        call = idem.idempotent(**options)(acharge)
        return lambda order: self._loop.run_until_complete(call(order))

    def complete(self, idem: Idempotency, key: str, value: Any, **options: Any) -> Any:
        """Returns what ``complete(value)`` of a block returns, or what the block replays."""

        async def acomplete() -> Any:
            async with idem.execution(key, **options) as execution:
                if execution.decision is Decision.REPLAY:
                    return execution.replay
                return await execution.complete(value)

        if self._kind == "async":
            return self._loop.run_until_complete(acomplete())
        with idem.execution(key, **options) as execution:
            if execution.decision is Decision.REPLAY:
                return execution.replay
            return execution.complete(value)

    def step(self, idem: Idempotency, key: str, body: Callable[[], Any], **options: Any) -> Any:
        """Returns what a step returns, in a block that does not complete."""

        async def astep() -> Any:
            async with idem.execution(key, **options) as execution:
                return await execution.step("book", body)

        if self._kind == "async":
            return self._loop.run_until_complete(astep())
        with idem.execution(key, **options) as execution:
            return execution.step("book", body)


#: Seconds. On a busy machine a process may be paused for so long that its lease expires.
LEASE = 2.0


@pytest.fixture
def idem(server: RedisServer) -> Iterator[Idempotency]:
    engine = Idempotency(server.url, key_prefix=uuid4().hex, lease=LEASE, wait_timeout=20)
    yield engine
    engine.close()


@pytest.fixture(params=["blocking", "async"])
def shop(request: pytest.FixtureRequest, idem: Idempotency, run: Run) -> Shop:
    return Shop(idem, run, request.param)


@pytest.fixture(params=["blocking", "async"])
def calls(request: pytest.FixtureRequest, idem: Idempotency) -> Iterator[Calls]:
    calls = Calls(request.param)
    yield calls
    calls.close(idem)
