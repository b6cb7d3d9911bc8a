"""One key in one Redis: its transitions, and the record after them."""

from __future__ import annotations

import os
from typing import Any, NamedTuple
from uuid import UUID

import redis

from celery_idempotent.key.key import Key, default_root
from celery_idempotent.lease.clock import lease_now
from celery_idempotent.lease.lease import Lease
from celery_idempotent.record import layout, steps
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import Record, State
from celery_idempotent.store import commands
from celery_idempotent.store.commands import BackendResult, Command, LeaseExtension
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.run_sync import run_sync
from celery_idempotent.store.scripts import Reply
from tests.waiting import eventually

KEY = Key("shop.charge", "PN0MlSPt3FmEwTzQ5dHvBQ", b"8 bytes!")
OTHER_ARGUMENTS = Key(KEY.task, KEY.digest, b"others 8")
NO_ARGUMENTS = Key(KEY.task, KEY.digest, b"")

FIRST = "11111111-1111-4111-8111-111111111111"
SECOND = "22222222-2222-4222-8222-222222222222"
THIRD = "33333333-3333-4333-8333-333333333333"
UUID_ID = "7a5b1c9e-4f7d-4a59-9f0e-0c8a4d2f6b11"
#: Execution ids.
OWNER = b"8 bytes."
WORKER = "celery@host/4711"
OTHER_WORKER = "celery@host/4712"

#: All different, so that a test notices if one is used for another.
LEASE_MS = 60_000
HOLD_MS = 90_000
RETENTION_MS = 3_600_000
ERROR_MS = 1_800_000

#: A lease that the heartbeat renews during a test.
RENEWED_MS = 300
#: A lease that expires during a test.
SHORT_MS = 50

RESULT = Payload("json", b'"charged"')
ERROR = Payload("json", b'{"exc_type": "ValueError"}')


def raw_record(
    letter: bytes = b"S",
    *,
    attempt: int = 1,
    token: int = 1_763_726_400_123_457,
    at_ms: int = 1_763_726_460_123,
    fingerprint: bytes = b"8 bytes!",
    task_id: bytes = b"\0" + UUID(UUID_ID).bytes,
    worker: bytes = b"celery@host/4711",
    execution_id: bytes = b"an execution id!",
    form: bytes = b"",
    body: bytes = b"",
) -> bytes:
    """Returns the bytes of a record, built independently of record/layout.py."""
    return b"".join(
        (
            letter,
            attempt.to_bytes(1, "big"),
            token.to_bytes(7, "big"),
            at_ms.to_bytes(6, "big"),
            bytes([len(fingerprint)]) + fingerprint,
            len(task_id).to_bytes(2, "big") + task_id,
            bytes([len(worker)]) + worker,
            bytes([len(execution_id)]) + execution_id,
            bytes([len(form)]) + form,
            body,
        )
    )


class RecordReply(NamedTuple):
    """A script's reply with its record."""

    case: str
    record: Record | None
    now_ms: int

    @property
    def stored(self) -> Record:
        assert self.record is not None
        return self.record

    @property
    def token(self) -> int:
        return self.stored.token


_stores: list[RecordStore] = []


def store_at(url: str = "", **how: Any) -> RecordStore:
    """Return a store that does not decode results; `how` has the fields of a `StoreConfig`."""
    store = RecordStore(StoreConfig(url=url, **how), lambda record: record.body)
    _stores.append(store)
    return store


def close_stores() -> None:
    """Close the connections of all stores of `store_at`."""
    while _stores:
        run_sync(_stores.pop().aclose())


def clear(client: Any) -> None:
    """Empty every node of the deployment and reset its command statistics."""
    client.flushall()
    if isinstance(client, redis.RedisCluster):
        client.config_resetstat(target_nodes=redis.RedisCluster.ALL_NODES)
    else:
        client.config_resetstat()


def calls(client: Any, command: str) -> int:
    """Return how often all nodes together have received `command`."""
    if isinstance(client, redis.RedisCluster):
        found = client.info("commandstats", target_nodes=redis.RedisCluster.ALL_NODES)
    else:
        found = {"the server": client.info("commandstats")}
    counts = (stats.get(f"cmdstat_{command}", {}).get("calls", 0) for stats in found.values())
    return sum(map(int, counts))


class RecordHarness:
    """The record of `key`, through `store` and directly through `client`."""

    def __init__(self, store: RecordStore, client: Any, key: Key = KEY) -> None:
        self.store = store
        self.client = client
        self.key = key
        self.name = store.name(key)

    # Transitions

    def execute(self, command: Command) -> RecordReply:
        return self._answer(run_sync(self.store.execute(command)))

    def begin(
        self,
        *,
        key: Key | None = None,
        execution_id: bytes | None = None,
        task_id: str = FIRST,
        root: bytes = b"",
        worker: str = WORKER,
        lease_ms: int = LEASE_MS,
        max_attempts: int = 5,
        unanswered_ids: bytes = b"",
        **options: Any,
    ) -> RecordReply:
        """`options`: those of `commands.begin` that are rarely used."""
        command = commands.begin(
            key or self.key,
            execution_id=execution_id or os.urandom(8),
            unanswered_ids=unanswered_ids,
            task_id=task_id,
            root=root or default_root(task_id),
            worker=worker,
            lease_ms=lease_ms,
            retention_ms=RETENTION_MS,
            max_attempts=max_attempts,
            error_ms=ERROR_MS,
            **options,
        )
        return self.execute(command)

    def complete(
        self,
        token: int,
        result: Payload = RESULT,
        *,
        backend_result: BackendResult | None = None,
        sending_ms: int | None = None,
    ) -> RecordReply:
        return self.execute(
            commands.complete(
                self.key, token, result, RETENTION_MS, backend_result, sending_ms=sending_ms
            )
        )

    def fail(
        self, token: int, error: Payload = ERROR, *, sending_ms: int | None = None
    ) -> RecordReply:
        return self.execute(commands.fail(self.key, token, error, ERROR_MS, sending_ms=sending_ms))

    def release(
        self,
        token: int,
        hold_ms: int = 0,
        generation: int = 0,
        task_id: str = FIRST,
        root: bytes = b"",
        **error: Any,
    ) -> RecordReply:
        command = commands.release(
            self.key,
            token,
            hold_ms=hold_ms,
            retention_ms=RETENTION_MS,
            root=root or default_root(task_id),
            generation=generation,
            **error,
        )
        return self.execute(command)

    def end_with_error(
        self, token: int, error: Payload = ERROR, *, error_ms: int = ERROR_MS, **options: Any
    ) -> RecordReply:
        """Release the key and store the error for the message."""
        return self.release(token, error=error, error_ms=error_ms, **options)

    def extend(self, token: int, lease_ms: int = LEASE_MS) -> RecordReply:
        return self._extend(LeaseExtension(self.key, token, lease_ms, RETENTION_MS))

    def _extend(self, extension: LeaseExtension) -> RecordReply:
        (reply,) = run_sync(self.store.extend([extension]))
        assert isinstance(reply, Reply)
        return self._answer(reply)

    def save_step(self, token: int, name: str = "reserve", value: bytes = b'"r-1"') -> RecordReply:
        entry = steps.write(name, "json", value)
        return self.execute(
            commands.save_step(self.key, token, entry, lease_ms=LEASE_MS, retention_ms=RETENTION_MS)
        )

    def mark_continued(self, execution_id: bytes = OWNER, task_id: str = FIRST) -> RecordReply:
        return self.execute(commands.mark_continued(self.key, default_root(task_id), execution_id))

    def renew_continuation(
        self, execution_id: bytes = OWNER, lease_ms: int = LEASE_MS, task_id: str = FIRST
    ) -> RecordReply:
        """Extend the lease of a continuation; 0 ends it."""
        root = default_root(task_id)
        return self._extend(LeaseExtension(self.key, 0, lease_ms, RETENTION_MS, root, execution_id))

    def abandon(
        self,
        task_id: str = FIRST,
        worker: str = WORKER,
        grace_ms: int = 0,
        root: bytes = b"",
        **options: Any,
    ) -> RecordReply:
        command = commands.abandon(
            self.key,
            task_id,
            worker,
            root=root or default_root(task_id),
            grace_ms=grace_ms,
            error_ms=ERROR_MS,
            execution_id=OWNER,
            **options,
        )
        return self.execute(command)

    def reserve(
        self,
        task_id: str = FIRST,
        *,
        key: Key | None = None,
        hold_ms: int = HOLD_MS,
        **options: Any,
    ) -> RecordReply:
        return self.execute(commands.reserve(key or self.key, task_id, hold_ms, **options))

    def forget(self, shown: Record | str | None = None) -> RecordReply:
        return self.execute(commands.forget(self.key, shown))

    # States

    def started(self, **begin: Any) -> Record:
        answer = self.begin(**begin)
        assert answer.case == "begun"
        return answer.stored

    def expired(self, **begin: Any) -> Record:
        """Return a STARTED record whose lease has expired by the server's clock."""
        record = self.started(lease_ms=SHORT_MS, **begin)
        eventually(lambda: self.now_ms() >= record.at_ms)
        return record

    def reserved(self, task_id: str = FIRST, hold_ms: int = HOLD_MS) -> Record:
        assert self.reserve(task_id, hold_ms=hold_ms).case == "reserved"
        return self.record()

    def held_for_retry(self, task_id: str = FIRST, hold_ms: int = HOLD_MS) -> Record:
        """Return a record that is RESERVED for a retry."""
        token = self.started(task_id=task_id).token
        assert self.release(token, hold_ms, task_id=task_id).case == "ok"
        return self.record()

    def completed(self, **begin: Any) -> Record:
        assert self.complete(self.started(**begin).token).case == "ok"
        return self.record()

    def failed(self, **begin: Any) -> Record:
        assert self.fail(self.started(**begin).token).case == "ok"
        return self.record()

    def sending(self, **begin: Any) -> Record:
        """Return an outcome whose continuation the execution `OWNER` is sending."""
        begin = {"execution_id": OWNER, "continues": True, **begin}
        assert self.complete(self.started(**begin).token, sending_ms=LEASE_MS).case == "ok"
        return self.record()

    def sending_error(self, **begin: Any) -> Record:
        """Return a stored error whose errbacks the execution `OWNER` is sending."""
        begin = {"execution_id": OWNER, "continues": True, **begin}
        assert self.fail(self.started(**begin).token, sending_ms=LEASE_MS).case == "ok"
        return self.record()

    def poisoned(self) -> Record:
        self.started()
        self.abandon()
        assert self.begin(task_id=SECOND, max_attempts=1).case == "finished"
        return self.record()

    def put(self, raw: bytes) -> None:
        """Write the bytes of a record without a script."""
        self.client.set(self.name, raw, px=RETENTION_MS)

    # The record

    @property
    def raw(self) -> bytes | None:
        raw = self.client.get(self.name)
        assert raw is None or isinstance(raw, bytes)
        return raw

    def record(self) -> Record:
        assert self.raw is not None, "the key is absent"
        return layout.read(self.raw, str(self.key), self.key.task)

    @property
    def state(self) -> State | None:
        return None if self.raw is None else self.record().state

    @property
    def steps(self) -> dict[str, tuple[str, bytes]]:
        return steps.read(self.record().body, str(self.key))

    def entry(self, task_id: str = FIRST, root: bytes = b"") -> Record | None:
        """Return the entry of a message."""
        key = self.key.entry(root or default_root(task_id))
        return run_sync(self.store.get(key))

    def left_ms(self) -> int:
        """Return the remaining time to live of the record."""
        left: int = self.client.pttl(self.name)
        return left

    def now_ms(self) -> int:
        """Return the server's time."""
        seconds, microseconds = self.client.time()
        return seconds * 1000 + microseconds // 1000

    def _answer(self, reply: Reply) -> RecordReply:
        record = layout.read(reply.raw, str(self.key), self.key.task) if reply.raw else None
        return RecordReply(reply.case, record, reply.now_ms)


class Message(RecordHarness):
    """The record of one message, and the transitions with its task id."""

    def __init__(self, turn: RecordHarness, task_id: str, *, waits: bool) -> None:
        super().__init__(turn.store, turn.client, turn.key.of_message(task_id))
        self.task_id = task_id
        self._waits = waits

    def begin(self, **how: Any) -> RecordReply:
        next_turn_ms = HOLD_MS if self._waits else 0
        return super().begin(**{"task_id": self.task_id, "next_turn_ms": next_turn_ms, **how})

    def publish(self, **how: Any) -> RecordReply:
        """Reserve the turn, as publishing with deduplication does."""
        return self.reserve(self.task_id, waits=self._waits, **how)

    def give_back(self) -> None:
        """End the reservation, as for a message that is discarded."""
        assert self.reserve(self.task_id, hold_ms=0).case == "reserved"


class Turn:
    """The record of the turn, and three messages that want it."""

    def __init__(self, turn: RecordHarness, *, waits: bool = False) -> None:
        self.harness = turn
        self.first, self.second, self.third = (
            Message(turn, task_id, waits=waits) for task_id in (FIRST, SECOND, THIRD)
        )

    @property
    def state(self) -> State | None:
        return self.harness.state

    @property
    def holder(self) -> str | None:
        """The task id that has the turn."""
        return None if self.harness.raw is None else self.harness.record().task_id

    @property
    def waits(self) -> bool:
        """Whether a message waits for the next turn."""
        record = self.harness.record()
        return not record.state.finished and b"W" in record.body[6:7]


class Holder:
    """An execution of `key` and its lease."""

    def __init__(self, harness: RecordHarness, key: Key, lease_ms: int = RENEWED_MS) -> None:
        sent_at = lease_now()
        begun = harness.started(key=key, lease_ms=lease_ms)
        self.losses = 0
        self.begun = begun
        self.lease = Lease(
            harness.store,
            LeaseExtension(key, begun.token, lease_ms, RETENTION_MS),
            sent_at,
            self._lost,
        )

    def _lost(self, raw: bytes) -> None:
        self.losses += 1


def keys(number: int) -> list[Key]:
    return [Key("shop.charge", f"{each:022}") for each in range(number)]


def deadline(harness: RecordHarness, key: Key) -> int:
    record = run_sync(harness.store.get(key))
    return record.at_ms


def await_later_deadline(harness: RecordHarness, key: Key, than: int) -> None:
    eventually(lambda: deadline(harness, key) > than)
