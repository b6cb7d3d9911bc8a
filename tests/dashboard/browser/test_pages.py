"""The pages: accessible, narrow, dark, zoomed, by keyboard alone, without scripts."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.conftest import exhaustive_except
from tests.dashboard.browser.conftest import MARKS, OpenPage
from tests.dashboard.conftest import Site

pytestmark = MARKS

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"

#: CSS pixels of a page that is zoomed are fewer: 1280 at 200 % are 640.
VIEWS: dict[str, dict[str, Any]] = {
    "wide": {"viewport": {"width": 1280, "height": 800}},
    "narrow and dark": {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark"},
    "zoomed": {"viewport": {"width": 640, "height": 400}, "device_scale_factor": 2},
}


@pytest.fixture(scope="module")
def keys(shared_site: Site) -> dict[str, str]:
    """Records of several states, by what they are."""
    calls: dict[str, tuple[str, tuple[Any, ...]]] = {
        "completed": ("COMPLETED", ("shop.charge", "page-1", 999)),
        "failed": ("FAILED", ("shop.charge", "page-2", 13)),
        "hostile": ("COMPLETED", ("shop.charge", HOSTILE, 999)),
        "running": ("STARTED", ("shop.ship", "page-3")),
    }
    shared_site.hold("page-3")
    keys = {}
    for name, (state, call) in calls.items():
        shared_site.publish(*call)
        keys[name] = str(shared_site.wait_for(*call, state=state).key)
    keys["damaged"] = "shop.charge:" + "x" * 22
    shared_site.redis.set(f"idem:{keys['damaged']}", "Znewer", ex=300)
    return keys


def paths(keys: dict[str, str]) -> list[str]:
    """Returns the path of each page; those with all colours first."""
    records = [f"/records/{key}" for key in keys.values()]
    confirmations = [f"/forget?key={keys['running']}", "/forget?state=COMPLETED"]
    return ["/", "/records", "/doctor", *records, *confirmations, "/explain", "/workers"]


@pytest.mark.parametrize("view", exhaustive_except(VIEWS, "wide"))
def test_pages_are_accessible_and_fit(keys: dict[str, str], open_page: OpenPage, view: str) -> None:
    page = open_page(**VIEWS[view])
    # What a screen reader gets does not depend on the view; colours do.
    examined = {"wide": paths(keys), "narrow and dark": paths(keys)[:5], "zoomed": []}[view]
    for path in paths(keys):
        page.goto(path)
        expect(page.locator("h1")).to_be_visible()
        overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, path
        if path in examined:
            assert serious_violations(page) == [], path


def serious_violations(page: Page) -> list[tuple[str, list[str]]]:
    """Returns the rules of axe-core that the page violates, with the elements."""
    return [
        (violation["id"], [node["html"] for node in violation["nodes"]])
        for violation in Axe().run(page).response["violations"]
        if violation["impact"] in ("serious", "critical")
    ]


def test_an_inline_script_violates_the_policy(open_page: OpenPage) -> None:
    """Otherwise the console would prove nothing."""
    page = open_page(may_fail=("Content Security Policy", "Trusted", "requires 'TrustedScript'"))
    violations: list[str] = []
    page.on("console", lambda line: violations.append(line.text))

    page.evaluate("document.body.append(document.createElement('style'))")
    page.evaluate("document.querySelector('body > style').textContent = 'body { color: red }'")

    page.wait_for_timeout(0)
    assert "Content Security Policy" in " ".join(violations)


def test_hostile_text_stays_text(keys: dict[str, str], open_page: OpenPage) -> None:
    page = open_page(f"/records/{keys['hostile']}")

    expect(page.locator(".tree")).to_contain_text(HOSTILE)
    expect(page.locator("h1")).to_contain_text("onerror=alert(1)")
    assert page.locator("main img, main script").count() == 0


def test_everything_works_by_keyboard_alone(site: Site, open_page: OpenPage, order: str) -> None:
    site.publish("shop.charge", order, 13)
    key = site.wait_for("shop.charge", order, 13, state="FAILED").key
    page = open_page()

    page.keyboard.press("Tab")
    assert focused(page) == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"

    page.goto("/")
    follow(page, "Records")
    tab_to(page, "#state")
    page.keyboard.type("FAILED")
    follow(page, "Filter")
    assert "state=FAILED" in page.url
    follow(page, f"a[title='{key}']")
    follow(page, "Forget this record…")
    follow(page, "Forget 1 record")

    expect(page.locator("h1")).to_have_text("1 record forgotten")
    assert site.record("shop.charge", order, 13) is None


def follow(page: Page, target: str) -> None:
    """Tabs to a link or button, and presses Enter."""
    tab_to(page, target)
    with page.expect_navigation():
        page.keyboard.press("Enter")


def focused(page: Page) -> str:
    text: str = page.evaluate("document.activeElement.innerText?.trim() ?? ''")
    return text


def tab_to(page: Page, target: str) -> None:
    """Presses Tab until the element with this text, or of this selector, has a visible focus."""
    for _ in range(200):
        page.keyboard.press("Tab")
        script = "target => document.activeElement.matches(target)"
        is_selector = target[0] in "#.a" and ("[" in target or target[0] == "#")
        if page.evaluate(script, target) if is_selector else focused(page) == target:
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline == "solid", f"{target} has no visible focus"
            return
    raise AssertionError(f"Tab does not reach {target}")
