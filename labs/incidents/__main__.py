"""``make incidents``: stages incidents, and prints when each place reports them, and how.

Each incident has a worker with four processes, the broker, the records and the ledger on a server
each, a Prometheus with the rules of docs/alerts.yml, the command health again and again, and the
dashboard's process. The rules run without their ``for``, which the table names, and the broker
counts as unavailable after 10 seconds instead of 120.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import yaml

from labs.incidents.causes import AWAY, INCIDENTS, Incident, Scene
from tests.dashboard.conftest import REPOSITORY, dashboard
from tests.servers.program import Ports
from tests.servers.prometheus import Prometheus
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually
from tests.worker.harness import FAST_REDELIVERY, Shop
from tests.worker.shop import SETTINGS_VARIABLE
from tests.worker.tasks import pack

APP = "tests.worker.shop"
RULES = (REPOSITORY / "docs" / "alerts.yml").read_text("utf-8")
#: How long an alert's condition must last.
(GROUP,) = yaml.safe_load(RULES)["groups"]
LASTING = {rule["alert"]: rule["for"] for rule in GROUP["rules"] if "for" in rule}
#: Findings about the tasks of the tests, and about servers without a disk.
KNOWN = [
    *("not-canonical", "reject-on-worker-lost", "disabled", "fail-open", "store-result"),
    *("ignore-result", "persistence", "replicas", "recovery"),
]
#: Seconds between two looks; of looking at a place, at most; of counting the log, at least.
INTERVAL, LIMIT, COUNTED = 0.2, 60.0, AWAY + 5.0
#: What the overview says: its alerts, tiles, findings and bad rows.
SAYINGS = re.compile(
    r'<p class="problem".*?</p>|<li class="tile.*?</li>|<h3>.*?</h3>|<tr class="bad">.*?</tr>', re.S
)
HEAD = re.compile(r"^\[[\d:, -]+: (\w+)/[^]]+\] ", re.M)


class Place(threading.Thread):
    """Looks at one place again and again, for texts that it did not have before the incident."""

    def __init__(self, expected: str, look: Callable[[], list[str]]) -> None:
        super().__init__(daemon=True)
        self._expected, self._look, self._before = re.compile(expected), look, set(look())
        self._since = time.monotonic()
        self._others: dict[str, None] = {}
        self.cell = ""

    def look_from(self, moment: float) -> None:
        """Begins to look."""
        self._since = moment
        self.start()

    def run(self) -> None:
        """Looks until it finds what is expected."""
        while not self.cell and time.monotonic() < self._since + LIMIT:
            new = [text for text in self._look() if text not in self._before]
            seconds = time.monotonic() - self._since
            self._others |= dict.fromkeys(new)
            if found := next(filter(self._expected.search, new), ""):
                self.cell = f"{seconds:.1f} s: {found}"
            time.sleep(INTERVAL)
        self.cell = self.cell or f"– (new: {'; '.join(self._others) or 'nothing'})"


def alerts(prometheus: Prometheus) -> list[str]:
    """Returns the alerts with their summaries."""
    texts = []
    for alert in prometheus.alerts():
        name = alert["labels"]["alertname"]
        later = f", with its `for` {LASTING[name]} later" if name in LASTING else ""
        texts.append(f"{name} ({alert['state']}{later}): {alert['annotations']['summary']}")
    return texts


def findings(environment: dict[str, str]) -> list[str]:
    """Returns the findings of the command health."""
    command = [sys.executable, "-m", "celery", "-A", APP, "idempotency", "health", "--json"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **environment}, capture_output=True, check=False
    )
    return [f"{each['name']}: {each['what']}" for each in json.loads(done.stdout)["findings"]]


def overview(url: str) -> list[str]:
    """Returns what the first page of the dashboard says."""
    found = SAYINGS.findall(httpx.get(url, timeout=30).text)
    return [" ".join(html.unescape(re.sub(r"<[^>]*>", " ", each)).split()) for each in found]


def stage(incident: Incident, directory: Path) -> list[str]:
    """Stages an incident; returns the cells of its row."""
    with ExitStack() as stack:
        broker, records, ledger = (stack.enter_context(RedisServer.start()) for _ in range(3))
        (port,) = stack.enter_context(Ports(1)).numbers
        settings: dict[str, Any] = {
            "broker_url": broker.url,
            "result_backend": ledger.url,
            "shop_ledger": f"{ledger.url.rpartition('/')[0]}/1",
            "idempotency_redis_url": records.url,
            "idempotency_metrics": f"127.0.0.1:{port}",
            "broker_transport_options": FAST_REDELIVERY,
            "idempotency_doctor_ignore": KNOWN,
        }
        shop = stack.enter_context(Shop(ledger, directory, **settings))
        environment = {SETTINGS_VARIABLE: json.dumps(shop.settings)}
        worker = shop.start_worker(concurrency=4)
        for number in range(8):
            pack.delay(f"before-{number}").get(timeout=30)
        rules = re.sub(r"^ +for: .*\n", "", RULES, flags=re.M).replace("> 120\n", "> 10\n")
        prometheus = stack.enter_context(Prometheus.start(f"127.0.0.1:{port}", rules))
        url, _ = stack.enter_context(dashboard(APP, **environment))
        prometheus.wait_for_evaluation()
        eventually(lambda: "… findings" not in overview(url), "the dashboard has findings")
        cause = incident.prepare(Scene(shop, broker, records))
        start = len(worker.logs())

        def new_log() -> str:
            return HEAD.sub(r"[\1] ", worker.logs()[start:])

        places = [
            Place(incident.log, lambda: new_log().splitlines()),
            Place(incident.alert, lambda: alerts(prometheus)),
            Place(incident.health, lambda: findings(environment)),
            Place(incident.dashboard, lambda: overview(url)),
        ]
        began_at = time.monotonic()
        for place in places:
            place.look_from(began_at)
        cause()
        if incident is INCIDENTS["away"]:
            time.sleep(max(0.0, began_at + AWAY - time.monotonic()))
            records.restart()
        for place in places:
            place.join()
        time.sleep(max(0.0, began_at + COUNTED - time.monotonic()))
        log = new_log()
        severe = len(re.findall(r"^\[(?:WARNING|ERROR|CRITICAL)\]", log, re.M))
        tracebacks = len(re.findall("^Traceback", log, re.M))
        worker.kill("SIGCONT")
    lines = f"{log.count(chr(10))}; {severe} of WARNING or above; {tracebacks} tracebacks"
    cells = [place.cell.replace("|", "¦")[:280] for place in places]
    return [incident.title, cells[0], lines, *cells[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m labs.incidents", description=__doc__)
    parser.add_argument("only", nargs="*", choices=[[], *INCIDENTS], help="all by default")
    print("| incident | log | its lines | alert | health | dashboard |\n|---|---|---|---|---|---|")
    for name in parser.parse_args().only or INCIDENTS:
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary, name)
            directory.mkdir()
            with redirect_stdout(StringIO()):  # the shop prints the logs of its worker
                cells = stage(INCIDENTS[name], directory)
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
