"""A program that publishes by name, with Celery alone: it cannot import the tasks.

It reads the settings, the name, arguments and options of ``send_task`` from its standard input, as
pickle, and prints the state of the result, its value or the error's message, and the error's type.
"""

from __future__ import annotations

import json
import pickle
import sys

from celery import Celery

from tests.waiting import SOON

if __name__ == "__main__":
    settings, name, args, options = pickle.load(sys.stdin.buffer)
    app = Celery("publisher", set_as_current=False)
    app.conf.update(settings)
    result = app.send_task(name, args, **options)
    value = result.get(timeout=SOON, propagate=False)
    assert not [name for name in sys.modules if name.startswith("celery_idempotent")]
    error = type(value).__name__ if isinstance(value, Exception) else None
    print(json.dumps([result.state, value if error is None else str(value), error]))
