"""``celery idempotency dashboard`` as a process, and mounted in other applications."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest
from fastapi import FastAPI

from celery_idempotent.core.events.report import Repeats
from celery_idempotent.dashboard import asgi, server
from celery_idempotent.dashboard.presentation import FINDINGS
from celery_idempotent.operations.cli.dashboard import AUTH_VARIABLE
from tests.dashboard.conftest import dashboard, serving
from tests.monitoring.conftest import Shop
from tests.monitoring.shop import URL_VARIABLE
from tests.waiting import SOON, eventually

APP = "tests.monitoring.shop"
#: A shop in a Django project whose system checks cannot run twice in one process.
CHECKED_ONCE = """
import os
from django.core.checks import register

SECRET_KEY = "for tests"
os.environ["DJANGO_SETTINGS_MODULE"] = __name__  # before the app, whose loader is Django's then
from tests.monitoring.shop import app

runs = []

@register
def once(**options):
    runs.append(options)
    assert len(runs) == 1, "The system checks have run twice"
    return []
"""


@pytest.mark.core
def test_serves_the_app_and_ends_promptly_with_a_connection_open(shop: Shop) -> None:
    shop.charge.apply((42, 999))
    with (
        dashboard(APP, **{URL_VARIABLE: shop.url, AUTH_VARIABLE: "ann:secret"}) as (url, process),
        httpx.Client(base_url=url, auth=("ann", "secret"), timeout=SOON) as web,
    ):
        assert web.get("/", auth=("ann", "wrong")).status_code == 401
        assert "shop.charge" in web.get("/records").text
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON) in (0, -signal.SIGTERM)


def test_the_system_checks_of_django_run_once(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "checked_once.py").write_text(CHECKED_ONCE)
    environment = {URL_VARIABLE: shop.url, "PYTHONPATH": str(tmp_path)}
    with dashboard("checked_once", **environment) as (url, _):
        response = httpx.get(url, timeout=SOON)

    assert (response.status_code, "shop.charge" in response.text) == (200, True)


#: A link of another site.
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


def test_a_prefix_is_part_of_every_link(shop: Shop) -> None:
    options = ("--url-prefix", "/ops/jobs", "--read-only")
    with dashboard(APP, *options, **{URL_VARIABLE: shop.url}) as (url, _):
        assert url.endswith("/ops/jobs/")
        page = httpx.get(url[:-1], headers=LINK, follow_redirects=True, timeout=SOON).text

    links = re.findall(r'(?:href|src|action)="([^"]+)"', page)
    assert links
    assert [link for link in links if not link.startswith(("/ops/jobs/", "#", FINDINGS))] == []


class TestConnections:
    """Of the server that the command starts."""

    @contextlib.contextmanager
    def serving(self, shop: Shop, **limits: float) -> Iterator[str]:
        """Serves the dashboard with other limits; yields its URL."""
        application, http = asgi(shop.app, auth="ann:secret"), server.LimitedProtocol
        with patch.multiple(server, **limits), serving(application, http=http) as url:
            yield url

    def open(self, url: str, request: bytes) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", httpx.URL(url).port), SOON)
        client.sendall(request)
        return client

    def is_closed(self, client: socket.socket) -> bool:
        """Reads some of a response; returns whether the server has closed the connection."""
        try:
            return client.recv(100_000) == b""
        except ConnectionResetError:
            return True

    def test_that_send_no_request_do_not_block_others(
        self, shop: Shop, caplog: pytest.LogCaptureFixture
    ) -> None:
        with self.serving(shop, MAX_CONNECTIONS=5, _closed=Repeats()) as url:
            clients = [self.open(url, b"GET / HTTP/1.1\r\n") for _ in range(50)]

            assert httpx.get(url, auth=("ann", "secret"), timeout=SOON).status_code == 200
            assert all(map(self.is_closed, clients[:46]))
            for client in clients:
                client.close()
        assert caplog.messages.count("Closed a connection without a complete request") == 1

    def test_that_read_no_response_do_not_block_others(self, shop: Shop) -> None:
        user = b"host: localhost\r\nauthorization: Basic YW5uOnNlY3JldA=="
        request = b"GET /static/dashboard.css HTTP/1.1\r\n%s\r\n\r\n" % user * 1000

        def is_served() -> bool:
            try:
                return httpx.get(url, auth=("ann", "secret"), timeout=SOON).status_code == 200
            except httpx.TransportError:
                return False

        with self.serving(shop, MAX_CONNECTIONS=3) as url, contextlib.ExitStack() as stack:
            for _ in range(3):
                client = stack.enter_context(self.open(url, b""))
                client.settimeout(0.5)
                with contextlib.suppress(TimeoutError):
                    while True:  # until the server does not read either
                        client.sendall(request)
            eventually(is_served, "another client gets a response")

    @pytest.mark.parametrize("after", [b"", b"content-length: 9\r\n\r\nx"], ids=["head", "body"])
    @pytest.mark.parametrize("kept_alive", [False, True], ids=["first", "second"])
    def test_that_send_a_part_of_a_request_are_closed(
        self, shop: Shop, after: bytes, kept_alive: bool
    ) -> None:
        head = b"%s HTTP/1.1\r\nhost: localhost\r\nauthorization: Basic YW5uOnNlY3JldA==\r\n"
        first, second = head % b"GET /absent" + b"\r\n", head % b"POST /explain" + after
        with (
            self.serving(shop, REQUEST_SECONDS=0.2) as url,
            self.open(url, first + second if kept_alive else second) as client,
        ):
            assert not kept_alive or client.recv(12) == b"HTTP/1.1 404"
            eventually(lambda: self.is_closed(client), "it is closed")


class TestRefuses:
    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.0.0.2", "192.0.2.1", "shop.example"])
    def test_other_interfaces_without_a_user(self, shop: Shop, host: str) -> None:
        output = shop.celery("dashboard", "--host", host, code=2)

        (line,) = [line for line in output.splitlines() if line.startswith("Error:")]
        assert AUTH_VARIABLE in line

    def test_a_port_in_use(self, shop: Shop) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            output = shop.celery("dashboard", "--port", str(taken.getsockname()[1]), code=1)

        assert len(output.splitlines()) == 1
        assert "cannot listen on 127.0.0.1:" in output

    def test_a_missing_library(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in list(sys.modules):
            if name.startswith("celery_idempotent.dashboard"):
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr("celery_idempotent.dashboard", raising=False)
        monkeypatch.setitem(sys.modules, "itsdangerous", None)

        assert "pip install 'celery-idempotent[dashboard]'" in shop.celery("dashboard", code=1)


def test_is_mounted_in_fastapi(shop: Shop) -> None:
    shop.charge.apply((42, 999))
    dashboard = asgi(shop.app, auth="ann:secret")
    site = FastAPI(lifespan=lambda _: dashboard.router.lifespan_context(dashboard))
    site.mount("/ops", dashboard)

    with serving(site) as url, httpx.Client(base_url=url, auth=("ann", "secret")) as web:
        assert 'href="/ops/records/shop.charge%3A' in web.get("/ops/records").text
        assert web.get("/ops/static/dashboard.css").status_code == 200
        assert web.get("/ops/api/records").json()["records"]
        assert web.get("/ops/api/absent").json() == {"error": "Not Found"}
        search = web.get("/ops/search", params={"q": str(shop.charge.idempotency_key_of(42, 999))})
        assert search.headers["location"].startswith("/ops/records/")
