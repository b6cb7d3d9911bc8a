"""The app with Django: views that block, and one that does not."""

from __future__ import annotations

import json
from typing import Any

from asgiref.sync import sync_to_async
from django.contrib.auth import authenticate, login
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.middleware.csrf import get_token
from django.urls import path

from tests.http.sites.common import chunks, count, idem, is_allowed, wait_for_release


def requires_key(request: HttpRequest) -> bool:
    return request.resolver_match.view_name == "required"


def authorize_replay(request: HttpRequest) -> bool:
    return is_allowed(request.headers["Idempotency-Key"])


def order_of(request: HttpRequest) -> str:
    order: str = json.loads(request.body)["order"]
    return order


def log_in(request: HttpRequest) -> HttpResponse:
    if request.method == "POST":
        name = request.POST["name"]
        login(request, authenticate(request, username=name, password=name))
    return JsonResponse({"token": get_token(request)})


def pay(request: HttpRequest, order: str = "") -> HttpResponse:
    order = order or order_of(request)
    number = count(order)
    payment = {"payment": number, "attempt": idem.current.attempt, "user": str(request.user)}
    response = JsonResponse(payment, status=201)
    response["Location"] = f"/payments/{number}"
    response.set_cookie("a", "1")
    response.set_cookie("b", "2")
    request.session["visits"] = request.session.get("visits", 0) + 1
    return response


async def slow(request: HttpRequest) -> HttpResponse:
    order = order_of(request)
    number = await sync_to_async(count)(order)
    await sync_to_async(wait_for_release, thread_sensitive=False)(order)
    return JsonResponse({"payment": number})


def respond(request: HttpRequest, status: int) -> HttpResponse:
    return HttpResponse(str(count(order_of(request))), status=status)


def broken(request: HttpRequest) -> HttpResponse:
    count(order_of(request))
    raise RuntimeError("broken")


def echo(request: HttpRequest) -> HttpResponse:
    return HttpResponse(request.body, content_type="application/octet-stream")


def upload(request: HttpRequest) -> HttpResponse:
    """Is a form with a file; the order is one of its fields."""
    (file,) = request.FILES.values()
    return JsonResponse({"payment": count(request.POST["order"]), "size": file.size})


def stream(request: HttpRequest, size: int) -> StreamingHttpResponse:
    count(order_of(request))
    return StreamingHttpResponse(chunks(size))


urlpatterns: list[Any] = [
    path("login", log_in),
    path("payments", pay),
    path("payments/<order>", pay),
    path("required/payments", pay, name="required"),
    path("slow", slow),
    path("status/<int:status>", respond),
    path("broken", broken),
    path("echo", echo),
    path("upload", upload),
    path("chunks/<int:size>", stream),
]
