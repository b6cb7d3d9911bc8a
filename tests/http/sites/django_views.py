"""The app with Django: views that block, and one that does not."""

from __future__ import annotations

from typing import Any

from asgiref.sync import sync_to_async
from django.contrib.auth import authenticate, login
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.middleware.csrf import get_token
from django.urls import path, re_path

from tests.http.sites.common import answer, count, is_allowed, with_cookies


def requires_key(request: HttpRequest) -> bool:
    return request.resolver_match.view_name == "required"


def authorize_replay(request: HttpRequest) -> bool:
    return is_allowed(request.headers["Idempotency-Key"])


def log_in(request: HttpRequest) -> HttpResponse:
    if request.method == "POST":
        name = request.POST["name"]
        login(request, authenticate(request, username=name, password=name))
    return JsonResponse({"token": get_token(request)})


def serve(request: HttpRequest) -> HttpResponse:
    status, headers, content = answer(request.path, request.body)
    if isinstance(content, dict):
        content = {**content, "user": str(request.user)}
        request.session["visits"] = request.session.get("visits", 0) + 1
    kinds: dict[type, Any] = {dict: JsonResponse, bytes: HttpResponse}
    kind = kinds.get(type(content), StreamingHttpResponse)
    return with_cookies(kind(content, status=status, headers=headers))  # type: ignore[no-any-return]


async def slow(request: HttpRequest) -> HttpResponse:
    answered = await sync_to_async(answer, thread_sensitive=False)(request.path, request.body)
    return JsonResponse(answered[-1])


def upload(request: HttpRequest) -> HttpResponse:
    """Is a form with a file; the order is one of its fields."""
    (file,) = request.FILES.values()
    return JsonResponse({"payment": count(request.POST["order"]), "size": file.size})


urlpatterns: list[Any] = [
    path("login", log_in),
    path("slow", slow),
    path("upload", upload),
    path("required/payments", serve, name="required"),
    re_path("^(?:payments|status|broken|echo|chunks)", serve),
]
