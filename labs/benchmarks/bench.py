"""The common setup of most measures: a private server, a store on it, and new keys."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from redis import Redis

from celery_idempotent.core.key.key import Key
from celery_idempotent.core.record.payload import Payload
from celery_idempotent.core.store import commands
from celery_idempotent.core.store.commands import Command
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.run_sync import run_sync
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.core.store.transport.connection import connect
from celery_idempotent.core.store.transport.server import ServerTransport
from tests.servers.redis_server import RedisServer

TASK = "shop.charge"
TASK_ID = "9612edd3-1a0a-4651-aeb1-15d47af714d9"
WORKER = "celery@host/12345"
FINGERPRINT = b"finger42"
LEASE_MS, RETENTION_MS = 60_000, 86_400_000

NO_OP = "return 1"


def private_server(kind: str = "any", **config: str) -> RedisServer:
    """Starts a server."""
    return RedisServer.start(kind, config=config)


class Bench:
    """A store, and a redis-py client with the same connection settings."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.config = StoreConfig(url=server.url)
        self.client: Redis = connect(self.config)
        self.store = RecordStore(self.config, lambda record: record.body)
        self.new_keys = keys()
        self.no_op_sha: str = self.client.script_load(NO_OP)
        self._transport = ServerTransport(self.config)

    def begin(self, key: Key) -> Reply:
        """Sends a begin."""
        return run_sync(self.store.execute(begin_command(key)))

    def run(self, key: Key | None = None, size: int = 100, store: RecordStore | None = None) -> Key:
        """Begins and completes an execution that does nothing; returns its key."""
        key = next(self.new_keys) if key is None else key
        store = store or self.store
        token = store.record(key, run_sync(store.execute(begin_command(key))).raw).token
        run_sync(store.execute(complete_command(key, token, make_result(size))))
        return key

    def begin_token(self, key: Key) -> int:
        """Begins an execution; returns its token."""
        return self.store.record(key, self.begin(key).raw).token

    def no_op(self) -> None:
        """Calls a script that does nothing through redis-py's client."""
        self.client.evalsha(self.no_op_sha, 1, "idem:-")

    def no_op_by_transport(self) -> None:
        """Calls a script that does nothing through the store's transport."""
        run_sync(self._transport.send(("EVALSHA", self.no_op_sha, 1, "idem:-")))

    def close(self) -> None:
        """Closes all connections."""
        run_sync(self.store.aclose())
        run_sync(self._transport.aclose())
        self.client.close()

    def run_no_op_scripts(self) -> None:
        """Sends the arguments of a run to a script that does nothing."""
        key = next(self.new_keys)
        for command in (begin_command(key), complete_command(key, 1)):
            name = self.store.name(key)
            no_op = ("EVALSHA", self.no_op_sha, 1, name, *command.arguments)
            run_sync(self._transport.send(no_op))

    def usec_per_call(self, command: str = "evalsha") -> float:
        """Returns the mean server time of `command` since ``CONFIG RESETSTAT``."""
        stats: dict[str, Any] = self.client.info("commandstats")
        return float(stats[f"cmdstat_{command}"]["usec_per_call"])

    def record_size(self, key: Key) -> int:
        """Returns the bytes of the record, its name included."""
        return memory_usage(self.client, self.store.name(key))


def keys(task: str = TASK) -> Iterator[Key]:
    """Yields keys as a rule derives them, none twice."""
    salt = os.urandom(8)
    number = 0
    while True:
        number += 1
        yield Key.of(task, salt + number.to_bytes(8, "big"), FINGERPRINT)


def begin_command(key: Key) -> Command:
    """Returns the begin of a new execution."""
    return commands.begin(
        key,
        execution_id=os.urandom(8),
        task_id=TASK_ID,
        worker=WORKER,
        lease_ms=LEASE_MS,
        retention_ms=RETENTION_MS,
    )


def complete_command(key: Key, token: int, result: Payload | None = None) -> Command:
    """Returns the complete of an execution."""
    return commands.complete(key, token, result or make_result(100), RETENTION_MS)


def make_result(size: int) -> Payload:
    """Returns a result of `size` bytes as JSON."""
    return Payload("json", b'"' + b"x" * (size - 2) + b'"')


def memory_usage(client: Redis, name: str | bytes) -> int:
    """Returns the bytes of an existing key."""
    usage = client.memory_usage(name)
    assert usage is not None, name
    return int(usage)
