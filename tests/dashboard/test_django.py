"""The dashboard beside Django, behind a real web server: staff, and permissions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.dashboard.conftest import fields_of
from tests.http.drivers.web_server import WebServer
from tests.monitoring.conftest import Shop
from tests.monitoring.shop import URL_VARIABLE
from tests.servers.redis_server import RedisServer


@pytest.fixture(scope="module")
def site(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    database = tmp_path_factory.mktemp("django") / "site.sqlite3"
    environment = {URL_VARIABLE: server.url, "DATABASE": str(database)}
    site = WebServer("tests.dashboard.django_site:application", environment)
    yield site
    site.stop()


@pytest.fixture
def key(shop: Shop) -> str:
    """The key of a record with a result."""
    shop.charge.apply((42, 999))
    return str(shop.charge.idempotency_key_of(42, 999))


@contextmanager
def browser(site: WebServer, name: str | None) -> Iterator[httpx.Client]:
    """Yields a client with the session of a user."""
    with httpx.Client(base_url=site.url, timeout=60) as client:
        if name is not None:
            assert client.get(f"/login/{name}").status_code == 200
        yield client


@pytest.mark.parametrize("user", [None, "customer", "gone"])
def test_others_than_staff_are_refused(site: WebServer, key: str, user: str | None) -> None:
    with browser(site, user) as client:
        assert client.get("/ops/records").status_code == 403
        assert client.get(f"/ops/api/records/{key}").status_code == 403


def test_staff_without_permissions_sees_records_only(site: WebServer, key: str) -> None:
    with browser(site, "support") as client:
        page = client.get(f"/ops/records/{key}").text

        assert "support · read-only" in page
        assert "You may not see results" in page
        assert client.get(f"/ops/forget?key={key}").status_code == 403


def test_permissions_give_further_rights(site: WebServer, shop: Shop, key: str) -> None:
    with browser(site, "operator") as client:
        assert "object of 2" in client.get(f"/ops/records/{key}").text

        response = client.post("/ops/forget", data=fields_of(client.get(f"/ops/forget?key={key}")))

        assert "1 record forgotten" in response.text
        assert shop.charge.idempotency_record(42, 999) is None
