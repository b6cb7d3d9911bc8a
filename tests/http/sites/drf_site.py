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
        "IDEMPOTENCY_MIDDLEWARE": {
            **django_site.IDEMPOTENCY_MIDDLEWARE,
            "REQUIRED": f"{__name__}.requires_key",
        },
    }
    settings.configure(**options)

    import django

    django.setup()

from django.contrib.auth.models import User
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse, StreamingHttpResponse
from django.urls import path
from rest_framework.authentication import BaseAuthentication
from rest_framework.renderers import JSONRenderer
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from celery_idempotent.contrib.django.rest_framework import IdempotencyMixin
from tests.http.sites.common import chunks, count, idem, wait_for_release


def requires_key(request: Any) -> bool:
    return bool(request.path.startswith("/required"))


class Authentication(BaseAuthentication):
    def authenticate(self, request: Any) -> Any:
        scheme, _, name = request.headers.get("Authorization", "").partition(" ")
        return (User.objects.get(username=name), None) if scheme == "Bearer" else None


class View(IdempotencyMixin, APIView):
    authentication_classes = (Authentication,)
    renderer_classes = (JSONRenderer,)

    def post(self, request: Any, **arguments: Any) -> Any:
        return self.respond(request, **arguments)

    def patch(self, request: Any, **arguments: Any) -> Any:
        return self.respond(request, **arguments)


class Payments(IdempotencyMixin, ViewSet):
    authentication_classes = (Authentication,)
    renderer_classes = (JSONRenderer,)

    def retrieve(self, request: Any, order: str) -> Response:
        return Response({"payment": count(order)})

    def create(self, request: Any) -> Response:
        number = count(request.data["order"])
        payment = {"payment": number, "attempt": idem.current.attempt, "user": str(request.user)}
        response = Response(payment, status=201, headers={"Location": f"/payments/{number}"})
        response.set_cookie("a", "1")
        response.set_cookie("b", "2")
        return response


PAY = {"post": "create", "patch": "create"}


class Slow(View):
    def respond(self, request: Any) -> Response:
        number = count(request.data["order"])
        wait_for_release(request.data["order"])
        return Response({"payment": number})


class Status(View):
    def respond(self, request: Any, status: int) -> Response:
        return Response(count(request.data["order"]), status)


class Broken(View):
    def respond(self, request: Any) -> Response:
        count(request.data["order"])
        raise RuntimeError("broken")


class Echo(View):
    def respond(self, request: Any) -> HttpResponse:
        return HttpResponse(request.body, content_type="application/octet-stream")


class Chunks(View):
    def respond(self, request: Any, size: int) -> StreamingHttpResponse:
        count(request.data["order"])
        return StreamingHttpResponse(chunks(size))


urlpatterns: list[Any] = [
    path("payments", Payments.as_view(PAY)),
    path("payments/<order>", Payments.as_view({"get": "retrieve"})),
    path("required/payments", Payments.as_view(PAY)),
    path("slow", Slow.as_view()),
    path("status/<int:status>", Status.as_view()),
    path("broken", Broken.as_view()),
    path("echo", Echo.as_view()),
    path("chunks/<int:size>", Chunks.as_view()),
]
application = get_wsgi_application()
