"""Pages that update themselves: leases, deaths, takeovers, lost connections."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

from playwright.sync_api import Page, expect

from tests.dashboard.browser.conftest import MARKS, OpenPage
from tests.dashboard.conftest import Site, dashboard
from tests.dashboard.shop import URL_VARIABLE
from tests.servers.program import Ports

pytestmark = MARKS


def mark(page: Page) -> None:
    """Marks the document, so that a reload would be noticed."""
    page.evaluate("window.marked = true")
    expect(page.locator("#connection")).to_have_attribute("data-state", "on")


def is_marked(page: Page) -> bool:
    marked: bool = page.evaluate("window.marked === true")
    return marked


def start(site: Site, *call: Any) -> Any:
    """Publishes a call, which waits until its order is released; returns its record."""
    site.hold(call[1])
    site.publish(*call)
    return site.wait_for(*call, state="STARTED")


def test_a_lease_counts_down_and_the_end_shows(site: Site, open_page: OpenPage, order: str) -> None:
    page = open_page(f"/records/{start(site, 'shop.charge', order, 999).key}")
    mark(page)
    countdown = page.locator(".facts .countdown")
    expect(countdown).to_have_text(re.compile(r"in \d+ (s|min)"))

    first = countdown.inner_text()
    expect(countdown).not_to_have_text(first)
    site.release(order)

    expect(page.locator("h1")).to_contain_text("COMPLETED")
    expect(page.locator(".tree")).to_contain_text("EUR")
    expect(page.locator("#announcement")).to_contain_text("COMPLETED")
    assert is_marked(page)


def test_a_death_and_its_takeover_appear(site: Site, open_page: OpenPage, order: str) -> None:
    record = start(site, "shop.renew", order)
    overview, page = open_page(), open_page(f"/records/{record.key}")
    mark(overview)
    mark(page)
    row = overview.locator("#running ~ table tbody tr").filter(has_text="shop.renew")
    expect(row).to_contain_text("STARTED")

    site.worker.freeze()
    try:
        expect(page.locator("h1")).to_contain_text("LEASE EXPIRED")
        expect(row).to_contain_text("LEASE EXPIRED")
        expect(overview.locator(".tile-bad")).to_contain_text("1 lease expired")
    finally:
        site.worker.resume()
    os.kill(int(record.worker.rpartition("/")[2]), signal.SIGKILL)

    expect(page.locator(".timeline")).to_contain_text("Taken over by another execution")
    expect(page.locator("h1")).to_contain_text("STARTED")
    expect(row).to_contain_text("takeover")
    site.release(order)
    expect(page.locator("h1")).to_contain_text("COMPLETED")
    expect(row).to_have_count(0)
    takeovers = overview.locator(".chart", has_text="Takeovers").locator("strong")
    expect(takeovers).to_have_text("1")
    assert is_marked(page)
    assert is_marked(overview)


def test_a_connection_that_drops_comes_back(site: Site, open_page: OpenPage, order: str) -> None:
    key = start(site, "shop.charge", order, 999).key
    ports = Ports(1)
    (port,) = ports.numbers
    app, environment = "tests.dashboard.shop", {URL_VARIABLE: site.app.conf.broker_url}
    with dashboard(app, port=port, **environment) as (url, _):
        page = open_page(f"{url}records/{key}", may_fail=("ERR_",))
        mark(page)
    expect(page.locator("#connection")).to_have_text("reconnecting…")
    site.release(order)
    site.wait_for("shop.charge", order, 999)
    with dashboard(app, port=port, **environment):
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator("h1")).to_contain_text("COMPLETED")
        assert is_marked(page)
    ports.stop()


def test_an_update_keeps_focus_and_folds(site: Site, open_page: OpenPage, order: str) -> None:
    site.publish("shop.charge", order, 999)
    key = site.wait_for("shop.charge", order, 999).key
    page = open_page(f"/records/{key}")
    mark(page)
    page.locator("summary", has_text="paid").click()
    page.get_by_role("link", name="Forget this record").focus()

    site.redis.pexpire(f"idem:{key}", 40_000)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    expect(page.locator(".timeline")).to_contain_text(re.compile("in [34]\\d s"))
    assert page.evaluate("document.activeElement.innerText") == "Forget this record…"
    expect(page.locator(".tree")).not_to_contain_text("EUR", use_inner_text=True)


def test_a_page_in_the_background_is_not_updated(open_page: OpenPage) -> None:
    page = open_page()
    mark(page)
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.locator("#connection")).to_have_text("not live")
    page.evaluate("Object.defineProperty(document, 'hidden', {value: false})")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.locator("#connection")).to_have_text("live")
