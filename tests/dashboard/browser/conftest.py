"""Fixtures: one shop with a worker, its dashboard, and a browser; a page for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.dashboard.conftest import Site, dashboard, open_site
from tests.dashboard.shop import URL_VARIABLE
from tests.servers.program import find_chromium
from tests.servers.redis_server import RedisServer

#: Of all tests in this folder.
MARKS = [pytest.mark.browser, pytest.mark.slow, pytest.mark.worker]
MARKS += [pytest.mark.xdist_group("browser")]
OpenPage = Callable[..., Page]
#: Longest wait of the browser, in milliseconds.
SOON_MS = 30_000


@pytest.fixture(scope="module")
def shared_site(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with open_site(server, tmp_path_factory.mktemp("site")) as site:
        environment = {URL_VARIABLE: server.url}
        with dashboard("tests.dashboard.shop", **environment) as (url, _):
            site.url = url.rstrip("/")
            yield site


@pytest.fixture
def site(shared_site: Site) -> Iterator[Site]:
    """The shop that all tests share; at the end, the orders that the test holds are released."""
    held = shared_site.held
    yield shared_site
    shared_site.release_all(but=held)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=SOON_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium())
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, site: Site) -> Iterator[OpenPage]:
    """Opens pages in contexts of their own; nothing may be wrong in any of them."""
    contexts: list[BrowserContext] = []
    problems: list[str] = []

    def open_page(path: str = "/", *, may_fail: tuple[str, ...] = (), **options: Any) -> Page:
        context = browser.new_context(base_url=site.url, **options)
        contexts.append(context)
        context.set_default_timeout(SOON_MS)
        page = context.new_page()

        def report(problem: str) -> None:
            if not any(text in problem for text in may_fail):
                problems.append(problem)

        # A violation of the Content-Security-Policy is an error in the console.
        page.on("console", lambda line: line.type == "error" and report(line.text))
        page.on("pageerror", lambda error: report(str(error)))
        page.on("dialog", lambda dialog: (report(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.goto(path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
