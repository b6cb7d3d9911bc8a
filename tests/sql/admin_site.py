"""A Django site with the admin of outcomes, in this process: ``set_up(database, redis)``.

With ``uvicorn --factory …:application`` it is a server.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from celery import Celery

from celery_idempotent import Idempotency, IdempotentTask
from tests.sql.databases import django_database, dump

urlpatterns: list[Any] = []

#: Of the middleware.
idem = Idempotency("redis://localhost", name="admin-site")


class Declined(Exception):
    """Ends the key."""


def set_up(database_url: str, redis_url: str) -> Celery:
    """Sets up Django and a Celery app with tasks that run eagerly; returns the app."""
    import django
    import pymysql
    from django.conf import settings as django_settings

    pymysql.install_as_MySQLdb()
    database = django_database(database_url)
    settings: dict[str, Any] = {
        "SECRET_KEY": "for tests",
        "ALLOWED_HOSTS": ["*"],
        "ROOT_URLCONF": __name__,
        "DATABASES": {"default": {**database, "ATOMIC_REQUESTS": True}},
        "INSTALLED_APPS": [
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.messages",
            "django.contrib.sessions",
            "celery_idempotent.contrib.django",
        ],
        "MIDDLEWARE": [
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.middleware.csrf.CsrfViewMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        "TEMPLATES": [
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
        "PASSWORD_HASHERS": ["django.contrib.auth.hashers.MD5PasswordHasher"],
        "STATIC_URL": "/static/",
        "USE_TZ": True,
        "CELERY_BROKER_URL": redis_url,
        "CELERY_RESULT_BACKEND": redis_url,
        "CELERY_TASK_ALWAYS_EAGER": True,
        "CELERY_IDEMPOTENCY_TRANSACTION": "default",
    }
    django_settings.configure(**settings)
    app = make_app()
    django.setup()
    from django.contrib import admin
    from django.urls import path

    urlpatterns.append(path("admin/", admin.site.urls))
    return app


def make_app() -> Celery:
    """Returns an app with Django's settings, whose results and labels are hostile in HTML."""
    app = Celery("shop")
    app.config_from_object("django.conf:settings", namespace="CELERY")

    @app.task(
        name="shop.charge",
        base=IdempotentTask,
        idempotency_key="order:{order}",
        idempotency_label="<i>{order}</i>",
        idempotency_replay_errors=(Declined,),
    )
    def charge(order: str, amount: int = 1) -> dict[str, Any]:
        if amount == 13:
            raise Declined(f"<script>{order}</script>")
        return {"order": order, "note": "<script>alert(1)</script>"}

    @app.task(name="shop.ship", base=IdempotentTask, idempotency_until="finished")
    def ship(order: str) -> str:
        return order

    return app


def application() -> Any:
    """Returns the site for ASGI: with two outcomes, whose ids are hostile, and a user to log in."""
    app = set_up(os.environ["DATABASE"], os.environ["REDIS"])

    from django.contrib.auth import login
    from django.contrib.auth.models import User
    from django.core.asgi import get_asgi_application
    from django.core.management import call_command
    from django.http import HttpRequest, HttpResponse
    from django.urls import path

    call_command("migrate", verbosity=0)
    root = User.objects.create_superuser("root")
    for order in ("1", "2"):
        app.tasks["shop.charge"].apply((order,), task_id=f"<img src=x onerror=alert({order})>")

    def log_in(request: HttpRequest) -> HttpResponse:
        login(request, root, backend="django.contrib.auth.backends.ModelBackend")
        return HttpResponse()

    urlpatterns.append(path("login", log_in))
    return get_asgi_application()


def messages(settings: dict[str, Any]) -> list[list[str]]:
    """Returns id, text and hint of each of our messages of ``manage.py check``."""
    from django.core import checks
    from django.db import connections
    from django.test.utils import override_settings

    database = {"ATOMIC_REQUESTS": False, "AUTOCOMMIT": True, **settings.pop("DATABASE", {})}
    connections.settings["default"].update(database)
    with override_settings(**settings):
        make_app()  # the current one from now on
        found = checks.run_checks(databases=["default"])
    ours = [message for message in found if str(message.id).startswith("celery_idempotent.")]
    return [[message.id.rpartition(".")[2], message.msg, message.hint] for message in ours]


if __name__ == "__main__":
    # python -m tests.sql.admin_site DATABASE_URL REDIS_URL SETTINGS: with each of a JSON list
    set_up(sys.argv[1], sys.argv[2])
    dump([messages(settings) for settings in json.loads(sys.argv[3])])
