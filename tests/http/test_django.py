"""The Django middleware: settings, users, CSRF tokens, and middleware of both kinds around it."""

from __future__ import annotations

import asyncio
import io
from typing import Any
from uuid import uuid4

import httpx
import pytest
import redis
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.handlers.asgi import ASGIHandler, ASGIRequest
from django.core.handlers.wsgi import WSGIHandler, WSGIRequest
from django.http import HttpResponse
from django.test import Client, override_settings
from django.urls import path
from django.utils.decorators import async_only_middleware, sync_only_middleware

from celery_idempotent import Idempotency
from celery_idempotent.contrib.django.middleware import IdempotencyMiddleware, by_user
from celery_idempotent.dashboard import asgi as dashboard
from celery_idempotent.dashboard.django import staff
from tests.apps import close
from tests.dashboard.conftest import fields_of, serving
from tests.http.drivers import asgi as asgi_server
from tests.http.drivers import wsgi as wsgi_server
from tests.http.drivers.web_server import CHUNK, request_count
from tests.monitoring.conftest import Shop
from tests.monitoring.shop import make_app
from tests.servers.redis_server import RedisServer

pytestmark = pytest.mark.usefixtures("django_project")

MIDDLEWARE = "celery_idempotent.contrib.django.middleware.IdempotencyMiddleware"


@pytest.fixture
def alice() -> Any:
    """A browser in which alice has logged in."""
    return browser("alice")


def browser(name: str) -> Any:
    client = Client(enforce_csrf_checks=True, raise_request_exception=False)
    token = client.get("/login").json()["token"]
    response = client.post("/login", {"name": name}, headers={"X-CSRFToken": token})
    client.token = response.json()["token"]
    return client


def post(client: Any, path: str, key: str | None, order: str, *, token: str | None = None) -> Any:
    headers = {"X-CSRFToken": client.token if token is None else token}
    if key is not None:
        headers["Idempotency-Key"] = key
    return client.post(path, {"order": order}, content_type="application/json", headers=headers)


def records() -> list[Any]:
    from tests.http.sites.common import idem

    return list(idem.records())


class TestUsers:
    def test_a_user_keeps_the_key_over_a_new_session(self, alice: Any, key: str) -> None:
        first = post(alice, "/payments", key, key)
        again = post(browser("alice"), "/payments", key, key)

        assert first.content == again.content
        assert {"a", "b", "sessionid"} <= first.cookies.keys()
        assert again.cookies.keys() == set()

    def test_without_a_user_the_error_names_the_way_out(self, key: str) -> None:
        middleware = create(IDENTITY=by_user)
        with pytest.raises(ImproperlyConfigured, match="below AuthenticationMiddleware"):
            middleware(request(key))


class TestCsrf:
    def test_a_wrong_token_is_refused_and_leaves_nothing(
        self, alice: Any, client: redis.Redis, key: str
    ) -> None:
        tokens = ("x" * 32, None, "x" * 32)  # a replay needs one, too
        responses = [post(alice, "/payments", key, key, token=token) for token in tokens]

        assert [response.status_code for response in responses] == [403, 201, 403]
        assert request_count(client, key) == 1

    def test_a_path_without_a_view_leaves_nothing(self, alice: Any, key: str) -> None:
        before = len(records())
        assert post(alice, "/nonesuch", key, key).status_code == 404
        assert len(records()) == before

    def test_a_form_with_a_file_is_a_request_like_any_other(
        self, alice: Any, client: redis.Redis, key: str
    ) -> None:
        """The token is a field of the form, so the form is parsed before the view is known."""
        responses = []
        for content in (b"file", b"file", b"other"):
            form = {"order": key, "csrfmiddlewaretoken": alice.token, "f": io.BytesIO(content)}
            responses.append(alice.post("/upload", form, headers={"Idempotency-Key": key}))

        assert [response.status_code for response in responses] == [200, 200, 422]
        assert responses[0].content == responses[1].content == b'{"payment": 1, "size": 4}'
        assert request_count(client, key) == 1


class TestViews:
    @pytest.mark.parametrize("size", [10, 200_000])
    def test_a_request_without_a_key_has_no_limit(self, alice: Any, key: str, size: int) -> None:
        assert post(alice, "/payments", None, key + "x" * size).status_code == 201

    def test_a_streaming_response_is_not_held_back(self, alice: Any, key: str) -> None:
        first, again = (post(alice, "/chunks/3", key, key) for _ in range(2))

        assert first.getvalue() == 3 * CHUNK
        assert (again.status_code, b"response-not-stored" in again.content) == (409, True)

    def test_a_response_without_a_content_type_is_replayed_without(self, key: str) -> None:
        def view(request: Any) -> Any:
            response = HttpResponse(status=204)
            del response["Content-Type"]
            return response

        middleware = create(view)
        for replayed in (None, "true"):
            response = middleware(request(key))
            assert (response.status_code, response.get("Content-Type")) == (204, None)
            assert response.get("Idempotency-Replayed") == replayed


@sync_only_middleware
def blocking(get_response: Any) -> Any:
    return lambda request: get_response(request)


@async_only_middleware
def asynchronous(get_response: Any) -> Any:
    async def middleware(request: Any) -> Any:
        return await get_response(request)

    return middleware


@pytest.mark.parametrize("is_async_view", [False, True])
@pytest.mark.parametrize(
    "others", ["blocking", "asynchronous", "blocking asynchronous", "asynchronous blocking", ""]
)
@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_all_kinds_of_middleware_and_views_work_together(
    kind: str, others: str, is_async_view: bool, server: RedisServer, key: str
) -> None:
    executions = []

    def view(request: Any) -> Any:
        executions.append((idem.current.key, idem.current.protected))
        return HttpResponse(f"{len(executions)}", status=statuses.pop(0))

    async def async_view(request: Any) -> Any:
        return view(request)

    class Urls:
        urlpatterns = (path("pay", async_view if is_async_view else view),)

    statuses = [503, 200]
    idem = Idempotency(server.url, key_prefix=uuid4().hex, name="web")
    around = [f"{__name__}.{name}" for name in others.split()]
    options = {"ENGINE": idem, "IDENTITY": lambda request: "alice"}
    middleware = {"MIDDLEWARE": [*around, MIDDLEWARE, *around], "IDEMPOTENCY_MIDDLEWARE": options}
    with override_settings(ROOT_URLCONF=Urls, **middleware):
        responses = [send(kind, key) for _ in range(3)]
    idem.close()

    assert responses == [(503, b"1", None), (200, b"2", None), (200, b"2", "true")]
    assert {protected for _, protected in executions} == {True}
    assert len({execution_key for execution_key, _ in executions}) == 1


def send(kind: str, key: str) -> tuple[int, bytes, str | None]:
    """Returns status and body of a response, and whether it is a replay."""
    if kind == "asgi":
        response = asyncio.run(asgi_server.request(ASGIHandler(), asgi_server.scope(key)))
    else:
        response = wsgi_server.request(WSGIHandler(), wsgi_server.environ(key), validate=False)
    return response.status, response.body, response.headers.get("idempotency-replayed")


class TestBody:
    @override_settings(DATA_UPLOAD_MAX_MEMORY_SIZE=3)
    def test_a_body_that_django_does_not_read_is_refused(self, key: str) -> None:
        middleware = create()
        for size, status in ((3, 200), (4, 413)):
            assert middleware(request(key, b"x" * size)).status_code == status
        response = middleware(ASGIRequest(asgi_server.scope(key), io.BytesIO(b"four")))
        assert (response.status_code, b"limited to 3 bytes" in response.content) == (413, True)

    @pytest.mark.parametrize("length", ["9", "x"])
    def test_a_body_that_is_incomplete_is_refused(self, key: str, length: str) -> None:
        response = create()(request(key, b"short", CONTENT_LENGTH=length))
        assert (response.status_code, b"body-incomplete" in response.content) == (400, True)

    def test_a_body_that_cannot_be_read_is_refused(self, key: str) -> None:
        class Broken(io.BytesIO):
            def read(self, *size: Any) -> bytes:
                raise OSError("the client is gone")

        assert create()(request(key, b"body", **{"wsgi.input": Broken()})).status_code == 400


def request(key: str, body: bytes = b"", **changes: Any) -> WSGIRequest:
    return WSGIRequest(wsgi_server.environ(key, body, **changes))


def create(view: Any = lambda request: HttpResponse("ok"), **options: Any) -> Any:
    """Returns the middleware around a view, for one user."""
    from tests.http.sites.common import idem

    def get_response(request: Any) -> Any:
        return middleware.process_view(request, None, (), {}) or view(request)

    options = {"ENGINE": idem, "IDENTITY": lambda request: "alice", **options}
    with override_settings(IDEMPOTENCY_MIDDLEWARE=options):
        middleware = IdempotencyMiddleware(get_response)
    return middleware


class TestSettings:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (None, "must be a dictionary whose ENGINE is an Idempotency"),
            ("shop.celery.idem", "must be a dictionary whose ENGINE is an Idempotency"),
            ({}, "must be a dictionary whose ENGINE is an Idempotency"),
            ({"ENGINE": "redis://"}, r"\['ENGINE'\] cannot be imported"),
            ({"ENGINE": "nonesuch.idem"}, r"\['ENGINE'\] cannot be imported: .*nonesuch"),
            ({"ENGINE": "json.dumps"}, "idem must be an Idempotency"),
            ({"IDENTITTY": 1}, "no option 'IDENTITTY'; did you mean IDENTITY?"),
            ({"COLOUR": 1}, "no option 'COLOUR'; it has ENGINE, IDENTITY"),
            ({1: 1}, "no option 1;"),
            ({"IDENTITY": "json.nonesuch"}, r"\['IDENTITY'\] cannot be imported"),
            ({"IDENTITY": None}, "identity must be a function"),
            ({"METHODS": "POST"}, "methods must be a list"),
            ({"REQUIRED": "json.nonesuch"}, r"\['REQUIRED'\] cannot be imported"),
            ({"WAIT_TIMEOUT": "1"}, "wait_timeout must be"),
            ({"MAX_BODY_BYTES": -1}, "max_body_bytes must be"),
            ({"MAX_BODY_BYTES": 10**9}, "raise DATA_UPLOAD_MAX_MEMORY_SIZE"),
        ],
        ids=str,
    )
    def test_a_wrong_setting_is_named_in_one_line(self, options: Any, message: str) -> None:
        if isinstance(options, dict) and options and "ENGINE" not in options:
            options = {"ENGINE": "tests.http.sites.common.idem", **options}
        with (
            override_settings(IDEMPOTENCY_MIDDLEWARE=options),
            pytest.raises(ImproperlyConfigured, match=message) as raised,
        ):
            WSGIHandler()  # the project does not start
        assert len(str(raised.value).splitlines()) == 1
        assert str(raised.value).startswith("IDEMPOTENCY_MIDDLEWARE")

    def test_a_project_without_the_setting_does_not_start(self) -> None:
        with override_settings():
            del settings.IDEMPOTENCY_MIDDLEWARE
            with pytest.raises(ImproperlyConfigured, match="must be a dictionary whose ENGINE"):
                WSGIHandler()

    def test_a_project_whose_checks_come_later_does_not_start(self) -> None:
        refused = pytest.raises(ImproperlyConfigured, match="below django.+CsrfViewMiddleware in")
        with override_settings(MIDDLEWARE=settings.MIDDLEWARE[::-1]), refused:
            WSGIHandler()


def test_a_request_that_another_middleware_answers_leaves_nothing(key: str) -> None:
    before = len(records())
    middleware = IdempotencyMiddleware(lambda request: HttpResponse("maintenance", status=200))
    response: Any = middleware(request(key))
    assert (response.content, len(records())) == (b"maintenance", before)


def test_the_dashboard_is_for_staff_and_permissions_give_further_rights(
    server: RedisServer, client: redis.Redis, key: str
) -> None:
    from django.contrib.auth.models import Permission, User

    shop, order = Shop(make_app(server.url), client), uuid4().int >> 64
    shop.charge.apply((order, 999))
    record = shop.charge.idempotency_key_of(order, 999)
    page = f"/records/{record}"
    authorize = staff(forget="auth.delete_user", results="auth.view_user")
    dashboard(shop.app, authorize=authorize)

    def log_in(name: str, *permissions: str, **attributes: bool) -> None:
        user = User.objects.create_user(f"{name} {key}", **attributes)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        browser = Client()
        browser.force_login(user)
        web.cookies = httpx.Cookies({"sessionid": browser.cookies["sessionid"].value})

    def assert_refused(who: str) -> None:
        for url in ("/records", f"/api{page}"):
            assert web.get(url).status_code == 403, who

    # It does not refuse inactive users itself.
    backend = "django.contrib.auth.backends.AllowAllUsersModelBackend"
    with (
        override_settings(AUTHENTICATION_BACKENDS=[backend]),
        serving(dashboard(shop.app, authorize=authorize)) as url,
        httpx.Client(base_url=url) as web,
    ):
        assert_refused("without a session")
        web.cookies.set("sessionid", "x" * 32)
        assert_refused("with a forged session")
        log_in("customer")
        assert_refused("a customer")
        log_in("gone", is_staff=True, is_active=False)
        assert_refused("staff that is gone")
        log_in("support", is_staff=True)
        assert f"support {key} · read-only" in web.get(page).text
        assert "You may not see results" in web.get(page).text
        assert web.get(f"/forget?key={record}").status_code == 403
        log_in("operator", "delete_user", "view_user", is_staff=True)
        assert "object of 2" in web.get(page).text
        response = web.post("/forget", data=fields_of(web.get(f"/forget?key={record}")))
        assert "1 record forgotten" in response.text
    assert shop.charge.idempotency_record(order, 999) is None
    close(shop.app)
