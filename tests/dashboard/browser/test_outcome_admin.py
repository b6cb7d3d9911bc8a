"""The admin of outcomes in a browser: forget asks first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.dashboard.browser.conftest import SOON_MS
from tests.http.drivers.web_server import WebServer
from tests.servers.redis_server import RedisServer

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.xdist_group("browser")]


@pytest.fixture
def admin_site(server: RedisServer, tmp_path: Path) -> Iterator[WebServer]:
    environment = {
        "DATABASE": f"sqlite:///{tmp_path}/site.db",
        "REDIS": f"{server.url[:-1]}1",
        "DJANGO_ALLOW_ASYNC_UNSAFE": "1",  # the site is set up in uvicorn's event loop
    }
    site = WebServer("tests.sql.admin_site:application()", environment)
    yield site
    site.stop()


def test_forget_asks_first(browser: Browser, admin_site: WebServer) -> None:
    dialogs: list[str] = []
    with browser.new_context(base_url=admin_site.url) as context:
        context.set_default_timeout(SOON_MS)
        page = context.new_page()
        page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
        page.goto("/login")
        page.goto("/admin/celery_idempotent/outcome/")
        links = page.get_by_role("link", name="shop.charge:")
        expect(links).to_have_count(2)
        links.first.click()
        expect(page.get_by_role("cell", name="COMPLETED")).to_have_count(2)
        page.get_by_role("button", name="Forget…").click()
        page.get_by_role("link", name="Keep").click()
        expect(links).to_have_count(2)
        links.first.click()
        page.get_by_role("button", name="Forget…").click()
        page.get_by_role("button", name="Forget").click()
        expect(page.get_by_text("1 outcome forgotten")).to_be_visible()
        expect(links).to_have_count(1)
    assert dialogs == [], "a hostile task id was executed"
