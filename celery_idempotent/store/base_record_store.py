"""What a store is that blocks, and one that is awaited: names, calls, and what answers mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from redis.exceptions import ClusterError, ResponseError

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.key.key import Key
from celery_idempotent.record import layout
from celery_idempotent.record.record import Record
from celery_idempotent.store import replicas
from celery_idempotent.store.breaker import Breaker
from celery_idempotent.store.commands import Command
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.outage import OutageLogger
from celery_idempotent.store.scripts import Reply
from celery_idempotent.store.transport.connection import translate_error
from celery_idempotent.store.transport.sync import ScriptCall

#: Sent even to a Redis that has not answered lately: what they bring must not be lost, and whoever
#: sends them paces himself.
BYPASSES_BREAKER = frozenset({"complete", "fail"})


class BaseRecordStore:
    """All records of one place.

    Args:
        place: which Redis, and how it is spoken to.
        decode: turns a finished record's body into its result.
        probe: asks whether Redis is back.
    """

    def __init__(
        self, config: StoreConfig, decode: Callable[[Record], Any], probe: Callable[[], Any]
    ) -> None:
        self.config = config
        self.breaker = Breaker(config.breaker_threshold, config.breaker_max_delay, probe)
        self.outage = OutageLogger(config)
        self._decode = decode
        self._waits = replicas.wanted(config)

    def name(self, key: Key) -> str:
        """The name of the record in Redis."""
        return f"{self.config.prefix}:{key}"

    def call(self, command: Command) -> ScriptCall:
        """`command` as a line takes it."""
        return ScriptCall(command.script, self.name(command.key), command.arguments)

    def record(self, key: Key, raw: bytes, expires_at: datetime | None = None) -> Record:
        """The record that `raw` holds.

        Raises:
            CorruptRecordError: if it cannot be read.
        """
        return layout.read(raw, str(key), key.task, self._decode, expires_at)

    def looked_up(self, key: Key, answer: Reply) -> Record | None:
        """The record in the answer of the script look_up, with the time at which Redis forgets it.

        Raises:
            CorruptRecordError: if it cannot be read.
        """
        if answer.case == "absent":
            return None
        left, _, raw = answer.raw.partition(b" ")
        end = datetime.fromtimestamp(answer.now_ms / 1000, tz=timezone.utc)
        lasting = int(left) < 0
        return self.record(key, raw, None if lasting else end + timedelta(milliseconds=int(left)))

    def note(self, error: Exception) -> None:
        """Whether Redis is away, or has only said no."""
        if isinstance(error, ResponseError) and not isinstance(error, ClusterError):
            self.breaker.record_success()
        else:
            self.breaker.record_failure()


def replies(many: Sequence[Command], answers: Sequence[Any]) -> list[Reply | IdempotencyError]:
    """What a line answers to `many`, each as a value."""
    return [
        translate_error(answer, str(command.key))
        if isinstance(answer, Exception)
        else command.script.reply(answer)
        for command, answer in zip(many, answers, strict=True)
    ]
