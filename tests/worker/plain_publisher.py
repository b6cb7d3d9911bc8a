"""A process that publishes by name, with Celery alone: it cannot import the tasks.

It reads each `Call` from its standard input, as pickle, and prints the outcome as JSON.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from celery import Celery

from tests.waiting import SOON


class Call(NamedTuple):
    """A call of ``send_task``."""

    settings: dict[str, Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any]


class Outcome(NamedTuple):
    """What the publisher got."""

    #: Of the result: SUCCESS or FAILURE.
    state: str
    #: The result, or the error's message.
    value: Any
    #: Name of the error's type.
    error: str | None = None


class Publisher:
    """The process. It ends with the `with` block, or when its standard input is closed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[2],
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._calls, self._outcomes = self._process.stdin, self._process.stdout

    def send(self, call: Call) -> Outcome:
        """Publishes `call` in the process, and waits for its result."""
        pickle.dump(tuple(call), self._calls)
        self._calls.flush()
        line = self._outcomes.readline()
        assert line, "the process has failed: see its standard error"
        return Outcome(*json.loads(line))

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.close()
        self._process.wait(SOON)
        self._outcomes.close()


def publish(call: Call) -> Outcome:
    """Publishes `call`, and waits for its result."""
    app = Celery("publisher", set_as_current=False)
    app.conf.update(call.settings)
    result = app.send_task(call.name, call.args, call.kwargs, **call.options)
    value = result.get(timeout=SOON, propagate=False)
    assert not [name for name in sys.modules if name.startswith("celery_idempotent")]
    error = type(value).__name__ if isinstance(value, Exception) else None
    state = result.state
    app.close()
    return Outcome(state, value if error is None else str(value), error)


def main() -> None:
    """Publishes the calls on the standard input."""
    while True:
        try:
            call = Call(*pickle.load(sys.stdin.buffer))
        except EOFError:
            return
        print(json.dumps(publish(call)), flush=True)


if __name__ == "__main__":
    main()
