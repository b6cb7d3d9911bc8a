"""The records in Redis: each transition as a method, one round trip each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

from redis import Redis
from redis.exceptions import NoScriptError, RedisError

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.key.key import Key
from celery_idempotent.record import layout
from celery_idempotent.record.record import Record
from celery_idempotent.store import scripts
from celery_idempotent.store.connection import COMMAND_TIMEOUT, connect, explained, redacted
from celery_idempotent.store.line import Line
from celery_idempotent.store.payload import Payload
from celery_idempotent.store.scripts import Reply

#: What a client raises when Redis, or the way to it, is in trouble.
FAULTS = (RedisError, OSError)


class Extension(NamedTuple):
    """One lease that a heartbeat extends."""

    key: Key
    token: int
    lease_ms: int
    retention_ms: int


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

    def begin(
        self,
        key: Key,
        *,
        owner: bytes,
        prior: bytes,
        task_id: str,
        worker: str,
        lease_ms: int,
        retention_ms: int,
        max_attempts: int,
        error_ms: int,
    ) -> Reply:
        """Ask for the right to run; see lua/begin.lua for the cases."""
        return self._call(
            "begin",
            key,
            owner=owner,
            prior=prior,
            task_id=layout.write_task_id(task_id),
            fingerprint=key.fingerprint,
            worker=_worker(worker),
            lease_ms=lease_ms,
            retention_ms=retention_ms,
            max_attempts=max_attempts,
            error_ms=error_ms,
        )

    def complete(self, key: Key, token: int, result: Payload, retention_ms: int) -> Reply:
        """Store the result: ``ok`` or ``lost``."""
        return self._call(
            "complete",
            key,
            token=token,
            format=result.format,
            body=result.body,
            retention_ms=retention_ms,
        )

    def fail(self, key: Key, token: int, error: Payload, retention_ms: int) -> Reply:
        """Store an error that ends the key: ``ok`` or ``lost``."""
        return self._call(
            "fail",
            key,
            token=token,
            format=error.format,
            body=error.body,
            retention_ms=retention_ms,
        )

    def release(self, key: Key, token: int, *, hold_ms: int, retention_ms: int) -> Reply:
        """Give the key back, or hold it for its task id: ``ok`` or ``lost``."""
        return self._call("release", key, token=token, hold_ms=hold_ms, retention_ms=retention_ms)

    def step(
        self, key: Key, token: int, entry: bytes, *, lease_ms: int, retention_ms: int
    ) -> Reply:
        """Keep a finished step: ``ok`` or ``lost``."""
        return self._call(
            "step", key, token=token, entry=entry, lease_ms=lease_ms, retention_ms=retention_ms
        )

    def dispatched(self, key: Key, task_id: str) -> Reply:
        """Note that the continuation of `task_id` has gone out: ``ok`` or ``lost``."""
        return self._call("dispatched", key, task_id=layout.write_task_id(task_id))

    def abandon(self, key: Key, task_id: str, worker: str, *, grace_ms: int) -> Reply:
        """End the lease of a worker process that died, or will: ``ok`` or ``lost``."""
        return self._call(
            "abandon",
            key,
            task_id=layout.write_task_id(task_id),
            worker=_worker(worker),
            grace_ms=grace_ms,
        )

    def reserve(self, key: Key, task_id: str, hold_ms: int) -> Reply:
        """Keep the key for a task to be published; see lua/reserve.lua for the cases."""
        return self._call(
            "reserve",
            key,
            task_id=layout.write_task_id(task_id),
            fingerprint=key.fingerprint,
            hold_ms=hold_ms,
        )

    def forget(self, key: Key, token: int | None = None) -> Reply:
        """Drop the record, or only `token`'s: ``ok``, ``absent`` or ``changed``."""
        return self._call("forget", key, token="" if token is None else token)

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
        script = scripts.load("extend")
        try:
            answers = self._send_extensions(client, script, leases)
            if any(isinstance(answer, NoScriptError) for answer in answers):
                client.script_load(script.source)
                answers = self._send_extensions(client, script, leases)
        except FAULTS as error:
            raise explained(error, "") from error
        return [
            explained(answer, str(lease.key))
            if isinstance(answer, Exception)
            else script.reply(answer)
            for lease, answer in zip(leases, answers, strict=True)
        ]

    def _send_extensions(
        self, client: Redis, script: scripts.Script, leases: Sequence[Extension]
    ) -> list[Any]:
        pipeline = client.pipeline(transaction=False)
        for lease in leases:
            values = {
                "token": lease.token,
                "lease_ms": lease.lease_ms,
                "retention_ms": lease.retention_ms,
            }
            arguments = script.arguments(values)
            pipeline.evalsha(script.sha, 1, self.name(lease.key), *arguments)
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

    def _call(self, name: str, key: Key, **values: Any) -> Reply:
        try:
            return scripts.load(name).call(self._line, self.name(key), **values)
        except FAULTS as error:
            raise explained(error, str(key)) from error


def _worker(name: str) -> bytes:
    """`name` cut to what the record has room for, its end kept: that is where the pid stands."""
    return name.encode()[-255:].decode(errors="ignore").encode()
