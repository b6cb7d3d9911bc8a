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
from celery_idempotent.store.base_record_store import NEVER_REFUSED, Shelf, replies
from celery_idempotent.store.breaker import PROBE_TIMEOUT
from celery_idempotent.store.commands import Command, Extension
from celery_idempotent.store.config import Place
from celery_idempotent.store.record_reader import Watch
from celery_idempotent.store.scripts import Reply
from celery_idempotent.store.tracking import Ears
from celery_idempotent.store.transport.client import ClientLine
from celery_idempotent.store.transport.connection import FAULTS, connect, explained
from celery_idempotent.store.transport.sync import Call, Line
from celery_idempotent.store.url import names_cluster


class RecordStore(Shelf):
    """All records of one place.

    Args:
        place: which Redis, and how it is spoken to.
        decode: turns a finished record's body into its result.

    Raises:
        SettingsError: if the place is none that this library can use.
    """

    def __init__(self, place: Place, decode: Callable[[Record], Any]) -> None:
        super().__init__(place, decode, self._probe)
        self._line = line_to(place)
        self._ears = Ears(self._line.server_of)
        # A line of its own: the heartbeat must not queue behind the callers.
        self._heartbeat_line: Line | ClientLine | None = None
        self._patience = 0.0

    @cached_property
    def client(self) -> Any:
        """A redis-py client, for what is asked of the server rather than of one record."""
        return connect(self.place)

    def execute(self, command: Command) -> Reply:
        """The script's answer; one round trip.

        Raises:
            StoreUnavailableError: if Redis cannot be asked, or fewer replicas than wanted answer.
            CorruptRecordError: if there is no string under the key.
        """
        script = command.script
        if script.name not in NEVER_REFUSED:
            self.breaker.enter()
        wait = replicas.wait(self.place, script.name) if self._waits else ()
        try:
            answers = self._line.call(self.call(command), then=wait)
        except FAULTS as error:
            self.note(error)
            raise explained(error, str(command.key)) from error
        self.breaker.answered()
        reply = script.reply(answers[0])
        if wait:
            replicas.check(self.place, reply, answers[1])
        return reply

    def extend(
        self, leases: Sequence[Extension], patience: float | None = None
    ) -> list[Reply | IdempotencyError]:
        """Extend all `leases` in one round trip, on the heartbeat's own connection.

        Each answer stands for itself: one record in trouble must not end the others' leases. It is
        waited for twice `patience` seconds; the next beat asks again.

        Raises:
            StoreUnavailableError: if Redis did not answer at all.
        """
        line = self._line_of_heartbeat(self.place.timeout if patience is None else patience)
        return self._execute_all([commands.extend(lease) for lease in leases], line)

    def execute_all(self, many: Sequence[Command]) -> list[Reply | IdempotencyError]:
        """The answer to each of `many`, or the error that is its answer.

        One round trip for all; on a cluster one for each node that has one of the records.

        Raises:
            StoreUnavailableError: if Redis cannot be asked.
        """
        self.breaker.enter()
        return self._execute_all(many, self._line)

    def _execute_all(
        self, many: Sequence[Command], line: Line | ClientLine
    ) -> list[Reply | IdempotencyError]:
        try:
            answers = line.call_all([self.call(command) for command in many])
        except FAULTS as error:
            self.note(error)
            raise explained(error, "") from error
        self.breaker.answered()
        return replies(many, answers)

    def _line_of_heartbeat(self, patience: float) -> Line | ClientLine:
        if self._heartbeat_line is None or patience < self._patience:
            self._patience = min(patience, self.place.timeout)
            self._heartbeat_line = line_to(self.place, timeout=2 * self._patience)
        return self._heartbeat_line

    def until_changed(self, key: Key, seen: bytes, seconds: float) -> None:
        """Return soon after the record is no longer what was `seen`, or after `seconds`.

        Or sooner, where the server does not tell: so look, and wait again.
        """
        self._ears.until_changed(self.name(key), seen, seconds)

    def look_up(self, key: Key) -> Record | None:
        """The record of `key`, with the time at which Redis forgets it.

        Raises:
            CorruptRecordError: if what is there cannot be read.
            StoreUnavailableError: if Redis cannot be asked.
        """
        return self.looked_up(key, self.execute(commands.look_up(key)))

    def watch(self, patience: float = 5.0) -> Watch:
        """A look over all records, by a client of its own that waits `patience` seconds.

        Raises:
            StoreUnavailableError: if a cluster cannot be asked who its nodes are.
        """
        try:
            client = connect(self.place, timeout=patience, resends=0)
        except FAULTS as error:
            raise explained(error, "") from error
        return Watch(client, self.place, self._decode, self._fetch)

    def _fetch(self, key: Key) -> bytes:
        """The record's bytes; none where it is gone."""
        return self.execute(commands.look_up(key)).raw.partition(b" ")[2]

    def ping(self) -> None:
        """Ask whether Redis answers, and can do what is asked of it.

        Raises:
            StoreUnavailableError: if it does not answer.
            SettingsError: if it cannot.
        """
        try:
            self._line.ping()
            if self.place.wait_aof:
                nothing = Call(scripts.load("get"), f"{self.place.prefix}:", ())
                self._line.call(nothing, then=replicas.wait_for_nothing())
        except FAULTS as error:
            if why := replicas.unable(error):
                raise SettingsError(why) from None
            raise explained(error, "") from error

    def _probe(self) -> None:
        try:
            with closing(line_to(self.place, timeout=PROBE_TIMEOUT, resends=0)) as line:
                line.ping()
        except FAULTS as error:
            raise explained(error, "") from error

    def close(self) -> None:
        """Hang up; the next command connects again."""
        for line in (self._line, self._heartbeat_line):
            if line is not None:
                line.close()
        self._ears.close()


def line_to(place: Place, *, timeout: float | None = None, resends: int = 1) -> Line | ClientLine:
    """The leanest way there is to `place`."""
    if place.client is not None or names_cluster(place.url):
        return ClientLine(
            lambda: connect(place, timeout=timeout, resends=resends), borrowed=place.borrows_client
        )
    whole = place.timeout if timeout is None else timeout
    # Half for each try: the line tries again by itself.
    client = connect(place, timeout=whole / (resends + 1), resends=0)
    return Line(client, whole)
