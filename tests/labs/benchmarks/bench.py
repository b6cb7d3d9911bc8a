"""A workbench: a private server, a store on it, and keys that nothing has had before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from redis import Redis

from celery_idempotent.key.key import Key
from celery_idempotent.record.payload import Payload
from celery_idempotent.store import commands
from celery_idempotent.store.commands import Command
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.record_store import RecordStore, transport_for
from celery_idempotent.store.scripts import Reply, Script
from celery_idempotent.store.transport.connection import connect
from celery_idempotent.store.transport.sync import ScriptCall, SyncTransport
from celery_idempotent.testing.server import RedisServer

TASK = "shop.charge"
TASK_ID = "9612edd3-1a0a-4651-aeb1-15d47af714d9"
WORKER = "celery@host/12345"
FINGERPRINT = b"finger42"
LEASE_MS, RETENTION_MS = 60_000, 86_400_000

NO_OP = "return 1"


def own_server(kind: str = "any", **config: str) -> RedisServer:
    """A private server; never the one that REDIS_URL names, since measures empty theirs."""
    return RedisServer.start(kind, config=config)


class Bench:
    """What most measures stand on. The client has the connection settings of the store."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.config = StoreConfig(url=server.url)
        self.client: Redis = connect(self.config)
        self.store = RecordStore(self.config, lambda record: record.body)
        self.fresh = keys()
        #: The no-op, as both clients call it.
        self.no_op_sha: str = self.client.script_load(NO_OP)
        line = transport_for(self.config)
        assert isinstance(line, SyncTransport)
        self._line = line
        self._no_op = ScriptCall(
            Script("no_op", NO_OP, (), frozenset(), self.no_op_sha), "idem:-", ()
        )

    # What contestants do

    def begin(self, key: Key) -> Reply:
        """Ask for the right to run."""
        return self.store.execute(beginning(key))

    def run(self, key: Key | None = None, size: int = 100, store: RecordStore | None = None) -> Key:
        """Begin and complete, as an execution does, with nothing in between; whose key it was."""
        key = next(self.fresh) if key is None else key
        store = store or self.store
        token = store.record(key, store.execute(beginning(key)).raw).token
        store.execute(completing(key, token, result_of(size)))
        return key

    def begun(self, key: Key) -> int:
        """Begin, and give the token."""
        return self.store.record(key, self.begin(key).raw).token

    def no_op(self) -> None:
        """One script that does nothing, through redis-py's client."""
        self.client.evalsha(self.no_op_sha, 1, "idem:-")

    def no_op_on_line(self) -> None:
        """The same through what the store itself speaks with, which is the harder floor."""
        self._line.call(self._no_op)

    def close(self) -> None:
        """Hang up."""
        self.store.close()
        self._line.close()
        self.client.close()

    def run_for_nothing(self) -> None:
        """What a run sends, to a script that does nothing: the rest is the server's work."""
        key = next(self.fresh)
        for command in (beginning(key), completing(key, 1)):
            name = self.store.name(key)
            self._line.call(ScriptCall(self._no_op.script, name, command.arguments))

    # What the server says

    def usec_per_call(self, command: str = "evalsha") -> float:
        """Mean microseconds that the server has spent in `command` since it was last reset."""
        stats: dict[str, Any] = self.client.info("commandstats")
        return float(stats[f"cmdstat_{command}"]["usec_per_call"])

    def bytes_of(self, key: Key) -> int:
        """What the record takes, its name included."""
        return memory(self.client, self.store.name(key))


def keys(task: str = TASK) -> Iterator[Key]:
    """Keys as a rule derives them, each once in this process."""
    salt = os.urandom(8)
    number = 0
    while True:
        number += 1
        yield Key.of(task, salt + number.to_bytes(8, "big"), FINGERPRINT)


def beginning(key: Key) -> Command:
    """What every execution asks first."""
    return commands.begin(
        key,
        execution_id=os.urandom(16),
        unanswered_ids=b"",
        task_id=TASK_ID,
        worker=WORKER,
        lease_ms=LEASE_MS,
        retention_ms=RETENTION_MS,
        max_attempts=5,
        error_ms=RETENTION_MS,
    )


def completing(key: Key, token: int, result: Payload | None = None) -> Command:
    """What every execution says last."""
    return commands.complete(key, token, result or result_of(100), RETENTION_MS)


def result_of(size: int) -> Payload:
    """A result that takes so many bytes as JSON."""
    return Payload("json", b'"' + b"x" * (size - 2) + b'"')


def memory(client: Redis, name: str | bytes) -> int:
    """Bytes of what is under `name`, which must be there."""
    usage = client.memory_usage(name)
    assert usage is not None, name
    return int(usage)
