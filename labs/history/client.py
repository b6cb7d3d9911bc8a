"""One process that begins, extends and ends executions at random, and records its calls."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from threading import Barrier
from typing import Any

from celery_idempotent.errors import StoreUnavailableError
from celery_idempotent.key.key import Key
from celery_idempotent.record import layout, steps
from celery_idempotent.record.payload import Payload
from celery_idempotent.store import commands
from celery_idempotent.store.commands import Command, LeaseExtension
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.run_sync import run_sync
from celery_idempotent.store.scripts import Reply
from celery_idempotent.store.transport.server import ServerTransport
from labs.history.operation import NEVER, Operation
from labs.verification.conformance import model_argument

LEASE_MS, HOLD_MS, RETENTION_MS, ERROR_MS, GRACE_MS = 400, 300, 3_000, 2_000, 100
#: Seconds of one command: shorter than some faults.
TIMEOUT = 0.6
#: Keys at the same time, and seconds after which others take their place.
KEYS, EPOCH = 3, 3.0
TASKS = [f"{number}" * 8 + "-1111-4111-8111-111111111111" for number in range(1, 4)]
ROOTS = [bytes([number]) * 8 for number in range(1, 4)]


class Client:
    """The calls of one process.

    Args:
        started_at: of all processes, by the monotonic clock.
    """

    def __init__(self, url: str, options: Mapping[str, Any], seed: int, started_at: float) -> None:
        config = StoreConfig(url=url, prefix="history", timeout=TIMEOUT, **options)
        self.store = RecordStore(config, lambda record: record.body)
        self.random = random.Random(seed)
        self.operations: list[Operation] = []
        self.started_at = started_at
        self.worker = f"history/{os.getpid()}"
        self.sends = 0
        send_once = ServerTransport.send_once

        async def counted(*args: Any, **options: Any) -> Any:
            self.sends += 1
            return await send_once(*args, **options)

        ServerTransport.send_once = counted  # type: ignore[method-assign]

    def run(self, until: float) -> None:
        while time.monotonic() < until:
            self.delivery()
            time.sleep(self.random.expovariate(100))

    def call(self, command: Command) -> Reply | None:
        """Returns the reply; None if there is none."""
        names = command.script.argv[: len(command.arguments)]
        values = map(model_argument, names, command.arguments)
        arguments = dict(zip(names, values, strict=True))
        self.sends, invoked, reply = 0, time.monotonic_ns(), None
        try:
            reply = run_sync(self.store.execute(command))
            returned = time.monotonic_ns()
        except StoreUnavailableError:
            returned = NEVER
        made = Operation(
            str(command.key), command.script.name, arguments, command.root, invoked, returned,
            self.sends, *(reply or ()),
        )  # fmt: skip
        if self.sends:
            self.operations.append(made)
        return reply

    def delivery(self) -> None:
        """Delivers a message once."""
        epoch = int((time.monotonic() - self.started_at) / EPOCH)
        key = Key.of("history.task", b"%d-%d" % (epoch, self.random.randrange(KEYS)))
        key = key.with_fingerprint(self.random.choice([b"8 bytes!", b"8 bytes!", b"", b"others 8"]))
        number = self.random.randrange(len(TASKS))
        task_id, root = TASKS[number], ROOTS[number]
        generation = self.random.choice([0, 0, 0, 1])
        kind = self.random.random()
        if kind < 0.06:
            self.call(commands.reserve(key, task_id, self.random.choice([HOLD_MS, 0])))
            return
        if kind < 0.12:
            self.call(commands.get(key))
            return
        if kind < 0.14:
            self.call(commands.forget(key))
            return
        self.execution(key, task_id, root, generation)

    def execution(self, key: Key, task_id: str, root: bytes, generation: int) -> None:
        execution_id, unanswered, continues = os.urandom(8), b"", self.random.random() < 0.3
        for _ in range(3):
            reply = self.call(commands.begin(
                key, execution_id=execution_id, unanswered_ids=unanswered, task_id=task_id,
                root=root, generation=generation, worker=self.worker, lease_ms=LEASE_MS,
                retention_ms=RETENTION_MS, max_attempts=3, error_ms=ERROR_MS, continues=continues,
            ))  # fmt: skip
            if reply is not None:
                break
            # The message is put back.
            execution_id, unanswered = os.urandom(8), execution_id
        if reply is None:
            return
        sending = LEASE_MS if continues else None
        if reply.case == "begun":
            if not self.body(
                key, layout.begun(reply.raw).token, task_id, root, generation, sending
            ):
                return
        elif reply.case != "finished":
            return
        if continues:
            self.continuation(key, root, execution_id)

    def body(
        self, key: Key, token: int, task_id: str, root: bytes, generation: int, sending: int | None
    ) -> bool:
        """Runs until the outcome; returns whether that is stored."""
        for _ in range(self.random.choice([0, 0, 1, 2])):
            # The last one is too late.
            time.sleep(self.random.choice([0.02, 0.1, 0.3, 0.6]))
            if self.random.random() < 0.3:
                entry = steps.write(self.random.choice(["one", "two"]), "json", b"1")
                durations = {"lease_ms": LEASE_MS, "retention_ms": RETENTION_MS}
                self.call(commands.save_step(key, token, entry, **durations))
            else:
                self.call(commands.extend(LeaseExtension(key, token, LEASE_MS, RETENTION_MS)))
        kind, payload = self.random.random(), Payload("json", b"%d" % self.random.randrange(10**6))
        if kind < 0.15:  # it dies
            if self.random.random() < 0.5:
                self.abandon(key, task_id, root, generation)
            return False
        if kind < 0.35:
            error = self.random.choice([None, payload])
            reply = self.call(commands.release(
                key, token, hold_ms=0 if error else self.random.choice([0, HOLD_MS]), root=root,
                generation=generation if error else generation + 1, retention_ms=RETENTION_MS,
                error=error, error_ms=ERROR_MS, sending_ms=sending if error else None,
            ))  # fmt: skip
            return bool(error and reply and reply.case == "ok")
        if self.random.random() < 0.3:
            reply = self.call(commands.fail(key, token, payload, ERROR_MS, sending_ms=sending))
        else:
            complete = commands.complete(key, token, payload, RETENTION_MS, sending_ms=sending)
            reply = self.call(complete)
        return bool(reply and reply.case == "ok")

    def abandon(self, key: Key, task_id: str, root: bytes, generation: int) -> None:
        grace_ms = self.random.choice([0, GRACE_MS])
        self.call(commands.abandon(
            key, task_id, self.worker, root=root, grace_ms=grace_ms, generation=generation,
            reason="process_lost",
        ))  # fmt: skip

    def continuation(self, key: Key, root: bytes, execution_id: bytes) -> None:
        for _ in range(self.random.choice([0, 0, 1])):
            time.sleep(self.random.choice([0.05, 0.5]))
            extension = LeaseExtension(key, 0, LEASE_MS, RETENTION_MS, root, execution_id)
            self.call(commands.extend(extension))
        end = self.random.choice(
            [commands.mark_continued, commands.mark_continued, commands.stop_sending]
        )
        if self.random.random() < 0.85:
            self.call(end(key, root, execution_id))


def run(
    url: str,
    options: Mapping[str, Any],
    seed: int,
    seconds: float,
    ready: Barrier,
    results: Connection,
) -> None:
    """Runs a client for `seconds` once all are `ready`, and sends its operations."""
    ready.wait(60)
    started_at = time.monotonic()
    client = Client(url, options, seed, started_at)
    client.run(started_at + seconds)
    results.send(client.operations)
    results.close()
