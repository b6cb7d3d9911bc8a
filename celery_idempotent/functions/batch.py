"""Many keys at once: one round trip begins them all, one completes them."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from celery_idempotent.errors import ConflictError, IdempotencyError, KeyReusedError
from celery_idempotent.executor.active_execution import Running
from celery_idempotent.executor.async_executor import AsyncGate
from celery_idempotent.executor.batch import Standing, begin_many, complete_many, release_many
from celery_idempotent.executor.call import Caller
from celery_idempotent.executor.execution import AnyExecution
from celery_idempotent.executor.executor import Gate
from celery_idempotent.executor.runtime.asyncio import Loop
from celery_idempotent.executor.runtime.run_sync import at_once
from celery_idempotent.executor.runtime.runtime import World
from celery_idempotent.functions.decision import Decision
from celery_idempotent.payload.codec import Payloads
from celery_idempotent.record.record import Record


class Entry:
    """One key of a batch."""

    def __init__(self, key: Hashable) -> None:
        #: As it was given.
        self.key = key
        self.decision = Decision.DUPLICATE
        #: Why it is REFUSED, or who has it under CONFLICT.
        self.error: IdempotencyError | None = None
        #: What is there under REPLAY.
        self.record: Record | None = None
        self.running: Running | None = None
        self._execution: AnyExecution | None = None

    def stand(self, standing: Standing) -> None:
        """Take what the gate has decided."""
        if isinstance(standing, Running):
            self.decision, self.running = Decision.RUN, standing
            self._execution = standing.execution
        elif isinstance(standing, AnyExecution):
            self.decision, self._execution = Decision.RUN, standing
        elif isinstance(standing, Record):
            self.decision, self.record = Decision.REPLAY, standing
        else:
            self.refuse(standing)

    def refuse(self, error: IdempotencyError) -> None:
        """This one alone cannot be run."""
        held = isinstance(error, ConflictError)
        self.decision, self.error = Decision.CONFLICT if held else Decision.REFUSED, error

    @property
    def replay(self) -> Any:
        """The value that the key has under REPLAY; for one that failed the exception.

        Raises:
            ResultNotStoredError: if the value was not kept.
            CorruptRecordError: if it cannot be read.
        """
        return None if self.record is None else self.record.outcome()

    @property
    def token(self) -> int:
        """Fencing token under RUN, else 0."""
        return 0 if self._execution is None else self._execution.token

    @property
    def attempt(self) -> int:
        """Under RUN 1, and one more for each execution that died before; else 0."""
        return 0 if self._execution is None else self._execution.attempt


class _Batch(Sequence[Entry]):
    """The entries in the order of the keys, and one lease for all that are to be run."""

    def __init__(self, keys: Sequence[Hashable], calls: Sequence[Caller]) -> None:
        self._entries = [Entry(key) for key in keys]
        self._calls = calls
        self._open: dict[Hashable, Entry] = {}

    def __getitem__(self, place: Any) -> Any:
        return self._entries[place]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    @property
    def to_run(self) -> list[Hashable]:
        """The keys that are to be run, and neither completed nor released yet."""
        return list(self._open)

    def check(self) -> None:
        """Make sure, without a round trip, that nobody else can be running any of them.

        Raises:
            LeaseLostError: naming the first that another has taken over, or may have by now.
        """
        for entry in self._open.values():
            if entry.running is not None:
                entry.running.execution.check()

    async def begin(self, world: World, payloads: Payloads) -> None:
        """Ask for all of them."""
        first: dict[str, tuple[Entry, Caller]] = {}
        for entry, call in zip(self._entries, self._calls, strict=True):
            _, before = first.setdefault(call.key.digest, (entry, call))
            if before.key.fingerprint != call.key.fingerprint:
                entry.refuse(KeyReusedError(f"{call.key} stands in the batch with other arguments"))
        standings = await begin_many([call for _, call in first.values()], world, payloads)
        for (entry, _), standing in zip(first.values(), standings, strict=True):
            entry.stand(standing)
            if entry.decision is Decision.RUN:
                self._open[entry.key] = entry
            if entry.running is not None:
                entry.running.start()
                entry.running.announce()

    async def _complete(
        self, values: Mapping[Hashable, Any] | None, world: World
    ) -> dict[Hashable, Any]:
        values = dict.fromkeys(self._open) if values is None else values
        entries = self._taken(values)
        done = [(entry.running, values[entry.key]) for entry in entries if entry.running]
        faults = await complete_many(done, world)
        protected = [entry.key for entry in entries if entry.running]
        return {key: fault for key, fault in zip(protected, faults, strict=True) if fault}

    async def _release(self, keys: Iterable[Hashable] | None, world: World) -> None:
        runs = [e.running for e in self._taken(self.to_run if keys is None else keys) if e.running]
        if runs:
            await release_many(runs, world, IdempotencyError("the batch gives the key back"))

    def _let_go(self) -> None:
        for entry in self._open.values():
            if entry.running is not None:
                entry.running.over()

    def _taken(self, keys: Iterable[Hashable]) -> list[Entry]:
        """The entries of `keys`, for the last time."""
        wanted = list(keys)
        for key in wanted:
            if key not in self._open:
                raise IdempotencyError("a key is not, or no longer, this batch's to run")
        return [self._open.pop(key) for key in wanted]


class Batch(_Batch):
    """Many keys, for code that blocks. As a context manager it releases what is left."""

    def __init__(self, gate: Gate, keys: Sequence[Hashable], calls: Sequence[Caller]) -> None:
        super().__init__(keys, calls)
        self._gate = gate

    def complete_many(self, values: Mapping[Hashable, Any] | None = None) -> dict[Hashable, Any]:
        """Store a value for each of these keys; by default None for all that are to be run.

        Returns:
            The error of each key whose value is not stored: LeaseLostError where someone else has
            taken over, StoreUnavailableError where Redis stayed away until the lease ended.
        """
        return at_once(self._complete(values, self._gate.world))

    def release_many(self, keys: Iterable[Hashable] | None = None) -> None:
        """Give these keys back, by default all that are to be run: the next who comes runs them."""
        at_once(self._release(keys, self._gate.world))

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self.release_many()


class AsyncBatch(_Batch):
    """Many keys, for code on an event loop. As a context manager it releases what is left."""

    def __init__(self, gate: AsyncGate, keys: Sequence[Hashable], calls: Sequence[Caller]) -> None:
        super().__init__(keys, calls)
        self._world = Loop(gate.store)

    async def complete_many(
        self, values: Mapping[Hashable, Any] | None = None
    ) -> dict[Hashable, Any]:
        """As :meth:`Batch.complete_many`."""
        return await self._world.drive(self._complete(values, self._world))

    async def release_many(self, keys: Iterable[Hashable] | None = None) -> None:
        """As :meth:`Batch.release_many`."""
        await self._world.drive(self._release(keys, self._world))

    async def __aenter__(self) -> AsyncBatch:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, GeneratorExit):
            self._let_go()  # the loop is gone: nothing can be awaited
        elif isinstance(error, asyncio.CancelledError):
            await self._world.abandon(self._release(None, self._world))
        else:
            await self.release_many()


def begun(gate: Gate, keys: Sequence[Hashable], calls: Sequence[Caller]) -> Batch:
    """A batch that has begun; where a signal's handler raises, all keys are given back."""
    batch = Batch(gate, keys, calls)
    try:
        at_once(batch.begin(gate.world, gate.payloads))
    except BaseException:
        batch.release_many()
        raise
    return batch


async def async_begun(
    gate: AsyncGate, keys: Sequence[Hashable], calls: Sequence[Caller]
) -> AsyncBatch:
    """A batch that has begun; where that is cancelled, all keys are given back."""
    batch = AsyncBatch(gate, keys, calls)
    world = batch._world  # noqa: SLF001
    try:
        await world.drive(batch.begin(world, gate.payloads))
    except BaseException as error:
        await batch.__aexit__(type(error), error, None)
        raise
    return batch
