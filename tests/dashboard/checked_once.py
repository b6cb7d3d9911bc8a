"""A shop in a Django project whose system checks cannot run twice in one process."""

from __future__ import annotations

import os
from typing import Any

from django.core.checks import register

SECRET_KEY = "for tests"
os.environ["DJANGO_SETTINGS_MODULE"] = __name__  # before the app, whose loader is Django's then

from tests.monitoring.shop import URL_VARIABLE, make_app  # noqa: E402

runs: list[Any] = []


@register
def once(**options: Any) -> list[Any]:
    runs.append(options)
    assert len(runs) == 1, "The system checks have run twice"
    return []


app = make_app(os.environ[URL_VARIABLE])
