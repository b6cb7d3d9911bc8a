"""Steps: parts of an execution whose values are stored, so that they run once for a key."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from celery_idempotent.errors import LeaseLostError, StoreUnavailableError, TransactionError
from celery_idempotent.events import table
from celery_idempotent.executor.outbox import begin_at_rows, commit_with_outbox, publish_found
from celery_idempotent.executor.outcome import Failure, Outcome, Result, is_asynchronous
from celery_idempotent.executor.returned import restored
from celery_idempotent.payload.fields import step_field
from celery_idempotent.record import steps
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import State
from celery_idempotent.sql.database import Database, step_databases
from celery_idempotent.sql.outcomes import Ended
from celery_idempotent.sql.transaction import Transaction, only
from celery_idempotent.store import commands

if TYPE_CHECKING:
    from celery_idempotent.executor.active_execution import ActiveExecution


class Steps:
    """The finished steps of `active`, and of the executions before it."""

    def __init__(self, active: ActiveExecution, body: bytes) -> None:
        self._active = active
        self._body = body
        #: Those that have the rows of steps.
        self._databases: set[Database] = set()
        #: The values of the steps that this execution has run.
        self._payloads: dict[str, Payload] = {}

    async def run(self, name: str, func: Callable[[], Any], transaction: Any = None) -> Outcome:
        """The outcome of the step: the value of `func` as the serializer restores it, or its error.

        Each call restores the value anew: the caller may have changed the one that it got.

        Args:
            transaction: as for :meth:`Execution.step`.
        """
        active = self._active
        key = active.execution.key
        if name in self._payloads:
            return Result(active.codec.values.restore(self._payloads[name]))
        stored = steps.read(self._body, key).get(name)
        if stored is not None:
            if transaction not in (None, True):
                self._remember(Database(transaction))
            return Result(await active.codec.decode_step(Payload(*stored), key, name))
        steps.write(name, "", b"")  # refuses an invalid name before `func` runs
        if transaction not in (None, True):
            return await self._run_in_transaction(name, func, self._database(name, transaction))
        outcome = await active.runtime.run(func)
        if isinstance(outcome, Failure):
            return outcome
        payload, outcome = self._restored(name, outcome.value)
        if transaction is None:
            await self._save(name, await self._protected(name, payload))
        if payload.has_value:
            self._payloads[name] = payload
        return outcome

    async def _run_in_transaction(
        self, name: str, func: Callable[[], Any], database: Database
    ) -> Outcome:
        """As `run`; the effects of `func` and its value are one transaction of `database`."""
        active = self._active
        transaction = Transaction(database)
        work = partial(active.execution._with_connection, transaction, func)  # noqa: SLF001
        try:
            row = only(await begin_at_rows([active], transaction, [active.claim(name)]))
            self._remember(database)
            if row is None:
                outcome = await active.runtime.run(work)
                if isinstance(outcome, Failure):
                    transaction.rollback(discard=is_asynchronous(outcome.error))
                    return outcome
                payload, outcome = self._restored(name, outcome.value)
                stored = await self._protected(name, payload)
                retention_ms = active.call.settings.result_ms
                ended = Ended(State.COMPLETED, *stored, retention_ms)
                row = await commit_with_outbox(active, transaction, ended)
                if row is None:
                    await self._save(name, stored)
                    return outcome
                row = await publish_found(active, database, row)
        finally:
            transaction.rollback(discard=True)
        stored = Payload(row.format, row.body)
        await self._save(name, stored)
        return Result(await active.codec.decode_step(stored, active.execution.key, name))

    def _database(self, name: str, source: Any) -> Database:
        database = Database(source)
        own = self._active.call.settings.transaction
        if self._active.transaction is not None and database.engine == own.engine:
            raise TransactionError(
                f"step {name!r}: the body has a transaction in this database, and would wait for "
                "its own locks; pass transaction=True"
            )
        return database

    def _remember(self, database: Database) -> None:
        self._databases.add(database)
        step_databases.add(database)

    def _restored(self, name: str, value: Any) -> tuple[Payload, Outcome]:
        active = self._active
        return restored(
            value,
            active.call.settings,
            active.codec.values,
            key=active.execution.key,
            field=step_field(name),
        )

    @property
    def finished(self) -> bytes:
        """The finished steps, as the body of a record."""
        return self._body

    def limit_rows(self, retention_ms: int) -> None:
        """Lets the rows of all steps expire with the key, whose outcome is stored."""
        active = self._active
        prefix = active.runtime.store.config.prefix
        for database in self._databases:
            try:
                database.limit_steps(prefix, active.call.key, max(0, retention_ms))
            except StoreUnavailableError as error:
                active.report(table.STEP_ROWS_LEFT, error=error)

    async def discard(self) -> None:
        """Deletes offloaded values of steps, which the outcome has replaced."""
        active = self._active
        await active.codec.delete_step_objects(self._body, active.execution.key)

    async def _protected(self, name: str, payload: Payload) -> Payload:
        active = self._active
        return await active.codec.protect(
            payload,
            active.call.settings,
            key=active.execution.key,
            token=active.execution.token,
            field=step_field(name),
        )

    async def _save(self, name: str, payload: Payload) -> None:
        active = self._active
        settings = active.call.settings
        entry = steps.write(name, payload.format, payload.body)
        reply = await active.persist(
            commands.save_step(
                active.call.key,
                active.execution.token,
                entry,
                lease_ms=settings.lease_ms,
                retention_ms=settings.result_ms,
            )
        )
        if reply.case == "lost":
            active.report_lease_lost(reply.raw)
            raise LeaseLostError(f"{active.execution.key}: another execution has taken over")
        self._body += entry
