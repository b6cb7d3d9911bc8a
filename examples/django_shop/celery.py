"""The Celery app, set up as in Celery's guide for Django.

celery -A examples.django_shop.celery worker
celery -A examples.django_shop.celery idempotency doctor
"""

from __future__ import annotations

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "examples.django_shop.settings")

app = Celery("django_shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
