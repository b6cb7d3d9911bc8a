"""Many keys at once: one round trip begins them all, one completes them."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from celery_idempotent.errors import ConflictError, IdempotencyError, KeyReusedError
from celery_idempotent.executor.active_execution import ActiveExecution
from celery_idempotent.executor.async_executor import AsyncExecutor
from celery_idempotent.executor.batch import Admission, begin_many, complete_many, release_many
from celery_idempotent.executor.call import ExecutorCall
from celery_idempotent.executor.execution import BaseExecution
from celery_idempotent.executor.executor import Executor
from celery_idempotent.executor.runtime.asyncio import AsyncioRuntime
from celery_idempotent.executor.runtime.run_sync import run_sync
from celery_idempotent.executor.runtime.runtime import Runtime
from celery_idempotent.functions.decision import Decision
from celery_idempotent.payload.codec import PayloadCodec
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
        self.active: ActiveExecution | None = None
        self._execution: BaseExecution | None = None

    def apply(self, admission: Admission) -> None:
        """Take what the gate has decided."""
        if isinstance(admission, ActiveExecution):
            self.decision, self.active = Decision.RUN, admission
            self._execution = admission.execution
        elif isinstance(admission, BaseExecution):
            self.decision, self._execution = Decision.RUN, admission
        elif isinstance(admission, Record):
            self.decision, self.record = Decision.REPLAY, admission
        else:
            self.refuse(admission)

    def refuse(self, error: IdempotencyError) -> None:
        """This one alone cannot be run."""
        held = isinstance(error, ConflictError)
        self.decision, self.error = Decision.CONFLICT if held else Decision.REJECTED, error

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

    def __init__(self, keys: Sequence[Hashable], calls: Sequence[ExecutorCall]) -> None:
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
    def pending(self) -> list[Hashable]:
        """The keys that are to be run, and neither completed nor released yet."""
        return list(self._open)

    def check(self) -> None:
        """Make sure, without a round trip, that nobody else can be running any of them.

        Raises:
            LeaseLostError: naming the first that another has taken over, or may have by now.
        """
        for entry in self._open.values():
            if entry.active is not None:
                entry.active.execution.check()

    async def begin(self, runtime: Runtime, codec: PayloadCodec) -> None:
        """Ask for all of them."""
        first: dict[str, tuple[Entry, ExecutorCall]] = {}
        for entry, call in zip(self._entries, self._calls, strict=True):
            _, before = first.setdefault(call.key.digest, (entry, call))
            if before.key.fingerprint != call.key.fingerprint:
                entry.refuse(KeyReusedError(f"{call.key} stands in the batch with other arguments"))
        standings = await begin_many([call for _, call in first.values()], runtime, codec)
        for (entry, _), admission in zip(first.values(), standings, strict=True):
            entry.apply(admission)
            if entry.decision is Decision.RUN:
                self._open[entry.key] = entry
            if entry.active is not None:
                entry.active.start()
                entry.active.announce()

    async def _complete(
        self, values: Mapping[Hashable, Any] | None, runtime: Runtime
    ) -> dict[Hashable, Any]:
        values = dict.fromkeys(self._open) if values is None else values
        entries = self._taken(values)
        done = [(entry.active, values[entry.key]) for entry in entries if entry.active]
        faults = await complete_many(done, runtime)
        protected = [entry.key for entry in entries if entry.active]
        return {key: fault for key, fault in zip(protected, faults, strict=True) if fault}

    async def _release(self, keys: Iterable[Hashable] | None, runtime: Runtime) -> None:
        runs = [e.active for e in self._taken(self.pending if keys is None else keys) if e.active]
        if runs:
            await release_many(runs, runtime, IdempotencyError("the batch gives the key back"))

    def _let_go(self) -> None:
        for entry in self._open.values():
            if entry.active is not None:
                entry.active.finish()

    def _taken(self, keys: Iterable[Hashable]) -> list[Entry]:
        """The entries of `keys`, for the last time."""
        wanted = list(keys)
        for key in wanted:
            if key not in self._open:
                raise IdempotencyError("a key is not, or no longer, this batch's to run")
        return [self._open.pop(key) for key in wanted]


class Batch(_Batch):
    """Many keys, for code that blocks. As a context manager it releases what is left."""

    def __init__(
        self, executor: Executor, keys: Sequence[Hashable], calls: Sequence[ExecutorCall]
    ) -> None:
        super().__init__(keys, calls)
        self._executor = executor

    def complete_many(self, values: Mapping[Hashable, Any] | None = None) -> dict[Hashable, Any]:
        """Store a value for each of these keys; by default None for all that are to be run.

        Returns:
            The error of each key whose value is not stored: LeaseLostError where someone else has
            taken over, StoreUnavailableError where Redis stayed away until the lease ended.
        """
        return run_sync(self._complete(values, self._executor.runtime))

    def release_many(self, keys: Iterable[Hashable] | None = None) -> None:
        """Give these keys back, by default all that are to be run: the next who comes runs them."""
        run_sync(self._release(keys, self._executor.runtime))

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self.release_many()


class AsyncBatch(_Batch):
    """Many keys, for code on an event loop. As a context manager it releases what is left."""

    def __init__(
        self, executor: AsyncExecutor, keys: Sequence[Hashable], calls: Sequence[ExecutorCall]
    ) -> None:
        super().__init__(keys, calls)
        self._runtime = AsyncioRuntime(executor.store)

    async def complete_many(
        self, values: Mapping[Hashable, Any] | None = None
    ) -> dict[Hashable, Any]:
        """As :meth:`Batch.complete_many`."""
        return await self._runtime.drive(self._complete(values, self._runtime))

    async def release_many(self, keys: Iterable[Hashable] | None = None) -> None:
        """As :meth:`Batch.release_many`."""
        await self._runtime.drive(self._release(keys, self._runtime))

    async def __aenter__(self) -> AsyncBatch:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, GeneratorExit):
            self._let_go()  # the loop is gone: nothing can be awaited
        elif isinstance(error, asyncio.CancelledError):
            await self._runtime.abandon(self._release(None, self._runtime))
        else:
            await self.release_many()


def begun(executor: Executor, keys: Sequence[Hashable], calls: Sequence[ExecutorCall]) -> Batch:
    """A batch that has begun; where a signal's handler raises, all keys are given back."""
    batch = Batch(executor, keys, calls)
    try:
        run_sync(batch.begin(executor.runtime, executor.codec))
    except BaseException:
        batch.release_many()
        raise
    return batch


async def async_begun(
    executor: AsyncExecutor, keys: Sequence[Hashable], calls: Sequence[ExecutorCall]
) -> AsyncBatch:
    """A batch that has begun; where that is cancelled, all keys are given back."""
    batch = AsyncBatch(executor, keys, calls)
    runtime = batch._runtime  # noqa: SLF001
    try:
        await runtime.drive(batch.begin(runtime, executor.codec))
    except BaseException as error:
        await batch.__aexit__(type(error), error, None)
        raise
    return batch
