"""The messages of our system checks, in a process with Django.

python -m tests.sql.django_checks DATABASE_URL REDIS_URL SETTINGS: with each of a JSON list
"""

from __future__ import annotations

import json
import sys
from typing import Any

from celery import Celery

from celery_idempotent import Idempotency, IdempotentTask
from tests.sql.databases import dump, set_up_django

#: Of the middleware.
idem = Idempotency("redis://localhost", name="checks")


def ship(order: str) -> str:
    return order


def messages(settings: dict[str, Any]) -> list[list[str]]:
    """Returns id, text and hint of each of our messages of ``manage.py check``."""
    from django.core import checks
    from django.db import connections
    from django.test.utils import override_settings

    plain = settings.pop("PLAIN", {})
    database = {"ATOMIC_REQUESTS": False, "AUTOCOMMIT": True, **settings.pop("DATABASE", {})}
    connections.settings["default"].update(database)
    with override_settings(**{"CELERY_IDEMPOTENCY_TRANSACTION": "default", **settings}):
        app = Celery("shop", broker=sys.argv[2], backend=sys.argv[2])  # the current one from now on
        app.config_from_object("django.conf:settings", namespace="CELERY")
        app.task(name="shop.ship", base=IdempotentTask)(ship)
        app.task(name="shop.bill", shared=False, **plain)(ship)
        found = checks.run_checks(databases=["default"])
    ours = [message for message in found if str(message.id).startswith("celery_idempotent.")]
    return [[message.id.rpartition(".")[2], message.msg, message.hint] for message in ours]


if __name__ == "__main__":
    set_up_django(sys.argv[1])
    dump([messages(settings) for settings in json.loads(sys.argv[3])])
