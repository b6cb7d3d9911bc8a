"""A Django site with the admin of outcomes: ``uvicorn …:application``."""

from __future__ import annotations

import os

from tests.sql.admin_site import set_up, urlpatterns

app = set_up(os.environ["DATABASE"], os.environ["REDIS"])

from django.contrib.auth import login  # noqa: E402 - Django has to be set up
from django.contrib.auth.models import User  # noqa: E402
from django.core.asgi import get_asgi_application  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.http import HttpRequest, HttpResponse  # noqa: E402
from django.urls import path  # noqa: E402

call_command("migrate", verbosity=0)
User.objects.create_superuser("root")
for order in ("1", "2"):
    app.tasks["shop.charge"].apply((order,), task_id=f"<img src=x onerror=alert({order})>")


def log_in(request: HttpRequest) -> HttpResponse:
    user = User.objects.get(username="root")
    login(request, user, backend="django.contrib.auth.backends.ModelBackend")
    return HttpResponse()


urlpatterns.append(path("login", log_in))
application = get_asgi_application()
