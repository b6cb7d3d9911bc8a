"""A pool that runs bodies without a request, as those do that replace Celery's tracer."""

from __future__ import annotations

import os
from time import monotonic
from typing import Any

from celery import current_app
from celery.concurrency.base import BasePool
from kombu.serialization import loads


class Pool(BasePool):
    """Runs a message as a function call, and reports that it has succeeded."""

    body_can_be_buffer = True

    def on_apply(
        self, target: Any, args: Any, kwargs: Any, callback: Any, accept_callback: Any, **_: Any
    ) -> None:
        name, _id, _request, body, *content = args
        accept_callback(os.getpid(), monotonic())
        arguments, keywords, _embed = loads(body, *content)
        value = current_app.tasks[name](*arguments, **keywords)
        callback((0, repr(value), 0.0))
