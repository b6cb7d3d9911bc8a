"""A process that publishes by name, with Celery alone: it cannot import the tasks.

It reads a `Call` from its standard input, as pickle, and prints the result as JSON.
"""

from __future__ import annotations

import json
import os
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


def send(call: Call) -> Outcome:
    """Publishes `call` in another process, and waits for its result."""
    result = subprocess.run(
        [sys.executable, "-m", __name__],
        input=pickle.dumps(tuple(call)),
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ,
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()
    return Outcome(*json.loads(result.stdout))


def main() -> None:
    """Publishes the call on the standard input."""
    call = Call(*pickle.loads(sys.stdin.buffer.read()))
    app = Celery("publisher", set_as_current=False)
    app.conf.update(call.settings)
    result = app.send_task(call.name, call.args, call.kwargs, **call.options)
    value = result.get(timeout=SOON, propagate=False)
    assert not [name for name in sys.modules if name.startswith("celery_idempotent")]
    error = type(value).__name__ if isinstance(value, Exception) else None
    print(json.dumps([result.state, value if error is None else str(value), error]))


if __name__ == "__main__":
    main()
