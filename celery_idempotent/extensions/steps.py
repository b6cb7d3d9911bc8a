"""Steps: parts of an execution whose values are stored, so that they run once for a key."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from celery_idempotent.errors import (
    IdempotencyError,
    LeaseLostError,
    StoreUnavailableError,
    TransactionError,
)
from celery_idempotent.events import table
from celery_idempotent.extensions.outbox import (
    begin_at_rows,
    claim_of,
    commit_with_outbox,
    publish_found,
)
from celery_idempotent.flow.active_call import ActiveCall, Extension
from celery_idempotent.flow.call import Complete, Fail
from celery_idempotent.flow.end import Settlement
from celery_idempotent.flow.outcome import Failure, Outcome, Result, is_asynchronous, restored
from celery_idempotent.lease.clock import lease_now
from celery_idempotent.record import steps
from celery_idempotent.record.payload import Payload, step_field
from celery_idempotent.record.record import State
from celery_idempotent.sql.database import Database, step_databases
from celery_idempotent.sql.outcomes import OutcomeValues
from celery_idempotent.sql.transaction import Transaction
from celery_idempotent.store import commands
from celery_idempotent.store.scripts import Reply


class Steps(Extension):
    """The finished steps of a call, including those of its earlier executions."""

    def __init__(self, call: ActiveCall) -> None:
        super().__init__(call)
        #: The databases that have rows of steps.
        self._databases: set[Database] = set()
        #: The values of the steps that this execution has run.
        self._payloads: dict[str, Payload] = {}
        #: The names of the running steps. The lock keeps two threads from beginning the same one.
        self._running: set[str] = set()
        self._lock = threading.Lock()
        #: Seconds of `lease.clock`.
        self._settling_since = 0.0

    async def run(self, name: str, func: Callable[[], Any], transaction: Any = None) -> Outcome:
        """Returns the outcome of the step: the value as the serializer restores it, or the error.

        Each call restores the value again, because the caller may have changed the earlier one.

        Args:
            transaction: as for :meth:`Execution.step`.
        """
        call = self.call
        key = str(call.key)
        with self._lock:
            payload = self._payloads.get(name)
            stored = None if payload else steps.read(call.steps_body, key).get(name)
            if payload is None and stored is None:
                self._claim(name)
        if payload is not None:
            return Result(call.codec.values.restore(payload))
        if stored is not None:
            if transaction not in (None, True):
                self._remember(Database(transaction))
            return Result(await call.codec.decode_field(Payload(*stored), key, step_field(name)))
        try:
            return await self._run(name, func, transaction)
        finally:
            self._running.discard(name)

    def _claim(self, name: str) -> None:
        """Marks the step as running; refuses one that may not run."""
        steps.write(name, "", b"")  # refuses an invalid name
        key = self.call.key
        if self.call.settled:
            raise IdempotencyError(f"{key}: step {name!r} begins after the end of its execution")
        if name in self._running:
            raise IdempotencyError(f"{key}: step {name!r} is running; give each step its own name")
        self._running.add(name)

    async def _run(self, name: str, func: Callable[[], Any], transaction: Any) -> Outcome:
        call = self.call
        if transaction not in (None, True):
            return await self._run_in_transaction(name, func, self._database(name, transaction))
        outcome = await call.runtime.run(func)
        if isinstance(outcome, Failure):
            return outcome
        payload, outcome = self._restored(name, outcome.value)
        if transaction is None:
            await self._save(name, await self._protected(name, payload))
        if payload.format:
            self._payloads[name] = payload
        return outcome

    async def _run_in_transaction(
        self, name: str, func: Callable[[], Any], database: Database
    ) -> Outcome:
        """As `run`, with the effects of `func` and its value in one transaction of `database`."""
        call = self.call
        transaction = Transaction(database)
        assert call.execution is not None
        work = partial(call.execution._with_connection, transaction, func)  # noqa: SLF001
        claim = claim_of(call, name)
        try:
            (row,) = await begin_at_rows(transaction, [(call, claim)])
            row = row and row.with_outcome()
            self._remember(database)
            if row is None:
                outcome = await call.runtime.run(work)
                if isinstance(outcome, Failure):
                    transaction.rollback(discard=is_asynchronous(outcome.error))
                    return outcome
                payload, outcome = self._restored(name, outcome.value)
                stored = await self._protected(name, payload)
                ended = OutcomeValues(State.COMPLETED, *stored, call.settings.result_ms)
                row = await commit_with_outbox(call, transaction, {claim: ended})
                if row is None:
                    await self._save(name, stored)
                    return outcome
                row = await publish_found(call, database, row)
        finally:
            transaction.rollback(discard=True)
        stored = Payload(row.format, row.body)
        await self._save(name, stored)
        return Result(await call.codec.decode_field(stored, str(call.key), step_field(name)))

    def _database(self, name: str, source: Any) -> Database:
        database = Database(source)
        own = self.call.settings.transaction
        if own is not None and database.engine == own.engine:
            raise TransactionError(
                f"step {name!r}: the body has a transaction in this database, and would wait for "
                "its own locks; pass transaction=True"
            )
        return database

    def _remember(self, database: Database) -> None:
        self._databases.add(database)
        step_databases.add(database)

    def _restored(self, name: str, value: Any) -> tuple[Payload, Outcome]:
        call = self.call
        key, field = str(call.key), step_field(name)
        return restored(value, call.settings, call.codec.values, key=key, field=field)

    async def settling(self, settlement: Settlement) -> Settlement:
        """Remembers when the outcome is stored."""
        self._settling_since = lease_now()
        return settlement

    async def settled(self, settlement: Settlement, reply: Reply) -> None:
        """Deletes offloaded values of steps; after a Fail, their rows expire with the key."""
        call = self.call
        if isinstance(settlement.disposition, Fail):
            self._limit_rows()
        if isinstance(settlement.disposition, (Complete, Fail)):
            await call.codec.delete_step_objects(call.steps_body, str(call.key))

    def _limit_rows(self) -> None:
        """Makes the rows of all steps expire with the key, or a round trip earlier.

        If they outlived the record, the next execution would find them.
        """
        call = self.call
        prefix, error_ms = call.runtime.store.config.prefix, call.settings.error_ms
        for database in self._databases:
            try:
                now_ms = database.now()
                elapsed_ms = math.ceil((lease_now() - self._settling_since) * 1000)
                database.limit_steps(prefix, call.key, now_ms - elapsed_ms + error_ms)
            except StoreUnavailableError as error:
                call.report(table.STEP_ROWS_LEFT, error=error)

    async def _protected(self, name: str, payload: Payload) -> Payload:
        call = self.call
        about: Any = {"key": str(call.key), "token": call.token, "field": step_field(name)}
        return await call.codec.protect(payload, call.settings, **about)

    async def _save(self, name: str, payload: Payload) -> None:
        call = self.call
        settings = call.settings
        entry = steps.write(name, payload.format, payload.body)
        reply = await call.write(
            commands.save_step(
                call.key,
                call.token,
                entry,
                lease_ms=settings.lease_ms,
                retention_ms=settings.result_ms,
            )
        )
        if reply.case == "lost":
            call.report_lease_lost(reply.raw)
            raise LeaseLostError(f"{call.key}: another execution has taken over")
        with self._lock:
            call.steps_body += entry
