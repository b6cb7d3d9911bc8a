"""Starts a private Prometheus that scrapes one address, and evaluates rules.

    with Prometheus.start("127.0.0.1:9808", rules) as prometheus:
        prometheus.fired()

It listens on the loopback interface only, and ends with its owner.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from tests.servers.program import Ports, Program, ServerError, Stoppable
from tests.waiting import POLL_INTERVAL, SOON, eventually


def find_prometheus() -> bool:
    """Returns whether Prometheus and promtool are installed."""
    return bool(shutil.which("prometheus") and shutil.which("promtool"))


class Prometheus(Stoppable):
    """A running Prometheus, returned by `start`. The end of a `with` block stops it."""

    #: Seconds between two scrapes, and between two evaluations of the rules.
    INTERVAL = 1

    def __init__(self, program: str, target: str, rules: str) -> None:
        ports = Ports(1)
        (port,) = ports.numbers
        self._url = f"http://127.0.0.1:{port}"
        directory = Path(tempfile.mkdtemp(prefix="prometheus-"))
        interval = f"{self.INTERVAL}s"
        config = {
            "global": {"scrape_interval": interval, "evaluation_interval": interval},
            "rule_files": ["rules.yml"],
            "scrape_configs": [{"job_name": "shop", "static_configs": [{"targets": [target]}]}],
        }
        (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        (directory / "rules.yml").write_text(rules)
        command = [
            *(program, f"--config.file={directory / 'prometheus.yml'}"),
            *(f"--storage.tsdb.path={directory / 'data'}", "--log.level=warn"),
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        self._program = Program(directory, "prometheus", command)
        self._discard = weakref.finalize(self, _discard, ports, self._program)
        self._program.launch()
        eventually(self._is_ready, "Prometheus is ready")

    @classmethod
    def start(cls, target: str, rules: str) -> Prometheus:
        """Starts a server and returns when it is ready.

        Args:
            target: the address to scrape, without /metrics.
            rules: the text of a rule file.
        """
        program = shutil.which("prometheus")
        if program is None:
            raise ServerError("Prometheus is not installed: apt-get install prometheus")
        return cls(program, target, rules)

    def stop(self) -> None:
        """Stops the server and removes its directory."""
        self._discard()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Returns the current values of an expression: a list of `metric` and `value`."""
        result: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return result

    def fired(self) -> set[tuple[str, str]]:
        """Returns the alerts that fire or have fired: each with its label task, if it has one."""
        alerts = self.query('last_over_time(ALERTS{alertstate="firing"}[1h])')
        return {
            (alert["metric"]["alertname"], alert["metric"].get("task", "the worker"))
            for alert in alerts
        }

    def alerts(self) -> list[dict[str, Any]]:
        """Returns the alerts that are pending or fire: `labels`, `annotations`, `state`."""
        alerts: list[dict[str, Any]] = self._get("alerts")["alerts"]
        return alerts

    def wait_for_evaluation(self) -> None:
        """Waits until the rules have been evaluated on values that were scraped from now on."""
        now = time.time()
        eventually(lambda: self.query(f"timestamp(up) > {now}"), "the worker is scraped")
        for _ in range(2):  # the first may have begun before
            evaluated_at = self._evaluated_at()
            while self._evaluated_at() == evaluated_at:
                time.sleep(POLL_INTERVAL)

    def _evaluated_at(self) -> list[str]:
        return [group["lastEvaluation"] for group in self._get("rules")["groups"]]

    def rules(self) -> list[dict[str, Any]]:
        """Returns the rules with their health and the last error of their evaluation."""
        groups = self._get("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def _get(self, path: str, **parameters: str) -> Any:
        query = urlencode(parameters)
        with urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=SOON) as response:
            return json.load(response)["data"]

    def _is_ready(self) -> bool:
        if self._program.ended():
            raise ServerError(f"Prometheus did not start: {self._program.output_tail()}")
        try:
            with urlopen(f"{self._url}/-/ready", timeout=SOON) as response:
                return bool(response.status == 200)
        except (URLError, ConnectionError):
            return False


def _discard(ports: Ports, program: Program) -> None:
    program.discard()
    ports.stop()
