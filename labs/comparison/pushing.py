"""Publishes relier's tasks: by its own method, in a process of its own environment.

That is ``apush`` in one event loop. ``push``, for callers without a loop, connects anew each time.

``python -m labs.comparison.pushing`` is that process. It reads a call from each line, and
answers with the id of the published task, or with an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

from celery import Celery, Task
from celery.result import AsyncResult


class PushingApp(Celery):
    """An app whose tasks are published by another process.

    Args:
        python: the interpreter of that process.
    """

    #: Of that process.
    environment: dict[str, str]

    def __init__(self, name: str, python: str) -> None:
        super().__init__(name, set_as_current=False)
        self._command = [python, "-m", __name__]
        self._process: subprocess.Popen[str] | None = None

    def push(self, task: str, args: Any, kwargs: Any) -> str:
        """Publishes a task; returns its id.

        Raises:
            RuntimeError: with the error of the other process.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **self.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([task, args, kwargs]), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return str(answer["id"])

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None
        super().close()


class PushedTask(Task):
    """A task of `PushingApp`."""

    abstract = True

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> AsyncResult:
        assert not options, "apush takes none"
        return self.AsyncResult(self.app.push(self.name, args or (), kwargs or {}))


def main() -> None:
    """Answers until its input ends."""
    from labs.comparison.app import app

    # What the library prints does not belong to the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    loop = asyncio.new_event_loop()
    for line in sys.stdin:
        task, args, kwargs = json.loads(line)
        try:
            receipt = loop.run_until_complete(app.tasks[task].apush(*args, **kwargs))
            answer = {"id": receipt.id}
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
