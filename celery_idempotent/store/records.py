"""The records in Redis: executes commands, and reads records back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

from redis import Redis
from redis.exceptions import NoScriptError, RedisError

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.key.key import Key
from celery_idempotent.record import layout
from celery_idempotent.record.record import Record
from celery_idempotent.store import commands, scripts
from celery_idempotent.store.commands import Command, Extension
from celery_idempotent.store.connection import COMMAND_TIMEOUT, connect, explained, redacted
from celery_idempotent.store.line import Line
from celery_idempotent.store.scripts import Reply

#: What a client raises when Redis, or the way to it, is in trouble.
FAULTS = (RedisError, OSError)


class RecordStore:
    """All records under one prefix of one Redis.

    Args:
        url: of the Redis, as Celery and kombu write it.
        prefix: of every name in Redis.
        decode: turns a finished record's body into its result.
    """

    def __init__(self, url: str, prefix: str, decode: Callable[[Record], Any]) -> None:
        self._url = url
        self._prefix = prefix
        self._decode = decode
        self._client = connect(url)
        self._line = Line(self._client)
        # A client of its own: the heartbeat must not queue behind the callers.
        self._heartbeat_client: Redis | None = None
        self._patience = 0.0

    @property
    def place(self) -> str:
        """Where the records are, without secrets."""
        return redacted(self._url)

    def name(self, key: Key) -> str:
        """The name of the record in Redis."""
        return f"{self._prefix}:{key}"

    def execute(self, command: Command) -> Reply:
        """The script's answer; one round trip.

        Raises:
            StoreUnavailableError: if Redis cannot be asked.
            CorruptRecordError: if there is no string under the key.
        """
        try:
            return command.script.call(self._line, self.name(command.key), command.arguments)
        except FAULTS as error:
            raise explained(error, str(command.key)) from error

    def extend(
        self, leases: Sequence[Extension], patience: float = COMMAND_TIMEOUT
    ) -> list[Reply | IdempotencyError]:
        """Extend all `leases` in one round trip, on the heartbeat's own client.

        Each answer stands for itself: one record in trouble must not end the others' leases. It is
        waited for twice `patience` seconds; the next beat asks again.

        Raises:
            StoreUnavailableError: if Redis did not answer at all.
        """
        if self._heartbeat_client is None or patience < self._patience:
            self._patience = min(patience, COMMAND_TIMEOUT)
            self._heartbeat_client = connect(self._url, timeout=self._patience, resends=1)
        client = self._heartbeat_client
        extensions = [commands.extend(lease) for lease in leases]
        try:
            answers = self._send(client, extensions)
            if any(isinstance(answer, NoScriptError) for answer in answers):
                client.script_load(scripts.load("extend").source)
                answers = self._send(client, extensions)
        except FAULTS as error:
            raise explained(error, "") from error
        return [
            explained(answer, str(command.key))
            if isinstance(answer, Exception)
            else command.script.reply(answer)
            for command, answer in zip(extensions, answers, strict=True)
        ]

    def _send(self, client: Redis, extensions: Sequence[Command]) -> list[Any]:
        pipeline = client.pipeline(transaction=False)
        for script, key, arguments in extensions:
            pipeline.evalsha(script.sha, 1, self.name(key), *arguments)
        answers: list[Any] = pipeline.execute(raise_on_error=False)
        return answers

    def look_up(self, key: Key) -> Record | None:
        """The record of `key`, with the time at which Redis forgets it.

        Raises:
            CorruptRecordError: if what is there cannot be read.
        """
        name = self.name(key)
        pipeline = self._client.pipeline(transaction=True)
        pipeline.get(name)
        pipeline.pttl(name)
        pipeline.time()
        try:
            raw, left_ms, clock = pipeline.execute()
        except FAULTS as error:
            raise explained(error, str(key)) from error
        if raw is None:
            return None
        seconds, microseconds = clock
        end = seconds + microseconds / 1e6 + left_ms / 1e3
        expires_at = datetime.fromtimestamp(end, tz=timezone.utc) if left_ms >= 0 else None
        return self.record(key, raw, expires_at)

    def record(self, key: Key, raw: bytes, expires_at: datetime | None = None) -> Record:
        """The record that `raw` holds."""
        return layout.read(raw, str(key), key.task, self._decode, expires_at)

    def ping(self) -> None:
        """Ask whether Redis answers.

        Raises:
            StoreUnavailableError: if not.
        """
        try:
            self._client.ping()
        except FAULTS as error:
            raise explained(error, "") from error
