"""The records in Redis, for event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from celery_idempotent.errors import IdempotencyError, SettingsError, StoreUnavailableError
from celery_idempotent.key.key import Key
from celery_idempotent.record.record import Record
from celery_idempotent.store import commands, replicas
from celery_idempotent.store.async_tracking import AsyncInvalidationListener
from celery_idempotent.store.base_record_store import BYPASSES_BREAKER, BaseRecordStore, replies
from celery_idempotent.store.breaker import PROBE_TIMEOUT
from celery_idempotent.store.commands import Command, Extension
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.scripts import Reply
from celery_idempotent.store.transport.asyncio import ASYNCIO, AsyncioTransport
from celery_idempotent.store.transport.connection import CONNECTION_ERRORS, connect, translate_error
from celery_idempotent.store.url import names_cluster


class AsyncRecordStore(BaseRecordStore):
    """As `RecordStore`, and awaited. A command that is cancelled may have been executed.

    Raises:
        SettingsError: if the place is none that this library can use from an event loop.
    """

    def __init__(self, config: StoreConfig, decode: Callable[[Record], Any]) -> None:
        super().__init__(config, decode, self._probe)
        if self._waits and names_cluster(config.url):
            raise SettingsError(
                "idempotency_wait_replicas and idempotency_wait_aof are not for async callers of a "
                "cluster: redis.asyncio cannot say on which connection it sends"
            )
        if config.client is None:
            connect(config, classes=ASYNCIO)  # says what is wrong with it, and stays closed
        self._transport = AsyncioTransport(
            lambda: connect(config, classes=ASYNCIO), borrowed=config.borrows_client
        )
        self._listener = AsyncInvalidationListener(self._transport.pool_for)

    async def execute(self, command: Command) -> Reply:
        """The script's answer; one round trip.

        Raises:
            StoreUnavailableError: if Redis cannot be asked, or fewer replicas than wanted answer.
            CorruptRecordError: if there is no string under the key.
        """
        script = command.script
        if script.name not in BYPASSES_BREAKER:
            await self._enter()
        wait = replicas.wait(self.config, script.name) if self._waits else ()
        try:
            answers = await self._transport.call(self.call(command), followup=wait)
        except CONNECTION_ERRORS as error:
            self.note(error)
            raise translate_error(error, str(command.key)) from error
        self.breaker.record_success()
        reply = script.reply(answers[0])
        if wait:
            replicas.check(self.config, reply, answers[1])
        return reply

    async def execute_all(self, many: Sequence[Command]) -> list[Reply | IdempotencyError]:
        """The answer to each of `many`, or the error that is its answer.

        One round trip for all; on a cluster one for each node that has one of the records.

        Raises:
            StoreUnavailableError: if Redis cannot be asked.
        """
        await self._enter()
        return await self._execute_all(many, self.config.timeout)

    async def extend(
        self, leases: Sequence[Extension], timeout: float
    ) -> list[Reply | IdempotencyError]:
        """Extend all `leases` in one round trip; it may take twice `patience` seconds.

        Each answer stands for itself: one record in trouble must not end the others' leases.

        Raises:
            StoreUnavailableError: if Redis did not answer at all.
        """
        return await self._execute_all([commands.extend(lease) for lease in leases], 2 * timeout)

    async def _execute_all(
        self, many: Sequence[Command], seconds: float
    ) -> list[Reply | IdempotencyError]:
        try:
            calls = [self.call(command) for command in many]
            answers = await asyncio.wait_for(self._transport.call_all(calls), seconds)
        except (*CONNECTION_ERRORS, asyncio.TimeoutError) as error:
            self.note(error)
            raise translate_error(error, "") from error
        self.breaker.record_success()
        return replies(many, answers)

    async def wait_for_change(self, key: Key, seen: bytes, seconds: float) -> None:
        """As `RecordStore.until_changed`."""
        await self._listener.wait_for_change(self.name(key), seen, seconds)

    async def get(self, key: Key) -> Record | None:
        """The record of `key`, with the time at which Redis forgets it.

        Raises:
            CorruptRecordError: if what is there cannot be read.
            StoreUnavailableError: if Redis cannot be asked.
        """
        return self.looked_up(key, await self.execute(commands.get(key)))

    async def ping(self) -> None:
        """Ask whether Redis answers.

        Raises:
            StoreUnavailableError: if not.
        """
        try:
            await self._transport.ping()
        except CONNECTION_ERRORS as error:
            raise translate_error(error, "") from error

    async def _enter(self) -> None:
        if self.breaker.should_probe():
            try:
                await self._probe()
            except StoreUnavailableError:
                self.breaker.record_failure()
                raise
            self.breaker.record_success()

    async def _probe(self) -> None:
        try:
            await asyncio.wait_for(self._transport.ping(), PROBE_TIMEOUT)
        except (*CONNECTION_ERRORS, asyncio.TimeoutError) as error:
            raise translate_error(error, "") from error

    async def aclose(self) -> None:
        """Hang up in the running event loop; the next command connects again."""
        await self._listener.aclose()
        await self._transport.aclose()
