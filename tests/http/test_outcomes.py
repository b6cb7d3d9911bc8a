"""What a client gets if the engine has no response for it: the same from every middleware."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest
import redis
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpResponse
from django.test import override_settings
from django.urls import path

from celery_idempotent import Idempotency, KeyReusedError, LeaseLostError, signals
from celery_idempotent.contrib import asgi, wsgi
from celery_idempotent.contrib.http.middleware import record_key
from celery_idempotent.core.store import commands, run_sync
from tests.http.drivers import asgi as asgi_server
from tests.http.drivers import wsgi as wsgi_server
from tests.waiting import eventually

IDENTITY, DOCS = "alice", "https://docs.example/errors#"
lock = threading.Lock()
#: Returns status, headers and body.
Handler = Callable[[], tuple[int, list[tuple[str, str]], bytes]]


class Site:
    """An app behind the middleware, whose handler a test replaces at will."""

    def __init__(self, kind: str, idem: Idempotency, client: redis.Redis, key: str) -> None:
        self.is_asgi, self.is_django = kind.endswith("asgi"), kind.startswith("django")
        self.idem, self.redis, self.key = idem, client, key
        self.options: dict[str, Any] = {"identity": lambda request: IDENTITY}
        self.requests = 0
        self.handler: Handler = lambda: (200, [], b"ok")

    def post(self, body: bytes = b"", method: str = "POST", *, keyed: bool = True) -> Any:
        """Sends a request; may be called by the handler."""
        app, key = self._app(), self.key if keyed else None
        if not self.is_asgi:
            environ = wsgi_server.environ(key, body, REQUEST_METHOD=method)
            # The validator warns of a method in other case.
            validate = not self.is_django and method.isupper()
            return wsgi_server.request(app, environ, validate=validate)

        async def send() -> Any:
            scope = asgi_server.scope(key, method=method)
            response = await asgi_server.request(app, scope, body)
            await self.idem.aclose()
            return response

        # In a thread of its own: Django runs the views of nested requests in one thread.
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(asyncio.run, send()).result()

    def _app(self) -> Any:
        if not self.is_django:
            module, app = (asgi, self._asgi) if self.is_asgi else (wsgi, self._wsgi)
            return module.IdempotencyMiddleware(app, self.idem, **self.options)
        options = {name.upper(): value for name, value in self.options.items()}
        # Settings belong to the process, and handlers send requests in other threads.
        with lock, override_settings(IDEMPOTENCY_MIDDLEWARE={"ENGINE": self.idem, **options}):
            return ASGIHandler() if self.is_asgi else WSGIHandler()

    def view(self, request: Any) -> Any:
        self.requests += 1
        status, headers, body = self.handler()
        return HttpResponse(body, status=status, headers=dict(headers))

    def _wsgi(self, environ: Any, start_response: Any) -> list[bytes]:
        self.requests += 1
        status, headers, body = self.handler()
        start_response(f"{status} Any", [("Content-Type", "text/plain"), *headers])
        return [body]

    async def _asgi(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests += 1
        # In a thread, so that the handler can send other requests.
        status, headers, body = await asyncio.to_thread(self.handler)
        encoded = [(name.lower().encode(), value.encode()) for name, value in headers]
        await send({"type": "http.response.start", "status": status, "headers": encoded})
        await send({"type": "http.response.body", "body": body})

    def new_engine(self, **options: Any) -> None:
        """Replaces the engine by one with these options."""
        url = self.idem.settings.redis_url
        self.idem = Idempotency(url, key_prefix=uuid4().hex, name="web", **options)

    def record(self) -> tuple[bytes, bytes]:
        """Returns the name and the value of the only record."""
        (name,) = self.redis.keys(f"{self.idem.settings.key_prefix}:*")
        return name, self.redis.get(name)

    def end_lease(self) -> None:
        """Ends the lease of the running execution, as if its process had been frozen."""
        (record,) = self.idem.records()
        derived = self.idem.key_of(record_key(IDENTITY, self.key))
        abandon = commands.abandon(derived, record.task_id, record.worker, grace_ms=0, reason="")
        assert run_sync(self.idem.executor.store.execute(abandon)).case == "ok"

    def respond_late(self) -> Any:
        """Responds after another execution has taken over and responded: a handler."""
        self.end_lease()
        self.handler = lambda: (200, [], b"second")
        assert self.post().body == b"second"
        return 200, [("Set-Cookie", "session=secret")], b"first"


@pytest.fixture(params=["asgi", "wsgi", "django-asgi", "django-wsgi"])
def site(
    request: pytest.FixtureRequest, idem: Idempotency, client: redis.Redis, key: str
) -> Iterator[Site]:
    site = Site(request.param, idem, client, key)
    if not site.is_django:
        yield site
        return
    request.getfixturevalue("django_project")

    class Urls:
        urlpatterns = (path("pay", site.view),)

    middleware = "celery_idempotent.contrib.django.middleware.IdempotencyMiddleware"
    with override_settings(ROOT_URLCONF=Urls, MIDDLEWARE=[middleware]):
        yield site


def problem(response: Any, base: str = "urn:celery-idempotent:") -> str:
    """Returns the status and the name of a problem."""
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["content-length"] == str(len(response.body))
    document = json.loads(response.body)
    assert document["status"] == response.status
    assert document["type"].startswith(base)
    return f"{response.status} {document['type'].removeprefix(base)}"


@pytest.mark.parametrize("options", [{}, {"problem_type_base": DOCS, "retry_after": 7}], ids=len)
def test_types_and_retry_after_are_options(site: Site, options: dict[str, Any]) -> None:
    site.idem = Idempotency("redis://127.0.0.1:1", name="web")
    site.options |= options
    response = site.post()

    base = options.get("problem_type_base", "urn:celery-idempotent:")
    assert (problem(response, base), site.requests) == ("503 store-unavailable", 0)
    assert response.headers["retry-after"] == str(options.get("retry_after", 1))


def test_a_request_without_protection_is_marked(site: Site) -> None:
    protected = site.idem
    site.idem = Idempotency("redis://127.0.0.1:1", name="web", on_store_error="run")
    response = site.post()

    assert (response.status, response.body) == (200, b"ok")
    assert response.headers["idempotency-unprotected"] == "true"
    site.idem = protected
    assert "idempotency-unprotected" not in site.post().headers


def test_500_if_the_record_is_damaged(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.post()
    site.redis.set(site.record()[0], b"damaged")
    response = site.post()

    assert (problem(response), site.requests) == ("500 outcome-unknown", 1)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    (error,) = (each for each in errors if each.name.startswith("celery_idempotent"))
    assert "refused" in error.message
    assert site.key not in error.message


def test_500_if_the_record_holds_no_response(site: Site) -> None:
    with site.idem.execution(record_key(IDENTITY, site.key)) as execution:
        execution.complete("something else")
    response = site.post()

    assert (problem(response), site.requests) == ("500 outcome-unknown", 0)


def test_500_if_its_executions_have_crashed(site: Site) -> None:
    def crash() -> Any:
        site.end_lease()
        later.append(site.post())
        return 200, [], b"too late"

    later: list[Any] = []
    site.new_engine(max_attempts=1)
    site.handler = crash
    responses = [site.post(), *later, site.post()]

    assert [problem(response) for response in responses] == ["500 outcome-unknown"] * 3
    assert site.requests == 1


def test_409_if_another_execution_has_taken_over_and_runs(site: Site) -> None:
    def first() -> Any:
        site.end_lease()
        site.handler = second
        responses.append(threads.submit(site.post))
        assert begun.wait(60)
        return 200, [("Set-Cookie", "session=secret")], b"first"

    def second() -> Any:
        begun.set()
        assert ended.wait(60)
        return 200, [], b"second"

    begun, ended, responses = threading.Event(), threading.Event(), []
    site.handler = first
    with ThreadPoolExecutor(1) as threads:
        refused = site.post()
        ended.set()

    assert problem(refused) == "409 request-in-progress"
    assert refused.headers["retry-after"] == "1"
    assert "set-cookie" not in refused.headers
    assert responses[0].result().body == site.post().body == b"second"


def test_a_late_execution_gets_the_response_of_the_one_that_took_over(site: Site) -> None:
    site.handler = site.respond_late
    late = site.post()

    assert late.body == site.post().body == b"second"
    assert late.headers["idempotency-replayed"] == "true"
    assert "set-cookie" not in late.headers


@pytest.mark.parametrize("limited", [False, True], ids=["store_result", "max_response_bytes"])
def test_409_if_responses_are_not_stored(site: Site, limited: bool) -> None:
    site.new_engine(store_result=limited)
    site.options |= {"max_response_bytes": 1} if limited else {}
    first, again = site.post(), site.post()

    assert (first.status, first.body, site.requests) == (200, b"ok", 1)
    assert problem(again) == "409 response-not-stored"


@pytest.mark.parametrize("status", [200, 201, 302, 400, 403, 404, 422])
def test_a_response_below_500_is_stored(site: Site, status: int) -> None:
    site.handler = lambda: (status, [], b"%d" % site.requests)
    assert [site.post().body for _ in range(2)] == [b"1", b"1"]


@pytest.mark.parametrize("status", [401, 408, 409, 421, 423, 425, 429, 500, 503])
def test_a_response_to_be_followed_by_a_retry_is_not_stored(site: Site, status: int) -> None:
    """Otherwise a 429, say, would be replayed until the key expires."""
    statuses = [status, status, 201]
    site.handler = lambda: (statuses[site.requests - 1], [], b"%d" % site.requests)
    responses = [site.post() for _ in range(4)]
    assert [response.status for response in responses] == [status, status, 201, 201]
    assert [response.body for response in responses] == [b"1", b"2", b"3", b"3"]


@pytest.mark.parametrize(("size", "status"), [(64 * 1024, 422), (64 * 1024 + 1, 409)])
def test_of_a_large_error_only_the_fact_is_stored(site: Site, size: int, status: int) -> None:
    """Clients without rights choose what an error quotes; the request is not executed again."""
    site.handler = lambda: (422, [], b"x" * size)
    first, again = site.post(), site.post()

    assert (first.status, len(first.body)) == (422, size)
    assert (again.status, site.requests) == (status, 1)
    _, stored = site.record()
    assert len(stored) < (size + 1000 if status == 422 else 1000)


@pytest.mark.parametrize(
    ("status", "fields"),
    [
        *((200, ["no-store"]), (404, ["private, No-Store"])),
        (500, ["max-age=0", " no-store ,private"]),
    ],
)
def test_a_response_with_no_store_is_not_stored(site: Site, status: int, fields: list[str]) -> None:
    """It runs once even so, whatever store_response decides."""
    if site.is_django:
        fields = [", ".join(fields)]
    site.options["store_response"] = lambda status, headers: True
    site.handler = lambda: (status, [("Cache-Control", f) for f in fields], b"a secret")
    first, again = site.post(), site.post()

    assert (first.status, first.body, site.requests) == (status, b"a secret", 1)
    assert problem(again) == "409 response-not-stored"
    _, stored = site.record()
    assert b"secret" not in stored


def test_other_cache_directives_are_for_caches(site: Site) -> None:
    site.handler = lambda: (200, [("Cache-Control", "no-cache, private, x-no-store=1")], b"ok")
    site.post()
    assert site.post().headers["idempotency-replayed"] == "true"


class TestAuthorizeReplay:
    def test_decides_which_replays_are_sent(self, site: Site) -> None:
        def authorize(request: Any) -> bool:
            seen.append(request)
            return allowed

        seen: list[Any] = []
        site.options["authorize_replay"] = authorize
        site.handler = lambda: (200, [], b"an account number")
        for allowed in (False, True, False):
            response = site.post()
            assert response.status == (200 if allowed or not seen else 403)
            assert site.requests == 1
        assert problem(response) == "403 replay-forbidden"
        assert b"account" not in response.body
        assert len(seen) == 2  # the app decides about the request that it executes

    def test_is_awaited_under_asgi_alone(self, site: Site) -> None:
        async def authorize(request: Any) -> bool:
            await asyncio.sleep(0)
            return answers.pop()

        class Allowed:
            def __await__(self) -> Iterator[Any]:
                yield from ()
                return True

        answers = [True, False]
        site.options["authorize_replay"] = authorize if site.is_asgi else lambda _: Allowed()
        site.post()
        if site.is_asgi:
            assert [site.post().status for _ in range(2)] == [403, 200]
        else:  # WSGI has no event loop
            with pytest.raises(TypeError, match="True or False, not Allowed"):
                site.post()
        assert site.requests == 1

    @pytest.mark.parametrize("returned", [None, 1, "no", object])
    def test_must_return_true_or_false(self, site: Site, returned: Any) -> None:
        """A value that is merely true in a condition, such as a coroutine, is not a permission."""
        site.options["authorize_replay"] = lambda request: returned
        site.post()
        with pytest.raises(TypeError, match="authorize_replay must return True or False, not"):
            site.post()
        assert site.requests == 1

    def test_is_not_asked_about_problems(self, site: Site) -> None:
        site.options |= {"authorize_replay": lambda request: 1 / 0, "max_response_bytes": 0}
        site.post()
        assert problem(site.post()) == "409 response-not-stored"
        assert site.post(b"other").status == 422

    def test_is_asked_about_the_response_of_another_execution(self, site: Site) -> None:
        site.options["authorize_replay"] = lambda request: False
        site.handler = site.respond_late
        assert problem(site.post()) == "403 replay-forbidden"


@pytest.mark.parametrize("method", ["post", "Post", "pOST", "patch"])
def test_a_method_in_other_case_needs_a_key(site: Site, method: str) -> None:
    site.options["required"] = True
    refused = site.post(method=method, keyed=False)
    responses = [site.post(method=method) for _ in range(2)]

    assert problem(refused) == "400 key-missing"
    assert [response.status for response in responses] == [200, 200]
    assert site.requests == 1


@pytest.mark.parametrize("error", [KeyReusedError, LeaseLostError, ZeroDivisionError])
def test_an_error_of_the_app_is_raised_and_not_stored(site: Site, error: type[Exception]) -> None:
    """The app may use other keys, and these may be held; `replay_errors` are those of tasks."""

    def fail() -> Any:
        raise error("of another key")

    site.new_engine(replay_errors=(ZeroDivisionError,))
    site.handler = fail
    for _ in range(2):
        with pytest.raises(error, match="of another key"):
            site.post()
    assert site.requests == 2
    assert list(site.idem.records()) == []


def test_store_response_decides_what_is_stored(site: Site) -> None:
    seen = []

    def store(status: int, headers: list[tuple[str, str]]) -> bool:
        seen.append((status, dict(headers).get("x-final")))
        return seen[-1][1] == "yes"

    site.options["store_response"] = store
    for final in ("no", "yes", "no"):
        site.handler = lambda final=final: (500, [("X-Final", final)], final.encode())  # type: ignore[misc]
        response = site.post()

    assert seen == [(500, "no"), (500, "yes")]
    assert response.body == b"yes"
    assert response.headers["idempotency-replayed"] == "true"


def test_a_request_waits_for_a_running_one(site: Site) -> None:
    def slow() -> Any:
        begun.set()
        assert ended.wait(60)
        return 200, [], b"slow"

    def record_case(case: str, **_: Any) -> None:
        cases.append(case)

    begun, ended, cases = threading.Event(), threading.Event(), []  # type: ignore[var-annotated]
    signals.begin_replied.connect(record_case)
    site.handler = slow
    site.options["wait_timeout"] = 60
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(site.post)
        assert begun.wait(60)
        second = threads.submit(site.post)
        eventually(lambda: "held" in cases, "the second request waits")
        ended.set()

    assert first.result().body == second.result().body == b"slow"
    assert site.requests == 1


def test_a_record_expires_and_has_neither_key_nor_identity(site: Site) -> None:
    site.post()
    name, stored = site.record()

    assert site.key.encode() not in name + stored
    assert IDENTITY.encode() not in name + stored
    assert site.idem.settings.result_ttl == 24 * 3600
    assert 24 * 3600 - 60 < site.redis.ttl(name) <= 24 * 3600
