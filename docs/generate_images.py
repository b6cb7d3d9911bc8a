"""``make images`` writes docs/images/dashboard-*.png.

The records are those of a real worker, one process of which is killed. The hour before is made up.
"""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from PIL import Image
from playwright.sync_api import Browser, expect, sync_playwright

from celery_idempotent.dashboard import asgi, sampler
from celery_idempotent.dashboard.history import RANGES, STEP, History
from celery_idempotent.dashboard.protection import local_user
from tests.dashboard.conftest import Site, open_site, serving
from tests.servers.program import find_chromium
from tests.servers.redis_server import RedisServer

IMAGES = Path(__file__).parent / "images"

#: Width and height in CSS pixels, and the colours.
VIEWS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1180, "height": 760}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1180, "height": 760}, "color_scheme": "dark"},
    "narrow-light": {"viewport": {"width": 360, "height": 740}, "color_scheme": "light"},
    "narrow-dark": {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark"},
}
#: The images of the documentation.
IN_DOCUMENTATION = (
    *("overview-light", "overview-dark", "takeover-light", "doctor-light"),
    *("takeover-narrow-dark", "overview-narrow-light"),
)


class HourOfTraffic(History):
    """Begins with an hour of webhooks and their duplicates."""

    def __init__(self, file: str) -> None:
        super().__init__(file)
        steps = RANGES["1h"][0] // STEP
        dice = random.Random(4)
        counts = dict.fromkeys(("run", "replay", "conflict", "takeover", "refused"), 0)
        for step in range(steps):
            rate = 40 + 25 * math.sin(step / 17) + dice.uniform(0, 18)
            busy = 70 < step < 82
            counts["run"] += int(rate)
            counts["replay"] += int(rate / 6) + (dice.randrange(50, 90) if busy else 0)
            counts["conflict"] += dice.randrange(3) + (dice.randrange(8) if busy else 0)
            counts["takeover"] += step in (31, 74, 75, 78)
            counts["refused"] += step in (12, 76)
            now = time.time() - (steps - step) * STEP
            self.add(now, {"before": {"shop.charge": dict(counts)}})


def prepare(site: Site) -> str:
    """Makes records of every kind; returns the key of one that was taken over."""
    for number in range(40):
        site.publish("shop.charge", f"{4200 + number}", 13 if number in (7, 23) else 999)
        if number % 4 == 0:
            site.publish("shop.charge", f"{4200 + number}", 999)
    for number in range(12):
        site.publish("shop.ship", f"{4200 + number}")
    site.wait_for("shop.ship", "4211")
    orders = ("4250", "4251", "4252")
    for order in orders:
        site.hold(order)
        site.publish("shop.ship" if order == "4250" else "shop.charge", *call(order))
    record = site.wait_for("shop.ship", "4250", state="STARTED")
    time.sleep(3)
    os.kill(int(record.worker.rpartition("/")[2]), signal.SIGKILL)
    site.wait_for("shop.ship", "4250", state="STARTED", attempt=2)
    return str(record.key)


def call(order: str) -> tuple[Any, ...]:
    """Returns the arguments of an order that is held."""
    return (order,) if order == "4250" else (order, 999)


def photograph(browser: Browser, url: str, key: str, folder: Path) -> None:
    """Writes an image of each page in each view."""
    pages = {
        "overview": "/",
        "takeover": f"/records/{key}",
        "doctor": "/doctor",
        "records": "/records",
        "workers": "/workers",
        "forget": "/forget?state=FAILED",
    }
    for view, options in VIEWS.items():
        context = browser.new_context(base_url=url, **options)
        page = context.new_page()
        for name, path in pages.items():
            page.goto(path)
            if name in ("overview", "takeover", "workers", "records", "doctor"):
                expect(page.locator("#connection")).to_have_text("live")
            if name == "overview":
                expect(page.locator(".tiles")).to_contain_text("1 worker")
            file = folder / f"dashboard-{name}-{view}.png"
            page.screenshot(path=file)
            # A palette of 128 colours is enough for a page, and a third of the size.
            with Image.open(file) as image:
                image.convert("RGB").quantize(128).save(file, optimize=True)
        context.close()


def main(folder: Path) -> None:
    """Writes all images to `folder`, or those of the documentation to docs/images."""
    with (
        mock.patch.object(sampler, "History", HourOfTraffic),
        tempfile.TemporaryDirectory() as temporary,
        RedisServer.start() as server,
        open_site(server, Path(temporary), concurrency=4) as site,
        serving(asgi(site.app, authorize=local_user)) as url,
        sync_playwright() as playwright,
    ):
        key = prepare(site)
        browser = playwright.chromium.launch(executable_path=find_chromium())
        target = Path(temporary) if folder == IMAGES else folder
        photograph(browser, url, key, target)
        browser.close()
        if folder == IMAGES:
            folder.mkdir(exist_ok=True)
            for name in IN_DOCUMENTATION:
                file = f"dashboard-{name}.png"
                (folder / file).write_bytes((target / file).read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
