"""Batches: one round trip begins any number of keys, and one completes them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from celery_idempotent.errors import (
    ConflictError,
    IdempotencyError,
    KeyReusedError,
    KeyRuleError,
    TransactionError,
)
from celery_idempotent.executor.active_execution import ActiveExecution
from celery_idempotent.executor.async_executor import AsyncExecutor
from celery_idempotent.executor.batch import Admission, begin_many, complete_many, release_many
from celery_idempotent.executor.batch_transaction import claim_many
from celery_idempotent.executor.call import ExecutorCall
from celery_idempotent.executor.execution import BaseExecution
from celery_idempotent.executor.executor import Executor
from celery_idempotent.executor.runtime.asyncio import AsyncioRuntime
from celery_idempotent.executor.runtime.run_flow import run_flow
from celery_idempotent.executor.runtime.runtime import Runtime
from celery_idempotent.functions.asyncio_flow import drive_begin, drive_end
from celery_idempotent.functions.decision import Decision
from celery_idempotent.payload.codec import PayloadCodec
from celery_idempotent.record.record import Record
from celery_idempotent.sql.database import Database
from celery_idempotent.sql.transaction import Transaction


class Entry:
    """One key of a batch."""

    def __init__(self, key: Hashable) -> None:
        #: The key, as passed by the caller.
        self.key = key
        self.decision = Decision.DUPLICATE
        #: The reason for REJECTED, the holder of the key under CONFLICT, or why the value of a
        #: completed key is not stored.
        self.error: IdempotencyError | None = None
        #: The finished record under REPLAY.
        self.record: Record | None = None
        self.active: ActiveExecution | None = None
        self._execution: BaseExecution | None = None

    def apply(self, admission: Admission) -> None:
        """Sets the decision from what the executor returned for the key."""
        self.active = self._execution = None
        if isinstance(admission, ActiveExecution):
            self.decision, self.active = Decision.RUN, admission
            self._execution = admission.execution
        elif isinstance(admission, BaseExecution):
            self.decision, self._execution = Decision.RUN, admission
        elif isinstance(admission, IdempotencyError):
            self.error = admission
            conflict = isinstance(admission, ConflictError)
            self.decision = Decision.CONFLICT if conflict else Decision.REJECTED
        else:
            self.decision, self.record = Decision.REPLAY, admission

    @property
    def replay(self) -> Any:
        """The stored value under REPLAY; for a key that failed, the exception.

        Raises:
            ResultNotStoredError: if the value was not stored.
            CorruptRecordError: if the value cannot be read.
        """
        return None if self.record is None else self.record.outcome()

    @property
    def token(self) -> int:
        """The fencing token under RUN, else 0."""
        return 0 if self._execution is None else self._execution.token

    @property
    def attempt(self) -> int:
        """Under RUN 1, plus 1 for each execution that died before; else 0."""
        return 0 if self._execution is None else self._execution.attempt


class BaseBatch(Sequence[Entry]):
    """The entries in the order of the keys; the leases of pending keys are renewed."""

    def __init__(
        self,
        runtime: Runtime,
        codec: PayloadCodec,
        keys: Sequence[Hashable],
        calls: Sequence[ExecutorCall | IdempotencyError],
        database: Database | None = None,
    ) -> None:
        self._runtime = runtime
        self._codec = codec
        self._entries = [Entry(key) for key in keys]
        self._calls = calls
        self._pending: dict[Hashable, Entry] = {}
        self._transaction = None if database is None else Transaction(database)

    def __getitem__(self, index: Any) -> Any:
        return self._entries[index]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    @property
    def pending(self) -> list[Hashable]:
        """The keys to run that are neither completed nor released yet."""
        return list(self._pending)

    def check(self) -> None:
        """Checks, without a round trip, that no other execution can be running a pending key.

        Raises:
            LeaseLostError: naming the first key that another execution may have taken over.
        """
        for entry in self._pending.values():
            if entry.active is not None:
                entry.active.execution.check()

    async def _begin(self) -> None:
        first_uses: dict[str, tuple[Entry, ExecutorCall]] = {}
        digests: dict[Hashable, str] = {}
        for entry, call in zip(self._entries, self._calls, strict=True):
            if isinstance(call, IdempotencyError):
                entry.apply(call)
                continue
            if digests.setdefault(entry.key, call.key.digest) != call.key.digest:
                # complete_many could not tell them apart.
                entry.apply(
                    KeyRuleError(
                        f"{call.key}: the key equals an earlier key of the batch of another type, "
                        "such as 1 and 1.0; pass keys of one type"
                    )
                )
                continue
            _, first_call = first_uses.setdefault(call.key.digest, (entry, call))
            if first_call.key.fingerprint != call.key.fingerprint:
                entry.apply(
                    KeyReusedError(f"{call.key} appears earlier in the batch with other arguments")
                )
        calls = [call for _, call in first_uses.values()]
        admissions = await begin_many(calls, self._runtime, self._codec)
        for (entry, _), admission in zip(first_uses.values(), admissions, strict=True):
            entry.apply(admission)
            if entry.decision is Decision.RUN:
                self._pending[entry.key] = entry
            if entry.active is not None:
                entry.active.start()
        if self._transaction is not None and self._pending:
            granted = [
                (call, admission)
                for call, admission in zip(calls, admissions, strict=True)
                if isinstance(admission, (ActiveExecution, BaseExecution))
            ]
            claimed = await claim_many(granted, self._transaction, self._runtime, self._codec)
            for entry, admission in zip(list(self._pending.values()), claimed, strict=True):
                entry.apply(admission)
                if entry.decision is not Decision.RUN:
                    del self._pending[entry.key]

    async def _complete(self, values: Mapping[Hashable, Any] | None) -> dict[Hashable, Any]:
        if values is None:
            values = dict.fromkeys(self._pending)
        if self._transaction is not None and (rest := self._pending.keys() - values.keys()):
            raise IdempotencyError(
                f"complete_many commits the transaction of the batch, and {len(rest)} of its keys "
                "are pending; complete them with the others, or release them first"
            )
        protected = [entry for entry in self._take(values) if entry.active]
        try:
            errors = await complete_many(
                [(entry.active, values[entry.key]) for entry in protected if entry.active],
                self._runtime,
                self._transaction,
            )
        except BaseException:
            # Nothing has been sent for these: they can be completed or released.
            self._pending.update((e.key, e) for e in protected if e.active and e.active.renewed)
            raise
        for entry, error in zip(protected, errors, strict=True):
            entry.error = error
        return {entry.key: entry.error for entry in protected if entry.error}

    async def _release(self, keys: Iterable[Hashable] | None = None) -> None:
        entries = self._take(self.pending if keys is None else keys)
        if self._transaction is not None and not self._pending:
            self._transaction.rollback()
        if active := [entry.active for entry in entries if entry.active]:
            reason = IdempotencyError("the batch released the key without completing it")
            await release_many(active, self._runtime, reason)

    def _take(self, keys: Iterable[Hashable]) -> list[Entry]:
        """Removes the entries of `keys` from the pending ones, and returns them."""
        keys = list(dict.fromkeys(keys))
        for key in keys:
            if key not in self._pending:
                raise IdempotencyError(
                    "a key is not pending in this batch; complete or release each key of "
                    "Batch.pending once"
                )
        return [self._pending.pop(key) for key in keys]

    def _stop_renewal(self) -> None:
        for entry in self._pending.values():
            if entry.active is not None:
                entry.active.finish()


class Batch(BaseBatch):
    """A batch for blocking code. As a context manager it releases the pending keys at its end."""

    @classmethod
    def _begun(
        cls,
        executor: Executor,
        keys: Sequence[Hashable],
        calls: Sequence[ExecutorCall | IdempotencyError],
        database: Database | None = None,
    ) -> Batch:
        batch = cls(executor.runtime, executor.codec, keys, calls, database)
        try:
            run_flow(batch._begin)
        except BaseException:
            batch.release_many()
            raise
        return batch

    @property
    def connection(self) -> Any:
        """The connection of the batch's transaction, if ``transaction`` is set.

        Raises:
            TransactionError: if there is none, or it has ended.
        """
        if self._transaction is None:
            raise TransactionError("the batch has no transaction; pass transaction= to its engine")
        return self._transaction.connection

    def complete_many(self, values: Mapping[Hashable, Any] | None = None) -> dict[Hashable, Any]:
        """Stores a value for each of these keys; by default None for all pending keys.

        With a transaction it commits the effects and outcomes of all keys; what the database raises
        is raised, nothing is committed then, and the keys are released. Each pending key must be
        completed, or released before.

        Returns:
            The error of each key whose value is not stored, which is also the `error` of its entry:
            LeaseLostError if another execution has taken over, StoreUnavailableError if Redis was
            unavailable until the lease expired, ResultNotStoredError if the value cannot be
            serialized or is too large (the key has completed without it).
        """
        return run_flow(partial(self._complete, values))

    def release_many(self, keys: Iterable[Hashable] | None = None) -> None:
        """Releases these keys, by default all pending ones; the next caller may run them."""
        run_flow(partial(self._release, keys))

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self.release_many()


class AsyncBatch(BaseBatch):
    """A batch for coroutines. As a context manager it releases the pending keys at its end."""

    _runtime: AsyncioRuntime

    @classmethod
    async def _begun(
        cls,
        executor: AsyncExecutor,
        keys: Sequence[Hashable],
        calls: Sequence[ExecutorCall | IdempotencyError],
    ) -> AsyncBatch:
        runtime = AsyncioRuntime(executor.store)
        batch = cls(runtime, executor.codec, keys, calls)
        await drive_begin(runtime, batch._begin(), lambda _: batch._release(), batch._stop_renewal)
        return batch

    async def complete_many(
        self, values: Mapping[Hashable, Any] | None = None
    ) -> dict[Hashable, Any]:
        """As :meth:`Batch.complete_many`."""
        return await self._runtime.drive(self._complete(values))

    async def release_many(self, keys: Iterable[Hashable] | None = None) -> None:
        """As :meth:`Batch.release_many`."""
        await self._runtime.drive(self._release(keys))

    async def __aenter__(self) -> AsyncBatch:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await drive_end(self._runtime, self._release(), self._stop_renewal, error)
