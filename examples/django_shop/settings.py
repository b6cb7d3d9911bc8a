"""Django's settings; those of Celery and celery-idempotent begin with CELERY_."""

from __future__ import annotations

import os
from typing import Any

SECRET_KEY = "for an example"
INSTALLED_APPS = ["celery_idempotent.contrib.django", "examples.django_shop"]
_POSTGRESQL = {
    "ENGINE": "django.db.backends.postgresql",
    "NAME": os.environ.get("PGDATABASE", "shop"),
}
_SQLITE = {
    "ENGINE": "django.db.backends.sqlite3",
    "NAME": os.environ.get("SHOP_DATABASE", "shop.sqlite3"),
    "OPTIONS": {"timeout": 20},
}
# The client library of PostgreSQL reads PGHOST, and with it PGPORT, PGUSER and PGPASSWORD.
DATABASES: dict[str, dict[str, Any]] = {
    "default": _POSTGRESQL if "PGHOST" in os.environ else _SQLITE
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "examples.django_shop.urls"
USE_TZ = True

CELERY_BROKER_URL = os.environ.get("SHOP_REDIS", "redis://localhost:6379/0")
CELERY_RESULT_BACKEND = CELERY_BROKER_URL
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True

# Every task option is also a setting, the default for all tasks.
CELERY_IDEMPOTENCY_LEASE = 30.0
CELERY_IDEMPOTENCY_RESULT_TTL = 7 * 86400.0
# The body of a task and its outcome are one transaction of this database.
CELERY_IDEMPOTENCY_TRANSACTION = "default"
