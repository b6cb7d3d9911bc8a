"""asgi.py of a Django project that serves the dashboard to its staff."""

import os

from django.core.asgi import get_asgi_application

from celery_idempotent.dashboard import asgi
from celery_idempotent.dashboard.django import staff

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "examples.django_shop.settings")
site = get_asgi_application()

from examples.django_shop.celery import app as celery_app  # noqa: E402

dashboard = asgi(
    celery_app,
    authorize=staff(forget="shop.change_order", results="shop.view_order"),
    url_prefix="/idempotency",
)


async def application(scope, receive, send):
    is_dashboard = scope["type"] == "http" and scope["path"].startswith("/idempotency/")
    await (dashboard if is_dashboard else site)(scope, receive, send)
