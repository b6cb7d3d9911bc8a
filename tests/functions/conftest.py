"""An engine for each test, and calls that are the same for blocking code and for coroutines."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from celery_idempotent import Decision, Idempotency, IdempotencyError, State
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
    """Calls of a kind, ``blocking`` or ``async``, of functions, blocks, steps and batches.

    All of them block.
    """

    def __init__(self, kind: str, idem: Idempotency) -> None:
        self.kind, self.idem = kind, idem
        #: The orders whose function has run.
        self.runs: list[str] = []
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        """Closes the connections and the event loop."""
        self.idem.close()
        if not self._loop.is_closed():
            self.run(self.idem.aclose())
            self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(coroutine)

    def states(self) -> list[State]:
        """Returns the states of all records."""
        return [record.state for record in self.idem.records()]

    def function(self, body: Callable[[str], Any], **options: Any) -> Callable[..., Any]:
        """Returns an idempotent function that returns what `body` returns."""
        decorate = self.idem.idempotent(**{"key": "{order}", "name": "shop.charge", **options})
        if self.kind == "blocking":

            @decorate
            def charge(order: str, amount: int = 0) -> Any:
                self.runs.append(order)
                return body(order)

            return charge  # type: ignore[no-any-return]

        @decorate
        async def acharge(order: str, amount: int = 0) -> Any:
            self.runs.append(order)
            await asyncio.sleep(0)
            return body(order)

        return lambda *args, **kwargs: self.run(acharge(*args, **kwargs))

    def within(self, context: Any, use: Callable[[Any], Any]) -> Any:
        """Returns what `use` returns, inside the block, for what the block yields."""
        if self.kind == "blocking":
            with context as entered:
                return use(entered)

        async def enter() -> Any:
            async with context as entered:
                value = use(entered)
                return await value if inspect.isawaitable(value) else value

        return self.run(enter())

    def complete(self, key: str, value: Any, **options: Any) -> Any:
        """Returns what ``complete(value)`` of a block returns, or what the block replays."""

        def use(execution: Any) -> Any:
            is_done = execution.decision is Decision.REPLAY
            return execution.replay if is_done else execution.complete(value)

        return self.within(self.idem.execution(key, **options), use)

    def step(self, key: str, body: Callable[[], Any], **options: Any) -> Any:
        """Returns what a step returns, in a block that does not complete."""
        block = self.idem.execution(key, **options)
        return self.within(block, lambda execution: execution.step("book", body))

    def batch(self, keys: Sequence[Any], fingerprints: Sequence[Any] | None = None) -> Any:
        """Begins the keys."""
        if self.kind == "blocking":
            return self.idem.begin_many(keys, fingerprints)
        return self.run(self.idem.abegin_many(keys, fingerprints))

    def use_batch(
        self,
        keys: Sequence[Any],
        fingerprints: Sequence[Any] | None = None,
        values: dict[Any, Any] | None = None,
    ) -> tuple[list[Any], dict[Any, IdempotencyError]]:
        """Begins the keys, completes those of `values` or all, and releases the others.

        Returns:
            The entries, and what complete_many returned.
        """
        batch = self.batch(keys, fingerprints)
        return list(batch), self.within(batch, lambda batch: batch.complete_many(values))


#: Seconds. On a busy machine a process may be paused for so long that its lease expires.
LEASE = 2.0


@pytest.fixture
def idem(server: RedisServer) -> Iterator[Idempotency]:
    engine = Idempotency(server.url, key_prefix=uuid4().hex, lease=LEASE, wait_timeout=20)
    yield engine
    engine.close()


@pytest.fixture(params=["blocking", "async"])
def calls(request: pytest.FixtureRequest, idem: Idempotency) -> Iterator[Calls]:
    calls = Calls(request.param, idem)
    yield calls
    calls.close()
