"""An app whose state can be taken from Redis, files and a database, and be put back."""

from __future__ import annotations

from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from celery import Celery
from redis import Redis

from celery_idempotent import Idempotency, IdempotentTask
from celery_idempotent.contrib.sqlalchemy import metadata, outcomes
from tests.apps import close
from tests.servers.redis_server import RedisServer
from tests.store.record_harness import Harness

#: Of leases, reservations and retentions that do not end: fifty years.
LONG_MS = 50 * 365 * 86_400_000

ENCRYPTION_KEY = "JQvRuzFRiXXXMeDWNCeGNyDEhKVXHL5AATyB7wOlrmg="
#: Long enough to be compressed.
VALUE = {"order": "1", "amount": 500, "part": ["booked", "1"], "note": "gift " * 210}

_COMPRESSED = {"idempotency_compression": "gzip"}
_ENCRYPTED = {"idempotency_encryption_keys": (ENCRYPTION_KEY,)}

#: The tasks, and their options beside those of all.
TASKS: dict[str, dict[str, Any]] = {
    "charge": {"idempotency_label": "order {order}"},
    "compressed": _COMPRESSED,
    "encrypted": _ENCRYPTED,
    "offloaded": {"idempotency_max_result_size": 0},
    "everything": {**_COMPRESSED, **_ENCRYPTED, "idempotency_max_result_size": 0},
    "fact": {"idempotency_store_result": False},
    "finished": {"idempotency_until": "finished"},
    "collapsed": {"idempotency_until": "started", "idempotency_dedupe_publish": True},
    "reserved": {"idempotency_dedupe_publish": True},
    "committed": {},
    "committed_again": {"idempotency_until": "finished"},
}
#: Those whose body is a transaction of the shop's database.
_TRANSACTIONS = ("committed", "committed_again")


class Shop:
    """The tasks, on a server, a folder and a database of their own."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.redis: Redis = server.client()
        self.redis.flushall()
        self.folder = folder
        self.engine = sa.create_engine(f"sqlite:///{folder}/shop.db")
        metadata.create_all(self.engine)
        #: The attempt of each execution of a body, and of each step.
        self.runs: list[int] = []
        self.steps: list[int] = []
        self.app = Celery("shop", broker=server.url, backend=server.url, set_as_current=False)
        (folder / "objects").mkdir(exist_ok=True)
        self.app.conf.idempotency_offload_backend = f"file://{folder}/objects"
        self.tasks = {name: self._task(name, options) for name, options in TASKS.items()}
        self.idem = Idempotency(self.app)

    def close(self) -> None:
        """Closes all connections."""
        close(self.app)
        self.engine.dispose()
        self.redis.close()

    def _task(self, name: str, options: dict[str, Any]) -> Any:
        if name in _TRANSACTIONS:
            options = {**options, "idempotency_transaction": self.engine}

        def body(task: Any, order: str, amount: int = 0) -> dict[str, Any]:
            attempt = task.idempotency.attempt

            def book() -> list[str]:
                self.steps.append(attempt)
                return ["booked", order]

            part = task.idempotency.step("book", book)
            self.runs.append(attempt)
            if amount < 0:
                raise ValueError(order, amount)
            return {**VALUE, "order": order, "amount": amount, "part": part}

        options = {**options, "bind": True, "base": IdempotentTask, "shared": False}
        rule = {"idempotency_key": "order:{order}", "idempotency_replay_errors": (ValueError,)}
        return self.app.task(body, name=f"golden.{name}", **rule, **options)

    def call(self, name: str, amount: int = 500, **options: Any) -> Any:
        """Calls a task for order 1 in this process, and returns its result."""
        return self.tasks[name].apply(("1", amount), throw=True, **options).get()

    def record(self, name: str) -> Harness:
        """Returns the record of a call for order 1, with its transitions."""
        task = self.tasks[name]
        store = task.idempotency_configuration.executor.store
        return Harness(store, self.redis, task.idempotency_key_of("1", 500))

    def take(self) -> dict[str, Any]:
        """Returns everything that is stored, and removes it."""
        names = sorted(self.redis.scan_iter("idem*"))
        with self.engine.begin() as connection:
            expires_at = outcomes.c.finished_at + LONG_MS
            connection.execute(outcomes.update().values(expires_at=expires_at))
            rows = [dict(row._mapping) for row in connection.execute(sa.select(outcomes))]
            connection.execute(outcomes.delete())
        files = sorted((self.folder / "objects").iterdir())
        state = {
            "redis": {name.decode(): _to_text(self.redis.get(name)) for name in names},
            "files": {file.name: _to_text(file.read_bytes()) for file in files},
            "rows": [{**row, "body": _to_text(row["body"])} for row in rows],
        }
        self.redis.flushdb()
        for file in files:
            file.unlink()
        self.runs.clear()
        self.steps.clear()
        return state

    def put(self, state: dict[str, Any]) -> None:
        """Stores what :meth:`take` has returned."""
        for name, value in state["redis"].items():
            self.redis.set(name, b64decode(value), px=LONG_MS)
        for name, value in state["files"].items():
            (self.folder / "objects" / name).write_bytes(b64decode(value))
        rows = [{**row, "body": b64decode(row["body"])} for row in state["rows"]]
        if rows:
            with self.engine.begin() as connection:
                connection.execute(outcomes.insert(), rows)


def _to_text(data: Any) -> str:
    return b64encode(data).decode()
