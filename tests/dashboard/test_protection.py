"""Users and rights, hosts, forged requests, headers, escaped output, hidden results."""

from __future__ import annotations

import itertools
import json
from typing import Any
from unittest.mock import patch
from urllib.parse import quote

import httpx
import pytest
from cryptography.fernet import Fernet

from celery_idempotent.core.events.report import Repeats
from celery_idempotent.dashboard import Access, asgi, protection
from celery_idempotent.dashboard.context import Context
from celery_idempotent.dashboard.protection import HEADERS, LOOPBACK_HOSTS, MAX_BODY
from celery_idempotent.errors import SettingsError
from tests.conftest import exhaustive_except
from tests.dashboard.conftest import Open, serving
from tests.monitoring.conftest import Shop
from tests.monitoring.shop import make_app
from tests.waiting import eventually

PAGES = ("/", "/records", "/records/x", "/search?q=x", "/forget?state=FAILED", "/explain",
         "/workers", "/doctor", "/static/dashboard.css", "/absent",
         "/api/records", "/api/records/x", "/api/stats", "/api/doctor", "/api/workers")  # fmt: skip


class TestUsers:
    def test_every_path_requires_the_user(self, open_dashboard: Open) -> None:
        web = open_dashboard(auth="ann:secret")

        for path in PAGES:
            response = web.get(path)
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"].startswith("Basic ")
        wrong = (("ann", "wrong"), ("bob", "secret"), ("ann", ""), ("ann", "secret2"))
        for credentials in wrong:
            assert web.get("/records", auth=credentials).status_code == 401
        for header in ("Basic", "Basic ?", "Bearer YW5uOnNlY3JldA==", "é"):
            assert web.get("/", headers={"authorization": header.encode()}).status_code == 401

    @patch.multiple(protection, WRONG_PASSWORD_SECONDS=3.0, _refusals=Repeats())
    def test_guesses_of_the_password_are_slow(
        self, open_dashboard: Open, caplog: pytest.LogCaptureFixture
    ) -> None:
        web = open_dashboard(auth="ann:secret")

        for number in range(protection.MAX_REFUSALS):
            with pytest.raises(httpx.ReadTimeout):  # a guesser does not wait for the response
                web.get("/records", auth=("ann", f"guess-{number}"), timeout=0.1)
        right = [web.get("/records", auth=("ann", "secret")).status_code for _ in range(9)]

        assert right == [429] * 9
        eventually(lambda: web.get("/records", auth=("ann", "secret")).status_code == 200)

        lines = [line for line in caplog.messages if "password" in line]
        assert lines == ["Refused a wrong user or password from 127.0.0.1"]

    def test_the_credentials_may_be_any_text(self, open_dashboard: Open) -> None:
        web = open_dashboard(auth="änn:pass:wörd")

        assert web.get("/records", auth=("änn", "pass:wörd")).status_code == 200

    def test_a_callable_decides(self, open_dashboard: Open) -> None:
        async def authorize(connection: Any) -> Access | None:
            user = connection.headers.get("x-user")
            return Access(user) if user else None

        web = open_dashboard(authorize=authorize)

        assert web.get("/records").status_code == 403
        assert "bea · read-only" in web.get("/records", headers={"x-user": "bea"}).text

    def test_a_user_must_be_named(self, shop: Shop) -> None:
        with pytest.raises(SettingsError, match="needs one of auth"):
            asgi(shop.app)
        with pytest.raises(SettingsError, match="USER:PASSWORD"):
            asgi(shop.app, auth="ann")
        with pytest.raises(SettingsError, match="url_prefix is not a path"):
            asgi(shop.app, auth="ann:secret", url_prefix="x")


def fetched(site: str, mode: str, destination: str) -> dict[str, str]:
    """Returns what a browser says of a request."""
    return {"sec-fetch-site": site, "sec-fetch-mode": mode, "sec-fetch-dest": destination}


class TestRequestsOfOtherSites:
    def test_a_host_is_never_part_of_a_redirect(self, open_dashboard: Open) -> None:
        web, evil = open_dashboard(url_prefix="/ops"), {"host": "evil.example"}

        assert web.get("/ops", headers=evil).headers["location"] == "/ops/"
        assert web.get("/ops/records/", headers=evil).status_code == 404

    def test_a_name_that_was_pointed_to_the_loopback_is_refused(self, open_dashboard: Open) -> None:
        web = open_dashboard(allowed_hosts=LOOPBACK_HOSTS)

        for host in ("evil.example", "127.0.0.1.evil.example", "", "[", "x:1"):
            assert web.get("/records", headers={"host": host}).status_code == 400, host
        for host in ("localhost", "LOCALHOST:5556", "127.0.0.1:80", "[::1]:5556"):
            assert web.get("/records", headers={"host": host}).status_code == 200, host

    def test_forms_of_other_sites_are_refused(self, web: httpx.Client) -> None:
        form, origin = {"task": "shop.charge", "args": "[1, 2]"}, str(web.base_url).rstrip("/")
        for headers in (
            *({"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}),
            *({"origin": "https://evil.example"}, {"origin": "null"}),
        ):
            response = web.post("/explain", data=form, headers=headers)
            assert (response.status_code, "another site" in response.text) == (403, True)
        own = {"sec-fetch-site": "same-origin", "origin": "https://shop.example"}
        for headers in ({"origin": origin}, own):
            assert web.post("/explain", data=form, headers=headers).status_code == 200

    def test_pages_of_other_sites_reach_nothing(self, web: httpx.Client) -> None:
        for headers in (
            fetched("cross-site", "no-cors", "image"),
            fetched("same-site", "cors", "empty"),
            fetched("cross-site", "navigate", "iframe"),
            {"origin": "https://evil.example"},
        ):
            for path in PAGES:
                with web.stream("GET", path, headers=headers) as response:
                    assert response.status_code == 403, path
                    assert "another site" in response.read().decode()

    def test_other_sites_may_link_to_pages_that_are_cheap(self, web: httpx.Client) -> None:
        link = fetched("cross-site", "navigate", "document")
        reached = set()
        for path in PAGES:
            with web.stream("GET", path, headers=link) as response:
                if response.status_code != 403:
                    reached.add(path)

        assert reached == {"/", "/records", "/records/x", "/explain", "/workers", "/doctor"}
        assert web.get("/records?state=FAILED", headers=link).status_code == 200


def assert_protected(response: httpx.Response) -> None:
    headers = response.headers
    assert {name: headers.get(name) for name in HEADERS} == HEADERS, response.url
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store"


def test_every_response_has_the_security_headers(web: httpx.Client) -> None:
    for path in ("/", "/absent", "/records/x", "/api/stats", "/static/dashboard.js"):
        assert_protected(web.get(path))


class TestDefects:
    """A defect of the dashboard, or of a callable of the user."""

    def test_the_response_has_the_security_headers(
        self, web: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(Context, "page", None)

        for path in ("/records", "/api/records"):
            # uvicorn closes the connection after an error.
            response = web.get(path, headers={"connection": "close"})
            assert response.status_code == 500
            assert_protected(response)
            assert "NoneType" not in response.text
        logged = "'NoneType' object is not callable"
        eventually(lambda: caplog.text.count(logged) >= 2, "the server logs both")

    def test_also_where_authorize_raises(self, open_dashboard: Open) -> None:
        def authorize(connection: Any) -> Access:
            raise ZeroDivisionError

        response = open_dashboard(authorize=authorize).get("/")

        assert response.status_code == 500
        assert_protected(response)


IN_SHORT = {"digits", "NUL", "surrogate", "key of NUL", "cursor in range", "deep JSON"}
TEXTS = {
    "digits": "9" * 5_000,
    "long": "x" * 30_000,
    "many digits of Unicode": "٣" * 500,
    "NUL": "a\0b",
    "percent": "%",
    "surrogate": "\ud800",
    "control": "\x1b[31m\r\n\x85\u2028\u202e",
    "glob": "*" * 100 + "[^\\",
    "key": "shop.charge:" + "A" * 22,
    "key of a surrogate": "%ED%A0%80:" + "A" * 22,
    "key of NUL": "%00:~" + "A" * 22,
    "long key": "x" * 30_000 + ":" + "A" * 22,
    "cursor": "9999.9999.99999999999999999999",
    "cursor in range": "0.9999.18446744073709551615",
    "negative": "-1",
    "float": "1e999",
    "JSON": '{"a": [1]}',
    "deep JSON": "[" * 5_000,
    "deep, closed JSON": "[" * 700 + "]" * 700,
    "JSON of digits": "[" + "9" * 5_000 + "]",
    "JSON of no numbers": "[NaN, Infinity, 1e999, -0.0]",
    "JSON of a surrogate": '["\\ud800"]',
    "object of a surrogate": '{"order_id": "\\ud800", "amount": "\\u0000"}',
    "wrong types": '[{"a": null}, [], 1.5]',
}
each_text = pytest.mark.parametrize("name", exhaustive_except(TEXTS, *IN_SHORT))
QUERIES = {
    "records": ("state", "task", "older_than", "label", "limit", "cursor"),
    "api/records": ("state", "task", "older_than", "label", "limit", "cursor"),
    "search": ("q",),
    "forget": ("key", "state", "task", "older_than", "label"),
    "explain": ("task",),
    "": ("x",),
    "api/stats": ("x",),
}


class TestMalformedInput:
    @each_text
    def test_in_a_query_or_a_path_is_no_defect(self, web: httpx.Client, name: str) -> None:
        given = quote(TEXTS[name], safe="", errors="surrogatepass")
        paths = [f"/{page}?{field}={given}" for page, fields in QUERIES.items() for field in fields]
        paths += [f"/{folder}/{given}" for folder in ("records", "api/records", "static", "x")]

        for path in paths:
            response = web.get(path)
            assert response.status_code < 500, path[:80]
            assert_protected(response)

    @each_text
    def test_in_a_body_is_no_defect(self, web: httpx.Client, name: str) -> None:
        text = TEXTS[name]
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            value = json.dumps(text)
        else:
            value = text
        fields = ("task", "args", "kwargs", "key", "task_id")
        candidates = (value, text, json.dumps(text), f"[{value}]", f'{{"a": {value}}}')
        bodies = [text, f"[{text}]"]
        for field, candidate in itertools.product(fields, candidates):
            bodies.append(f'{{"task": "shop.charge", "args": [1, 2], "{field}": {candidate}}}')
            bodies.append(f'{{"task": "shop.tidy", "{field}": {candidate}}}')
        requests = [("/api/explain", body) for body in bodies]
        tasks = ("shop.charge", "shop.tidy")
        for task, field in itertools.product(tasks, (*fields, "token", "force")):
            form = f"task={task}&{field}=" + quote(text, safe="", errors="surrogatepass")
            requests += [("/explain", form), ("/forget", form)]

        for path, body in requests:
            response = web.post(path, content=body.encode(errors="surrogatepass"))
            assert response.status_code < 500, (path, body[:200])
            assert_protected(response)

    def test_is_refused_with_a_reason(self, web: httpx.Client) -> None:
        assert web.get(f"/api/records?limit={'9' * 5_000}").status_code == 400
        for body in (b"[" * 100_000, b'{"a": ' * 20_000, b"9" * 5_000, b"\xff"):
            response = web.post("/api/explain", content=body)
            assert (response.status_code, list(response.json())) == (400, ["error"])
            form = {"task": "shop.charge", "args": body[:20_000]}
            assert web.post("/explain", data=form).status_code == 400

    def test_in_headers_is_no_defect(self, open_dashboard: Open) -> None:
        cases: list[dict[str, str | bytes]] = [
            {"host": "x" * 5_000},
            {"authorization": "Basic " + "A" * 5_000},
            {"x-csrf-token": "9" * 5_000, "if-match": '"9-9"'},
            {"x-csrf-token": b"\xff.\xff.\xff", "cookie": b"\xff=\xff"},
            {"sec-fetch-site": b"\xff", "origin": b"\xff"},
        ]
        for web in (open_dashboard(auth="ann:secret"), open_dashboard(allowed_hosts={"shop"})):
            for headers, method in itertools.product(cases, ("GET", "DELETE", "FOO")):
                response = web.request(method, "/api/records/x", headers=headers)
                assert response.status_code < 500, headers
                assert_protected(response)


def test_a_large_form_is_refused(web: httpx.Client) -> None:
    assert web.post("/explain", content=b"x" * (MAX_BODY + 1)).status_code == 413
    form = {"task": "shop.charge", "args": "[1, 2]", **{f"f{n}": "x" for n in range(50)}}
    assert web.post("/explain", data=form).status_code == 400


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


def test_text_from_outside_is_escaped(shop: Shop, open_dashboard: Open) -> None:
    class HostileError(Exception):
        pass

    def answer(text: str) -> dict[str, str]:
        return {text: text}

    def fail(text: str) -> None:
        raise HostileError(text)

    for name, body in ((f"answer{HOSTILE}", answer), (f"fail{HOSTILE}", fail)):
        task = shop.add_task(body, name, replay_errors=(HostileError,), label="{text}")
        task.apply((HOSTILE,), task_id=HOSTILE)
    web = open_dashboard(authorize=lambda _: Access(HOSTILE, forget=True, results=True))
    keys = [record["key"] for record in web.get("/api/records").json()["records"]]
    paths = ["/", "/records", "/doctor", f"/search?q={HOSTILE}", "/forget?state=FAILED",
             f"/records?task={HOSTILE}&older_than={HOSTILE}", "/records?older_than=0s",
             f"/explain?task={HOSTILE}", f"/forget?key={quote(keys[0])}",
             *(f"/records/{quote(key, safe='')}" for key in (*keys, HOSTILE))]  # fmt: skip

    for path in paths:
        page = web.get(path).text
        assert "<script>" not in page, path
        assert "<img src=x" not in page, path
    assert len(keys) == 2
    assert "&lt;script&gt;alert(1)" in web.get("/records").text


class TestResults:
    def test_are_shown_to_users_with_the_right_only(self, shop: Shop, open_dashboard: Open) -> None:
        shop.pack.apply((3, 27))
        shop.charge.apply((42, 13))
        secret = "x" * 27
        texts = {
            shop.pack.idempotency_key_of(3, 27): secret,
            shop.charge.idempotency_key_of(42, 13): "DeclinedError",
        }
        may_not = open_dashboard(authorize=lambda _: Access("bea", forget=True))
        may = open_dashboard(authorize=lambda _: Access("ann", results=True))

        for key, text in texts.items():
            for path in (f"/records/{key}", f"/api/records/{key}"):
                assert text in may.get(path).text
                assert text not in may_not.get(path).text
        for path in ("/", "/records", "/api/records", "/forget?state=COMPLETED"):
            assert secret not in may_not.get(path).text

    def test_encrypted_ones_need_the_keys_too(self, shop: Shop, web: httpx.Client) -> None:
        def whisper() -> str:
            return "the secret"

        shop.app.conf.idempotency_encryption_keys = [Fernet.generate_key().decode()]
        task = shop.add_task(whisper, "shop.whisper")
        task.apply()
        path = f"/records/{task.idempotency_key_of()}"
        without_keys = Shop(make_app(shop.url), shop.client)
        without_keys.add_task(whisper, "shop.whisper")

        assert "the secret" in web.get(path).text
        with serving(asgi(without_keys.app, auth="ann:secret")) as url:
            page = httpx.get(url + path, auth=("ann", "secret")).text
        without_keys.app.close()
        assert "the secret" not in page
        assert "Not available" in page

    def test_an_offloaded_one_is_not_fetched(
        self, shop: Shop, web: httpx.Client, tmp_path: Any
    ) -> None:
        task = shop.add_offloading_task(tmp_path)
        task.apply()

        page = web.get(f"/records/{task.idempotency_key_of()}").text
        assert "stored outside of Redis" in page
        assert "x" * 1_000 not in page
