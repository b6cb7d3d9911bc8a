"""One key in one Redis: its transitions, and the record after them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from uuid import UUID

import redis

from celery_idempotent.core.clock import lease_now
from celery_idempotent.core.key import Key
from celery_idempotent.core.lease import Lease
from celery_idempotent.core.lease.heartbeat import Heartbeat, ThreadRenewer
from celery_idempotent.core.record import Payload, Record, State, layout, steps
from celery_idempotent.core.store import commands, run_sync
from celery_idempotent.core.store.commands import Command, LeaseExtension
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.scripts import Reply
from tests.waiting import eventually

KEY = Key("shop.charge", "PN0MlSPt3FmEwTzQ5dHvBQ", b"8 bytes!")

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
    letter: bytes = b"A",
    *,
    attempt: int = 1,
    token: int = 1_763_726_400_123_457,
    at_ms: int = 1_763_726_460_123,
    fingerprint: bytes = b"8 bytes!",
    task_id: bytes = b"\0" + UUID(UUID_ID).bytes,
    worker: bytes = b"celery@host/4711",
    owner: bytes = b"8 bytes.",
    tail: bytes = b"",
    body: bytes = b"",
) -> bytes:
    """Returns the bytes of a record, built independently of record/layout.py."""
    head = letter + attempt.to_bytes(1, "big") + token.to_bytes(7, "big") + at_ms.to_bytes(6, "big")
    call = bytes([len(fingerprint)]) + fingerprint + len(task_id).to_bytes(2, "big") + task_id
    rest = b"".join(bytes([len(each)]) + each for each in (worker, owner, tail))
    return head + call + rest + body


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
_hearts: list[Heartbeat] = []


def store_at(url: str = "", **how: Any) -> RecordStore:
    """Return a store that does not decode results; `how` has the fields of a `StoreConfig`."""
    store = RecordStore(StoreConfig(url=url, **how), lambda record: record.body)
    _stores.append(store)
    return store


def close_stores() -> None:
    """Ends the renewals, and closes the connections of all stores of `store_at`."""
    while _hearts:
        heart = _hearts.pop()
        for lease in heart.leases():
            heart.renewer(lease.store).stop_renewal(lease)
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


def begin(key: Key = KEY, **options: Any) -> Command:
    """Returns the command with these options, see `commands.begin`."""
    whose: dict[str, Any] = {"execution_id": os.urandom(8), "task_id": FIRST, "worker": WORKER}
    times = {"lease_ms": LEASE_MS, "retention_ms": RETENTION_MS}
    return commands.begin(key, **(whose | times | options))


class Harness:
    """The record of `key`, through `store` and directly through `client`."""

    def __init__(self, store: RecordStore, client: Any, key: Key = KEY) -> None:
        self.store = store
        self.client = client
        self.key = key
        self.name = store.name(key)

    @cached_property
    def heart(self) -> Heartbeat:
        """Renews leases until the end of the test."""
        _hearts.append(Heartbeat())
        return _hearts[-1]

    # Transitions

    def execute(self, command: Command) -> RecordReply:
        return self._answer(run_sync(self.store.execute(command)))

    def begin(self, *, key: Key | None = None, **options: Any) -> RecordReply:
        return self.execute(begin(key or self.key, **options))

    def complete(self, token: int, result: Payload = RESULT, **options: Any) -> RecordReply:
        return self.execute(commands.complete(self.key, token, result, RETENTION_MS, **options))

    def fail(self, token: int, error: Payload = ERROR, **options: Any) -> RecordReply:
        return self.execute(commands.fail(self.key, token, error, ERROR_MS, **options))

    def delegate(self, token: int, generation: int, form: str = "=task") -> RecordReply:
        other = Payload(form, layout.write_task_id(SECOND))
        return self.execute(commands.delegate(self.key, token, other, generation, RETENTION_MS))

    def release(self, token: int, hold_ms: int = 0, generation: int = 0) -> RecordReply:
        if not hold_ms:
            return self.execute(commands.release(self.key, token, retention_ms=RETENTION_MS))
        retention_ms = hold_ms + (RETENTION_MS if self.raw and self.record().body else 0)
        times = {"hold_ms": hold_ms, "retention_ms": retention_ms}
        reserve = commands.reserve_retry(self.key, token, **times, generation=generation)
        return self.execute(reserve)

    def extend(self, token: int, lease_ms: int = LEASE_MS) -> RecordReply:
        return self._extend(LeaseExtension(self.key, token, lease_ms, RETENTION_MS))

    def _extend(self, extension: LeaseExtension) -> RecordReply:
        (reply,) = run_sync(self.store.extend([extension]))
        assert isinstance(reply, Reply)
        return self._answer(reply)

    def save_step(self, token: int, name: str = "reserve", value: bytes = b'"r-1"') -> RecordReply:
        lease = LeaseExtension(self.key, token, LEASE_MS, RETENTION_MS)
        return self.execute(commands.extend(lease, steps.write(name, "json", value)))

    def mark_sent(self, token: int) -> RecordReply:
        return self.execute(commands.mark_sent(self.key, token))

    def abandon(self, task_id: str = FIRST, worker: str = WORKER, **how: Any) -> RecordReply:
        how = {"grace_ms": 0, "reason": "process_lost", **how}
        return self.execute(commands.abandon(self.key, task_id, worker, **how))

    def reserve(self, task_id: str = FIRST, hold_ms: int = HOLD_MS, **options: Any) -> RecordReply:
        return self.execute(commands.reserve(self.key, task_id, hold_ms, **options))

    def give_back(self, task_id: str = FIRST) -> RecordReply:
        return self.execute(commands.give_back(self.key, task_id))

    def forget(self, shown: Record | str | None = None, *, force: bool = True) -> RecordReply:
        return self.execute(commands.forget(self.key, shown, force=force))

    # States

    def started(self, **begin: Any) -> Record:
        answer = self.begin(**begin)
        assert answer.case == "begun"
        return answer.stored

    def lease_of(self, key: Key, **begin: Any) -> LeaseExtension:
        """Begins an execution of another key; returns what extends its lease."""
        token = self.started(key=key, **begin).token
        return LeaseExtension(key, token, LEASE_MS, RETENTION_MS)

    def dead(self, **begin: Any) -> Record:
        """Return the record of an execution whose process has died."""
        self.started(**begin)
        assert self.abandon(begin.get("task_id", FIRST)).case == "ok"
        return self.record()

    def silent(self, *, confirmed: bool = True, **begin: Any) -> Record:
        """Return a record whose lease has ended, and the time after it, too."""
        begin = {"lease_ms": SHORT_MS, **begin}
        record = self.started(**begin)
        if confirmed:
            assert self.extend(record.token, SHORT_MS).case == "ok"
        eventually(lambda: self.now_ms() > self.record().at_ms)
        assert self.begin(task_id=THIRD, lease_ms=SHORT_MS).case == "held", "only marks it"
        eventually(lambda: self.now_ms() > self.record().at_ms)
        return record

    def reserved(self, task_id: str = FIRST, hold_ms: int = HOLD_MS) -> Record:
        assert self.reserve(task_id, hold_ms=hold_ms).case == "reserved"
        return self.slot()

    def held_for_retry(self, task_id: str = FIRST, hold_ms: int = HOLD_MS) -> Record:
        """Return a record that is RESERVED for a retry."""
        token = self.started(task_id=task_id).token
        assert self.release(token, hold_ms).case == "ok"
        return self.record()

    def completed(self, **begin: Any) -> Record:
        assert self.complete(self.started(**begin).token).case == "ok"
        return self.record()

    def failed(self, **begin: Any) -> Record:
        assert self.fail(self.started(**begin).token).case == "ok"
        return self.record()

    def sending(self, **begin: Any) -> Record:
        """Return an outcome whose continuation is being sent."""
        assert self.complete(self.started(**begin).token, sending_ms=LEASE_MS).case == "ok"
        return self.record()

    def poisoned(self) -> Record:
        self.dead()
        token = self.started(task_id=SECOND).token
        poison = commands.poison(self.key, token, ERROR_MS)
        assert self.execute(poison).case == "ok"
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

    def slot(self) -> Record:
        """Return the message that waits."""
        slot = run_sync(self.store.slot(self.key))
        assert slot is not None
        return slot

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


#: Calls that change the record of a running execution, which has this token.
CALLS: dict[str, Callable[[Harness, int], RecordReply]] = {
    "begin": lambda harness, token: harness.begin(task_id=SECOND),
    "extend": Harness.extend,
    "save_step": Harness.save_step,
    "complete": Harness.complete,
    "fail": Harness.fail,
    "release": Harness.release,
    "hold": lambda harness, token: harness.release(token, HOLD_MS),
    "abandon": lambda harness, token: harness.abandon(),
    "reserve": lambda harness, token: harness.reserve(),
    "forget": lambda harness, token: harness.forget(),
}


class Message(Harness):
    """The record of one message, and the transitions with its task id."""

    def __init__(self, turn: Harness, task_id: str, *, waits: bool) -> None:
        super().__init__(turn.store, turn.client, turn.key.of_message(task_id))
        self.task_id = task_id
        self._waits = waits

    def begin(self, **how: Any) -> RecordReply:
        return super().begin(**{"task_id": self.task_id, "hold_ms": HOLD_MS, **how})

    def abandon(self, **how: Any) -> RecordReply:  # type: ignore[override]
        return super().abandon(self.task_id, **how)

    def dead(self, **begin: Any) -> Record:
        self.started(**begin)
        assert self.abandon().case == "ok"
        return self.record()

    def publish(self, **how: Any) -> RecordReply:
        """Reserve the key, as publishing with deduplication does."""
        return self.reserve(self.task_id, after_running=self._waits, **how)


class Turn:
    """A key that may run again, and three messages that want it."""

    def __init__(self, turn: Harness, *, waits: bool = False) -> None:
        self.harness = turn
        messages = (Message(turn, each, waits=waits) for each in (FIRST, SECOND, THIRD))
        self.first, self.second, self.third = messages

    @property
    def shown(self) -> Record | None:
        """The record of the key, as operators see it."""
        return run_sync(self.harness.store.get(self.harness.key))


class Holder:
    """An execution of `key` and its lease."""

    def __init__(self, harness: Harness, key: Key, lease_ms: int = RENEWED_MS) -> None:
        self.harness = harness
        sent_at = lease_now()
        begun = harness.started(key=key, lease_ms=lease_ms)
        self.losses = 0
        self.begun = begun
        extension = LeaseExtension(key, begun.token, lease_ms, RETENTION_MS)
        self.lease = Lease(harness.store, extension, sent_at, self._lost)

    def _lost(self, raw: bytes) -> None:
        self.losses += 1

    def renewed(self, heart: Heartbeat | None = None) -> Holder:
        """Starts the renewal; returns itself."""
        self.start_renewal(heart)
        return self

    def start_renewal(self, heart: Heartbeat | None = None) -> None:
        self._renewer(heart).start_renewal(self.lease)

    def stop_renewal(self, heart: Heartbeat | None = None) -> None:
        self._renewer(heart).stop_renewal(self.lease)

    def _renewer(self, heart: Heartbeat | None) -> ThreadRenewer:
        return (heart or self.harness.heart).renewer(self.lease.store)


@contextmanager
def narrow_user(harness: Harness, url: str, **rights: Any) -> Iterator[str]:
    """Yields the URL of a user with these rights only."""
    rights = {"passwords": ["+secret"], "commands": ["+@all"], **rights}
    harness.client.acl_setuser("narrow", enabled=True, **rights)
    parts = urlsplit(url)
    try:
        yield parts._replace(netloc=f"narrow:secret@{parts.hostname}:{parts.port}").geturl()
    finally:
        close_stores()
        harness.client.acl_deluser("narrow")


def keys(number: int) -> list[Key]:
    return [Key("shop.charge", f"{each:022}") for each in range(number)]


def deadline(harness: Harness, key: Key) -> int:
    record = run_sync(harness.store.get(key))
    return record.at_ms


def await_later_deadline(harness: Harness, key: Key, than: int) -> None:
    eventually(lambda: deadline(harness, key) > than)
