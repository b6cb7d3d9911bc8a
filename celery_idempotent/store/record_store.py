"""The records in Redis: executes commands, and reads records back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

from celery_idempotent.errors import IdempotencyError, SettingsError
from celery_idempotent.key.key import Key
from celery_idempotent.record.record import Record
from celery_idempotent.store import commands, replicas, scripts
from celery_idempotent.store.base_record_store import BYPASSES_BREAKER, BaseRecordStore, replies
from celery_idempotent.store.breaker import PROBE_TIMEOUT
from celery_idempotent.store.commands import Command, Extension
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.record_reader import RecordReader
from celery_idempotent.store.scripts import Reply
from celery_idempotent.store.tracking import InvalidationListener
from celery_idempotent.store.transport.client import ClientTransport
from celery_idempotent.store.transport.connection import CONNECTION_ERRORS, connect, translate_error
from celery_idempotent.store.transport.sync import ScriptCall, SyncTransport
from celery_idempotent.store.url import names_cluster


class RecordStore(BaseRecordStore):
    """All records of one place.

    Args:
        place: which Redis, and how it is spoken to.
        decode: turns a finished record's body into its result.

    Raises:
        SettingsError: if the place is none that this library can use.
    """

    def __init__(self, config: StoreConfig, decode: Callable[[Record], Any]) -> None:
        super().__init__(config, decode, self._probe)
        self._transport = transport_for(config)
        self._listener = InvalidationListener(self._transport.pool_for)
        # A line of its own: the heartbeat must not queue behind the callers.
        self._heartbeat_line: SyncTransport | ClientTransport | None = None
        self._patience = 0.0

    @cached_property
    def client(self) -> Any:
        """A redis-py client, for what is asked of the server rather than of one record."""
        return connect(self.config)

    def execute(self, command: Command) -> Reply:
        """The script's answer; one round trip.

        Raises:
            StoreUnavailableError: if Redis cannot be asked, or fewer replicas than wanted answer.
            CorruptRecordError: if there is no string under the key.
        """
        script = command.script
        if script.name not in BYPASSES_BREAKER:
            self.breaker.enter()
        wait = replicas.wait(self.config, script.name) if self._waits else ()
        try:
            answers = self._transport.call(self.call(command), followup=wait)
        except CONNECTION_ERRORS as error:
            self.note(error)
            raise translate_error(error, str(command.key)) from error
        self.breaker.record_success()
        reply = script.reply(answers[0])
        if wait:
            replicas.check(self.config, reply, answers[1])
        return reply

    def extend(
        self, leases: Sequence[Extension], timeout: float | None = None
    ) -> list[Reply | IdempotencyError]:
        """Extend all `leases` in one round trip, on the heartbeat's own connection.

        Each answer stands for itself: one record in trouble must not end the others' leases. It is
        waited for twice `patience` seconds; the next beat asks again.

        Raises:
            StoreUnavailableError: if Redis did not answer at all.
        """
        transport = self._heartbeat_transport(self.config.timeout if timeout is None else timeout)
        return self._execute_all([commands.extend(lease) for lease in leases], transport)

    def execute_all(self, many: Sequence[Command]) -> list[Reply | IdempotencyError]:
        """The answer to each of `many`, or the error that is its answer.

        One round trip for all; on a cluster one for each node that has one of the records.

        Raises:
            StoreUnavailableError: if Redis cannot be asked.
        """
        self.breaker.enter()
        return self._execute_all(many, self._transport)

    def _execute_all(
        self, many: Sequence[Command], transport: SyncTransport | ClientTransport
    ) -> list[Reply | IdempotencyError]:
        try:
            answers = transport.call_all([self.call(command) for command in many])
        except CONNECTION_ERRORS as error:
            self.note(error)
            raise translate_error(error, "") from error
        self.breaker.record_success()
        return replies(many, answers)

    def _heartbeat_transport(self, timeout: float) -> SyncTransport | ClientTransport:
        if self._heartbeat_line is None or timeout < self._patience:
            self._patience = min(timeout, self.config.timeout)
            self._heartbeat_line = transport_for(self.config, timeout=2 * self._patience)
        return self._heartbeat_line

    def wait_for_change(self, key: Key, seen: bytes, seconds: float) -> None:
        """Return soon after the record is no longer what was `seen`, or after `seconds`.

        Or sooner, where the server does not tell: so look, and wait again.
        """
        self._listener.wait_for_change(self.name(key), seen, seconds)

    def get(self, key: Key) -> Record | None:
        """The record of `key`, with the time at which Redis forgets it.

        Raises:
            CorruptRecordError: if what is there cannot be read.
            StoreUnavailableError: if Redis cannot be asked.
        """
        return self.looked_up(key, self.execute(commands.get(key)))

    def open_reader(self, timeout: float = 5.0) -> RecordReader:
        """A look over all records, by a client of its own that waits `patience` seconds.

        Raises:
            StoreUnavailableError: if a cluster cannot be asked who its nodes are.
        """
        try:
            client = connect(self.config, timeout=timeout, retries=0)
        except CONNECTION_ERRORS as error:
            raise translate_error(error, "") from error
        return RecordReader(client, self.config, self._decode, self._fetch)

    def _fetch(self, key: Key) -> bytes:
        """The record's bytes; none where it is gone."""
        return self.execute(commands.get(key)).raw.partition(b" ")[2]

    def ping(self) -> None:
        """Ask whether Redis answers, and can do what is asked of it.

        Raises:
            StoreUnavailableError: if it does not answer.
            SettingsError: if it cannot.
        """
        try:
            self._transport.ping()
            if self.config.wait_aof:
                nothing = ScriptCall(scripts.load("get"), f"{self.config.prefix}:", ())
                self._transport.call(nothing, followup=replicas.wait_for_nothing())
        except CONNECTION_ERRORS as error:
            if why := replicas.unable(error):
                raise SettingsError(why) from None
            raise translate_error(error, "") from error

    def _probe(self) -> None:
        try:
            with closing(transport_for(self.config, timeout=PROBE_TIMEOUT, retries=0)) as transport:
                transport.ping()
        except CONNECTION_ERRORS as error:
            raise translate_error(error, "") from error

    def close(self) -> None:
        """Hang up; the next command connects again."""
        for transport in (self._transport, self._heartbeat_line):
            if transport is not None:
                transport.close()
        self._listener.close()


def transport_for(
    config: StoreConfig, *, timeout: float | None = None, retries: int = 1
) -> SyncTransport | ClientTransport:
    """The leanest way there is to `place`."""
    if config.client is not None or names_cluster(config.url):
        return ClientTransport(
            lambda: connect(config, timeout=timeout, retries=retries),
            borrowed=config.borrows_client,
        )
    whole = config.timeout if timeout is None else timeout
    # Half for each try: the line tries again by itself.
    client = connect(config, timeout=whole / (retries + 1), retries=0)
    return SyncTransport(client, whole)
