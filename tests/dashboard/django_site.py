"""A Django project with the dashboard below /ops, for staff: ``uvicorn …:application``."""

from __future__ import annotations

import os
from typing import Any

import django
from django.conf import settings
from django.http import HttpRequest, HttpResponse

settings.configure(
    SECRET_KEY="for tests",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    INSTALLED_APPS=[
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "django.contrib.sessions",
    ],
    MIDDLEWARE=["django.contrib.sessions.middleware.SessionMiddleware"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["DATABASE"]}},
    PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
    USE_TZ=True,
)
django.setup()

from django.contrib.auth import login  # noqa: E402
from django.contrib.auth.models import Permission, User  # noqa: E402
from django.core.asgi import get_asgi_application  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.urls import path  # noqa: E402

from celery_idempotent.dashboard import asgi  # noqa: E402
from celery_idempotent.dashboard.django import staff  # noqa: E402
from tests.monitoring.shop import URL_VARIABLE, make_app  # noqa: E402

call_command("migrate", verbosity=0)
User.objects.create_user("customer")
User.objects.create_user("support", is_staff=True)
User.objects.create_user("operator", is_staff=True).user_permissions.set(
    Permission.objects.filter(codename__in=["delete_user", "view_user"])
)
User.objects.create_user("gone", is_staff=True, is_active=False)


def log_in(request: HttpRequest, name: str) -> HttpResponse:
    user = User.objects.get(username=name)
    login(request, user, backend="django.contrib.auth.backends.ModelBackend")
    return HttpResponse()


urlpatterns = [path("login/<name>", log_in)]

site = get_asgi_application()
dashboard = asgi(
    make_app(os.environ[URL_VARIABLE]),
    authorize=staff(forget="auth.delete_user", results="auth.view_user"),
    url_prefix="/ops",
)


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    is_dashboard = scope["type"] == "http" and scope["path"].startswith("/ops/")
    await (dashboard if is_dashboard else site)(scope, receive, send)
