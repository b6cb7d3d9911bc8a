"""Attacks that an earlier version of the middleware fell for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from django.conf import settings
from django.core.handlers.asgi import ASGIHandler
from django.test import Client, override_settings

from celery_idempotent import Idempotency
from celery_idempotent.contrib import asgi, wsgi
from celery_idempotent.errors import SettingsError
from tests.http.drivers import asgi as asgi_server
from tests.http.drivers import wsgi as wsgi_server
from tests.servers.redis_server import RedisServer

CLIENTS = 20


@pytest.fixture(params=["django", "asgi"])
def shop(request: pytest.FixtureRequest, idem: Idempotency, django_project: None) -> Any:
    """A Django app with cookie sessions, protected by either middleware."""
    if request.param == "django":
        return ASGIHandler()
    inner = "celery_idempotent.contrib.django.middleware.IdempotencyMiddleware"

    without = [name for name in settings.MIDDLEWARE if name != inner]
    with override_settings(MIDDLEWARE=without):
        handler = ASGIHandler()
    return asgi.IdempotencyMiddleware(handler, idem, identity=asgi.by_cookie("sessionid"))


def visit(shop: Any, idem: Idempotency, cookies: dict[str, str], key: str) -> Any:
    """Sends the same order and key as everybody else, from a browser with these cookies."""
    headers = [
        ("cookie", "; ".join(f"{name}={value}" for name, value in cookies.items())),
        ("x-csrftoken", cookies["csrftoken"]),
        ("content-type", "application/json"),
    ]
    scope = asgi_server.scope(key, headers, path="/payments")

    async def send() -> Any:
        response = await asgi_server.request(shop, scope, b'{"order": "%s"}' % key.encode())
        await idem.aclose()
        return response

    return asyncio.run(send())


def test_one_customers_answer_and_session_cookie_given_to_another(
    shop: Any, idem: Idempotency, key: str
) -> None:
    """Both send the same key, as a client that numbers its requests does."""
    browsers = {}
    for name in ("alice", "bob"):
        client = Client()
        client.post("/login", {"name": name})
        client.get("/login")
        browsers[name] = {cookie: morsel.value for cookie, morsel in client.cookies.items()}
        browsers[name].setdefault("csrftoken", "x" * 32)

    first, other, again = (visit(shop, idem, browsers[n], key) for n in ("alice", "bob", "alice"))
    visitor = visit(shop, idem, {"csrftoken": "x" * 32}, key)

    assert b'"user": "alice"' in first.body
    assert b'"user": "bob"' in other.body
    assert again.body == first.body
    assert (visitor.status, b"identity-missing" in visitor.body) == (400, True)
    for response in (other, again):
        fields = [bytes(value).decode() for _, value in response.messages[0]["headers"]]
        assert not any(browsers["alice"]["sessionid"] in field for field in fields)


def test_two_services_behind_one_gateway_answered_for_each_other(
    server: RedisServer, key: str
) -> None:
    """Each has an engine on the same Redis, and gets the same request of one user."""

    def send(service: str, **options: Any) -> bytes:
        def app(environ: Any, start_response: Any) -> list[bytes]:
            start_response("200 OK", [("Content-Type", "text/plain")])
            return [service.encode()]

        idem = Idempotency(server.url, key_prefix=key, **options)
        middleware = wsgi.IdempotencyMiddleware(app, idem, identity=wsgi.anonymous)
        return wsgi_server.request(middleware, wsgi_server.environ(key)).body

    services = ["billing", "shipping"]
    assert [send(service, name=service) for service in services] == [b"billing", b"shipping"]
    with pytest.raises(SettingsError, match="has the default name"):
        [send(service) for service in services]
