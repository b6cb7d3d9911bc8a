"""Options that exclude each other are refused where the task is defined."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from celery_idempotent import IdempotentTask


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"debounce": 5}, "set idempotency_until = 'started'"),
        ({"debounce": 5, "until": "finished"}, "set idempotency_until = 'started'"),
        (
            {"debounce": 5, "until": "started", "dedupe_publish": "raise"},
            "leave idempotency_dedupe_publish on",
        ),
        ({"debounce_max_wait": 5, "until": "started"}, "set both"),
        ({"debounce": 5, "debounce_max_wait": 4, "until": "started"}, r"\(4 s\) is shorter"),
        ({"on_conflict": "replace"}, "set idempotency_until to 'finished' or 'started'"),
        (
            {"on_conflict": "replace", "until": "finished", "dedupe_publish": True},
            "from being published: remove it",
        ),
        (
            {"on_conflict": "replace", "until": "finished", "transaction": "default"},
            "cannot end a call with idempotency_transaction",
        ),
    ],
)
def test_refused(options: dict[str, Any], error: str) -> None:
    named = {f"idempotency_{name}": value for name, value in options.items()}
    with Celery(set_as_current=False) as app, pytest.raises(ImproperlyConfigured, match=error):

        @app.task(base=IdempotentTask, name="shop.index", lazy=False, shared=False, **named)
        def index(product: int) -> None: ...
