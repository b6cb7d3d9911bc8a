"""The records in Redis: executes commands and reads records.

All other packages reach Redis through `RecordStore`: the flow and the heartbeat with commands,
operations with reads. It adds to the transports what belongs to records: names, deadlines, circuit
breakers, replicas and errors.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakSet

from redis.exceptions import ClusterError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_idempotent.core.clock import monotonic
from celery_idempotent.core.key import Key
from celery_idempotent.core.record import Record, layout, utc
from celery_idempotent.core.store import commands, run_sync
from celery_idempotent.core.store.clock import Deadline
from celery_idempotent.core.store.commands import (
    DEADLINE,
    RECORD,
    SLOT,
    TURN,
    BackendResult,
    Command,
    LeaseExtension,
)
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.node import PROBE_TIMEOUT, Breaker, Node
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.core.store.transport.connection import (
    CONNECTION_ERRORS,
    connect,
    translate_error,
    translated_errors,
)
from celery_idempotent.core.store.transport.server import ServerTransport
from celery_idempotent.core.store.url import names_cluster
from celery_idempotent.errors import IdempotencyError, StoreUnavailableError

if TYPE_CHECKING:
    from celery_idempotent.core.store.reference import Reference
    from celery_idempotent.core.store.tracking import InvalidationListener
    from celery_idempotent.core.store.transport.client import ClientTransport

#: Replies of a script that has written what must not be lost. With ``idempotency_wait_replicas``, a
#: WAIT follows: Redis replies before it replicates, so if the master fails in between, the begin of
#: a running execution is lost, and the promoted replica grants another. WAIT closes most of that
#: gap, not all: a replica that did not acknowledge the write may be promoted.
_DURABLE_REPLIES = ("begun", "ok")
#: How the names of a script's KEYS are derived from the key.
_NAMES = {RECORD: StoreConfig.name, SLOT: StoreConfig.slot_name, TURN: StoreConfig.turn_name}
#: The reply of a script to a copy of a command that arrives after its deadline.
LATE = "late"
#: Found in the errors of a server that may accept the same command later: as the name of redis-py's
#: exception or, since Redis 6 wraps errors in scripts, as an error code in the text.
_TEMPORARY = re.compile("ReadOnly|READONLY|OutOfMemory|OOM|ClusterDown|MISCONF|NOREPLICAS")
#: Seconds after an error before another reference is written.
RETRY_REFERENCES_AFTER = 30.0

logger = logging.getLogger(__name__)


class Stored(NamedTuple):
    """A record as it is stored."""

    raw: bytes
    expires_at: datetime | None


class RecordStore:
    """All records under one prefix in one Redis.

    Commands are coroutines. With a blocking transport they never suspend, and blocking code runs
    them with ``run_sync(store.execute(command))``. With `is_async` they are awaited; a cancelled
    command may have been executed.

    Args:
        decode: returns the result that a finished record's body encodes.
        view: the same for a person; by default `decode`.
        is_async: for event loops.

    Raises:
        SettingsError: if the config is invalid.
    """

    #: The stores of this process; tests move them to a server of their own.
    instances: ClassVar[WeakSet[RecordStore]] = WeakSet()

    def __init__(
        self,
        config: StoreConfig,
        decode: Callable[[Record], Any],
        view: Callable[[Record], Any] | None = None,
        *,
        is_async: bool = False,
    ) -> None:
        self.config = config
        self.is_async = is_async
        #: The single server; in a cluster, it stands for the node of a record while that is
        #: unknown.
        self.node = Node(config, "", self._probe)
        self._nodes = {"": self.node}
        self.decode, self.view = decode, view or decode
        self._transport: ServerTransport | ClientTransport
        if config.client is None and not names_cluster(config.url):
            self._transport = ServerTransport(config, is_async=is_async)
        else:
            from celery_idempotent.core.store.transport.client import ClientTransport

            self._transport = ClientTransport(config, is_async=is_async)
        #: Created by the first wait for a change.
        self._listener: InvalidationListener | None = None
        #: Has connections of its own, because the heartbeat needs a shorter timeout than others.
        self._heartbeat_transport: ServerTransport | ClientTransport | None = None
        #: Whether the server has refused to write a record and a Celery result in one script.
        self._refuses_second_key = False
        #: When references may be written again after an error (seconds of `clock.monotonic`).
        self._no_references_until = 0.0
        self.instances.add(self)

    def name(self, key: Key) -> str:
        """Returns the name of the record in Redis."""
        return self.config.name(key)

    def node_of(self, key: Key) -> Node:
        """Returns the server that has the record of `key`, as far as it is known."""
        if isinstance(self._transport, ServerTransport):
            return self.node
        name = self._transport.node_of(self.config.name(key))
        node = self._nodes.get(name)
        if node is None:
            node = self._nodes.setdefault(name, Node(self.config, name, self._probe))
        return node

    def _call(self, command: Command, deadline: Deadline | None = None) -> list[Any]:
        """Returns the EVALSHA command for Redis."""
        script, key, kinds, arguments, result_name = command
        names: list[str | bytes] = [_NAMES[kind](self.config, key) for kind in kinds]
        if result_name:
            names.append(result_name)
        call = ["EVALSHA", script.sha, len(names), *names, *arguments]
        if LATE in script.replies:
            call[call.index(DEADLINE)] = deadline
        return call

    async def execute(self, command: Command) -> Reply:
        """Calls the command's script in one round trip and returns its reply.

        Raises:
            StoreUnavailableError: if Redis does not reply in time, or too few replicas have the
                write.
            CorruptRecordError: if the value under the key is not a string.
        """
        if command.result_name and self._refuses_second_key:
            command = commands.without_backend_result(command)
        script, key = command.script, command.key
        breaker = self.node_of(key).breaker
        # An outcome is sent even while the breaker is open: it must not be lost if Redis is back
        # before the next probe. Its sender pauses between attempts, so it floods nothing.
        if breaker.open and not commands.stores_outcome(command):
            await breaker.check()
        wait: tuple[Any, ...] = ()
        if self.config.wait_replicas and commands.is_durable(command):
            wait = "WAIT", self.config.wait_replicas, round(self.config.wait_timeout * 1000)
        clock, until = self._transport.clock, monotonic() + self.config.timeout
        deadline = Deadline(clock, self.config.timeout) if LATE in script.replies else None
        call = self._call(command, deadline)
        while True:
            try:
                replies = await self._transport.send(call, followup=wait, deadline=deadline)
                for raw in replies:
                    if isinstance(raw, Exception):
                        raise raw
            except CONNECTION_ERRORS as error:
                _record(breaker, error)
                if command.result_name and isinstance(error, ResponseError):
                    return await self._complete_alone(command, error)
                raise translate_error(error, str(key)) from error
            if breaker.failures:
                breaker.record_success()
            reply = script.reply(replies[0])
            if reply.now_ms:
                clock.read(reply.now_ms)
            if deadline is None or reply.case != LATE:
                break
            if monotonic() >= until:
                raise _too_late(deadline)
            deadline.seconds = min(2 * deadline.seconds, self.config.timeout)
        if wait and reply.case in _DURABLE_REPLIES and replies[1] < self.config.wait_replicas:
            # The caller treats the command as failed and may send it again: the reply is the same.
            raise StoreUnavailableError(
                f"the write reached the primary, but only {replies[1]} of "
                f"{self.config.wait_replicas} replicas within {self.config.wait_timeout:g} s "
                "(idempotency_wait_replicas)"
            )
        return reply

    async def _complete_alone(self, command: Command, error: ResponseError) -> Reply:
        """Completes a record after the server refused to write the task's result with it.

        A proxy may shard the keys, or an ACL may allow only one of them. Unless the error is
        temporary, the store never tries again.
        """
        reply = await self.execute(commands.without_backend_result(command))
        if not (self._refuses_second_key or _TEMPORARY.search(f"{type(error).__name__} {error}")):
            self._refuses_second_key = True
            logger.warning(
                "Redis refuses fused completion (%s): Celery writes the results from now on; set "
                "idempotency_fused_completion = False", type(error).__name__,
            )  # fmt: skip
        return reply

    async def write_result(
        self, key: Key, result: BackendResult, refer: tuple[Any, ...] = ()
    ) -> bool:
        """Writes the `result` of a replay; returns whether the result backend has it now.

        Raises no Redis error: on False, Celery writes the result through the result backend.

        Args:
            refer: a command of :func:`reference.command`, sent in the same round trip.
        """
        breaker = self.node_of(key).breaker
        if self._refuses_second_key or breaker.open:
            return False
        command = commands.write_result(key, result)
        try:
            reply, *_ = await self._transport.send(self._call(command), followup=refer)
            if isinstance(reply, Exception):
                raise reply
        except CONNECTION_ERRORS as error:
            _record(breaker, error)
            return False
        return command.script.reply(reply).case == "written"

    async def execute_all(self, batch: Sequence[Command]) -> list[Reply | IdempotencyError]:
        """Returns the reply to each command, or the error that the server replied with.

        It takes one round trip; on a cluster, one for each node that has one of the records. If a
        node does not reply, each of its records gets a StoreUnavailableError.

        Raises:
            StoreUnavailableError: if Redis does not reply; on a cluster, if no such node does.
        """
        unavailable: dict[Node, StoreUnavailableError] = {}
        nodes = [self.node_of(command.key) for command in batch]
        for node in dict.fromkeys(nodes):
            try:
                await node.breaker.check()
            except StoreUnavailableError as error:
                unavailable[node] = error
        sent = [c for c, node in zip(batch, nodes, strict=True) if node not in unavailable]
        if unavailable and not sent:
            raise next(iter(unavailable.values()))
        replies = iter(await self._execute_in_time(sent))
        return [unavailable.get(node) or next(replies) for node in nodes]

    async def _execute_in_time(self, batch: Sequence[Command]) -> list[Reply | IdempotencyError]:
        """Sends `batch`, and again those commands that the server has executed too late."""
        until = monotonic() + self.config.timeout
        deadline = Deadline(self._transport.clock, self.config.timeout)
        replies = await self._execute_all(batch, self._transport, deadline)
        while late := [n for n, reply in enumerate(replies) if _is_late(reply)]:
            if monotonic() >= until:
                error = _too_late(deadline)
                return [error if _is_late(reply) else reply for reply in replies]
            deadline.seconds = min(2 * deadline.seconds, self.config.timeout)
            again = await self._execute_all([batch[n] for n in late], self._transport, deadline)
            for number, reply in zip(late, again, strict=True):
                replies[number] = reply
        return replies

    async def extend(
        self, leases: Sequence[LeaseExtension], timeout: float = math.inf
    ) -> list[Reply | IdempotencyError]:
        """Extends all `leases` in one round trip, with a reply for each.

        The commands take at most `timeout` seconds; the next heartbeat sends them again. They
        bypass the breaker, which may still be open when Redis is back: an unextended lease would
        expire. A reply closes the breaker; the lack of one does not open it.

        Raises:
            StoreUnavailableError: if Redis does not reply.
        """
        transport, limit = self._heartbeat_transport, min(timeout, self.config.timeout)
        if transport is None or transport.timeout != limit:
            if transport is not None:
                await transport.aclose()
            transport = self._heartbeat_transport = self._transport.with_timeout(limit)
        return await self._execute_all([commands.extend(lease) for lease in leases], transport)

    async def _execute_all(
        self,
        batch: Sequence[Command],
        transport: ServerTransport | ClientTransport,
        deadline: Deadline | None = None,
    ) -> list[Reply | IdempotencyError]:
        breakers = [self.node_of(command.key).breaker for command in batch]
        calls = [self._call(command, deadline) for command in batch]
        try:
            replies = await transport.send(*calls, deadline=deadline)
        except CONNECTION_ERRORS as error:
            # A heartbeat, which has no deadline, has too short a timeout to blame the server for
            # it.
            for breaker in dict.fromkeys(breakers) if deadline else ():
                _record(breaker, error)
            raise translate_error(error, "") from error
        for breaker, reply in dict(zip(breakers, replies, strict=True)).items():
            if isinstance(reply, Exception):
                _record(breaker, reply)
            elif breaker.failures:
                breaker.record_success()
        results = [
            translate_error(reply, str(command.key))
            if isinstance(reply, Exception)
            else command.script.reply(reply)
            for command, reply in zip(batch, replies, strict=True)
        ]
        for result in results:
            if isinstance(result, Reply) and result.now_ms:
                transport.clock.read(result.now_ms)
                break
        return results

    async def wait_for_change(self, key: Key, seen: bytes, seconds: float) -> None:
        """Returns soon after the record's bytes differ from `seen`, or after `seconds`.

        It may return early without a change: callers read the record and wait again.
        """
        if self._listener is None:
            self._listener = self.listener()
        await self._listener.wait_for_change(self.name(key), seen, seconds)

    async def get(self, key: Key) -> Record | None:
        """Returns the record of a key with its expiry, or None.

        A key that may run again has several records. Returned is that of the running execution,
        else that of the published message that waits, else that of the last execution.

        Raises:
            CorruptRecordError: if the record cannot be read.
            StoreUnavailableError: if Redis does not reply.
        """
        names = [self.config.name(key), *([] if key.message else [self.config.slot_name(key)])]
        stored, *slots = await self._read(key, *names)
        slot = slots[0] if slots else None
        if stored is not None and (holder := layout.turn_holder(stored.raw)) is not None:
            (stored,) = await self._read(key, holder)
            if slot and not (stored and stored.raw[:1] in layout.UNFINISHED):
                stored = None
        if stored is not None:
            return self.record(key, stored.raw, stored.expires_at)
        return slot and layout.read_slot(slot.raw, str(key), key.task, slot.expires_at)

    async def read(self, key: Key) -> Stored | None:
        """Returns the value under the name of a key's record; None if there is none.

        Raises:
            CorruptRecordError: if it is not a string.
            StoreUnavailableError: if Redis does not reply.
        """
        (stored,) = await self._read(key, self.config.name(key))
        return stored

    async def _read(self, key: Key, *names: str) -> list[Stored | None]:
        """Returns the value of each name."""
        commands = [(command, name) for name in names for command in ("GET", "PTTL")]
        breaker = self.node_of(key).breaker
        await breaker.check()
        try:
            replies = await self._transport.send(*commands)
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
        except CONNECTION_ERRORS as error:
            _record(breaker, error)
            raise translate_error(error, str(key)) from error
        if breaker.failures:
            breaker.record_success()
        return [
            None
            if raw is None
            else Stored(raw, utc((self.now_ms() + ttl_ms) / 1000) if ttl_ms >= 0 else None)
            for raw, ttl_ms in zip(replies[::2], replies[1::2], strict=True)
        ]

    def now_ms(self) -> int:
        """Returns the server's time in milliseconds; before its first reply, this machine's."""
        return self._transport.clock.now_ms() or round(time.time() * 1000)

    async def slot(self, key: Key) -> Record | None:
        """Returns the message that was published for `key` and has not begun, or None.

        Raises:
            CorruptRecordError: if its reservation cannot be read.
            StoreUnavailableError: if Redis does not reply.
        """
        (slot,) = await self._read(key, self.config.slot_name(key))
        return slot and layout.read_slot(slot.raw, str(key), key.task, slot.expires_at)

    def record(self, key: Key, raw: bytes, expires_at: datetime | None = None) -> Record:
        """Returns the record that `raw` encodes.

        Raises:
            CorruptRecordError: if it cannot be read.
        """
        return layout.read(raw, str(key), key.task, self.decode, expires_at)

    def refer(self, command: tuple[Any, ...]) -> None:
        """Writes a reference by a command of :func:`reference.command`; for blocking code.

        It waits for a reply only on a cluster or with the user's client, and raises no Redis
        error. After an error, it writes no references for a while.
        """
        if monotonic() < self._no_references_until:
            return
        try:
            if isinstance(self._transport, ServerTransport):
                run_sync(self._transport.send_unread(command))
            else:
                self.client.execute_command(*command)
        except CONNECTION_ERRORS as error:
            logger.debug("Task ids of duplicates are not recorded: %s", error)
            self._no_references_until = monotonic() + RETRY_REFERENCES_AFTER

    def reference(self, task_id: str) -> Reference | None:
        """Returns the reference of the duplicate with this task id; None if unknown.

        Raises:
            StoreUnavailableError: if Redis does not reply.
        """
        from celery_idempotent.core.store import reference

        raw = self.query("GET", reference.name(self.config.prefix, task_id))
        return reference.read(raw) if raw else None

    @cached_property
    def client(self) -> Any:
        """A blocking redis-py client, for requests that are not about one record."""
        return connect(self.config)

    def query(self, *command: Any) -> Any:
        """Returns the reply to a command that is not a script; for blocking code.

        Raises:
            IdempotencyError: as :func:`translate_error`, if there is no reply, or an error reply.
        """
        with translated_errors(str(command[1])):
            return self.client.execute_command(*command)

    def listener(self) -> InvalidationListener:
        """Returns another listener, with connections of its own."""
        from celery_idempotent.core.store.tracking import InvalidationListener

        return InvalidationListener(self._transport)

    async def ping(self) -> None:
        """Checks that Redis replies.

        Raises:
            StoreUnavailableError: if it does not.
        """
        with translated_errors():
            await self._transport.ping()

    async def _probe(self, node: str) -> None:
        with translated_errors():  # creating a client can fail too: redis-py opens a file
            transport = self._transport.with_timeout(PROBE_TIMEOUT, retry=False)
            try:
                await transport.ping(node)
            finally:
                await transport.aclose()

    async def aclose(self) -> None:
        """Closes the connections (of the running event loop); the next command reconnects."""
        if self._listener is not None:
            await self._listener.aclose()
        if self._heartbeat_transport is not None:
            await self._heartbeat_transport.aclose()
        await self._transport.aclose()


def _record(breaker: Breaker, error: Exception) -> None:
    """Counts a missing reply as a failure; an error reply shows that the server is reachable."""
    if isinstance(error, ResponseError) and not isinstance(error, ClusterError):
        breaker.record_success()
    else:
        # The transport has sent a command that times out twice.
        breaker.record_failure(2 if isinstance(error, RedisTimeoutError) else 1)


def _is_late(reply: Reply | IdempotencyError) -> bool:
    return isinstance(reply, Reply) and reply.case == LATE


def _too_late(deadline: Deadline) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"Redis executes commands more than {deadline.seconds:g} s after they are sent"
    )
