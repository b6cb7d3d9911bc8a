"""``manage.py check`` of a site with each of the settings in a JSON list; prints the messages.

python -m tests.sql.check_calls DATABASE_URL REDIS_URL SETTINGS
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.sql.admin_site import make_app, set_up
from tests.sql.processes import dump

set_up(sys.argv[1], sys.argv[2])

from django.core import checks  # noqa: E402 - Django has to be set up
from django.db import connections  # noqa: E402
from django.test.utils import override_settings  # noqa: E402


def messages(settings: dict[str, Any]) -> list[list[str]]:
    """Returns id, text and hint of each message of ours."""
    database = {"ATOMIC_REQUESTS": False, "AUTOCOMMIT": True, **settings.pop("DATABASE", {})}
    connections.settings["default"].update(database)
    with override_settings(**settings):
        make_app()  # the current one from now on
        found = checks.run_checks(databases=["default"])
    ours = [message for message in found if str(message.id).startswith("celery_idempotent.")]
    return [[message.id.rpartition(".")[2], message.msg, message.hint] for message in ours]


dump([messages(settings) for settings in json.loads(sys.argv[3])])
