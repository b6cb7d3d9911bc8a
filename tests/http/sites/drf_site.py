"""A Django project with views of Django REST framework, whose users send tokens."""

from __future__ import annotations

from typing import Any

from django.conf import settings

from tests.http.sites import django_settings as django_site

if not settings.configured:
    options = {name: value for name, value in vars(django_site).items() if name.isupper()}
    options |= {
        "ROOT_URLCONF": __name__,
        "MIDDLEWARE": ["django.middleware.common.CommonMiddleware"],
        "IDEMPOTENCY_MIDDLEWARE": django_site.IDEMPOTENCY_MIDDLEWARE
        | {"REQUIRED": f"{__name__}.requires_key"},
    }
    settings.configure(**options)

    import django

    django.setup()

from django.contrib.auth.models import User
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse, StreamingHttpResponse
from django.urls import re_path
from rest_framework.authentication import BaseAuthentication
from rest_framework.renderers import JSONRenderer
from rest_framework.response import Response
from rest_framework.viewsets import ViewSet

from celery_idempotent.contrib.django.rest_framework import IdempotencyMixin
from tests.http.sites.common import answer, with_cookies


def requires_key(request: Any) -> bool:
    return bool(request.path.startswith("/required"))


class Authentication(BaseAuthentication):
    def authenticate(self, request: Any) -> Any:
        scheme, _, name = request.headers.get("Authorization", "").partition(" ")
        return (User.objects.get(username=name), None) if scheme == "Bearer" else None


class View(IdempotencyMixin, ViewSet):
    authentication_classes = (Authentication,)
    renderer_classes = (JSONRenderer,)

    def serve(self, request: Any) -> Any:
        status, headers, content = answer(request.path, request.body)
        kinds: dict[type, Any] = {dict: Response, bytes: HttpResponse}
        kind = kinds.get(type(content), StreamingHttpResponse)
        return with_cookies(kind(content, status=status, headers=headers))


view = View.as_view(dict.fromkeys(("get", "post", "patch"), "serve"))
urlpatterns: list[Any] = [re_path("", view)]
application = get_wsgi_application()
