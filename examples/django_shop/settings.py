"""Django's settings; those of Celery and celery-idempotent begin with CELERY_."""

from __future__ import annotations

import os

SECRET_KEY = "for an example"
INSTALLED_APPS = ["examples.django_shop"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("SHOP_DATABASE", "shop.sqlite3"),
    }
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
