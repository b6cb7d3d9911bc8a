"""The least that a base class can do with two scripts, for the measure of what it costs.

Before the body a script reads the time and stores that the key has started, after it another one
stores the outcome and the task's result, as fused completion does. There is nothing else: no lease
and heartbeat, no retries, no comparison of arguments, no signals, no errors, no log line, and
nothing is replayed: it protects nothing.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from celery import Task
from celery.states import SUCCESS

BEGIN = """
redis.call('GET', KEYS[1])
local clock = redis.call('TIME')
redis.call('SET', KEYS[1], clock[1] .. clock[2] .. ARGV[1], 'PX', ARGV[2])
"""
COMPLETE = """
local clock = redis.call('TIME')
redis.call('GET', KEYS[1])
redis.call('SET', KEYS[1], clock[1] .. clock[2] .. ARGV[1], 'PX', ARGV[2])
redis.call('GET', KEYS[2])
redis.call('SET', KEYS[2], ARGV[3], 'EX', ARGV[4])
redis.call('PUBLISH', KEYS[2], ARGV[3])
"""
LEASE_MS, RETENTION_SECONDS = 60_000, 86_400


class TwoScriptsTask(Task):
    """Runs a task between the two scripts, both sent by redis-py's client."""

    abstract = True
    _scripts: tuple[Any, Any] | None = None
    _is_written = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = self.request
        backend = Task.backend.fget(self)
        if self._scripts is None:
            self._scripts = tuple(map(backend.client.register_script, (BEGIN, COMPLETE)))
        begin, complete = self._scripts
        digest = sha256(json.dumps([self.name, args, kwargs]).encode()).hexdigest()
        key = f"once:{digest}"
        begin([key], [f"S{request.id}{request.hostname}", LEASE_MS])
        value = self.run(*args, **kwargs)
        result = {
            "status": SUCCESS,
            "result": value,
            "traceback": None,
            "children": [],
            "date_done": self.app.now().isoformat(),
            "task_id": request.id,
        }
        complete(
            [key, backend.get_key_for_task(request.id)],
            [
                f"C{request.id}{json.dumps(value)}",
                *(RETENTION_SECONDS * 1000, json.dumps(result), RETENTION_SECONDS),
            ],
        )
        self._is_written = True
        return value

    @property
    def backend(self) -> Any:
        """The result backend; the first time after each run, one that writes nothing."""
        backend = Task.backend.fget(self)
        if self._is_written:
            self._is_written = False
            return _Written(backend)
        return backend


class _Written:
    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def mark_as_done(self, *_: Any, **__: Any) -> None:
        """Does nothing: the result is written."""
