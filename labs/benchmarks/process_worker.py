"""``python -m labs.benchmarks.process_worker``: a worker with one task.

Unlike ``celery worker``, it hides the commands of celery-idempotent, which is installed, from a
worker of plain Celery.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from typing import Any

from celery import Celery, Task

PLAIN, OURS = "celery", "celery-idempotent"
CONTESTANT_VARIABLE, URL_VARIABLE = "BENCH_CONTESTANT", "BENCH_URL"


def make_app(contestant: str, url: str) -> Celery:
    """Returns an app with a task that does nothing."""
    app = Celery("shop", broker=url, backend=url)
    base: type = Task
    if contestant == OURS:
        from celery_idempotent import IdempotentTask

        base = IdempotentTask
    options = {"shared": False, "base": base, "acks_late": True, "reject_on_worker_lost": True}

    @app.task(name="shop.no_op", **options)
    def no_op(order: str) -> None:
        """Does nothing."""

    return app


def main() -> None:
    """Starts the worker; its options are those of ``celery worker``."""
    contestant = os.environ[CONTESTANT_VARIABLE]
    if contestant == PLAIN:
        all_entry_points = importlib.metadata.entry_points

        def entry_points(**parameters: Any) -> Any:
            found = all_entry_points(**parameters)
            return [each for each in found if not each.value.startswith("celery_idempotent")]

        importlib.metadata.entry_points = entry_points
    app = make_app(contestant, os.environ[URL_VARIABLE])
    app.worker_main(["worker", *sys.argv[1:]])


if __name__ == "__main__":
    main()
