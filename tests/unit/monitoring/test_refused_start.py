"""A worker with an invalid setting prints one line and does not start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.contrib.prometheus import address
from celery_idempotent.errors import SettingsError

REPOSITORY = Path(__file__).parents[3]

SHOP = """
from celery import Celery
from celery_idempotent import IdempotentTask

app = Celery("shop", broker="redis://:secret@localhost:1/0")
app.conf.update({settings})

@app.task(base=IdempotentTask)
def charge(order_id, amount): ...
"""


SECONDS = "seconds or a timedelta, at least 1, at most a year, or None, not 0.5"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ("idempotency_leese=5", "{}there is no option idempotency_leese; did you mean "),
        ("idempotency_redeliver_after=0.5", f"{{}}idempotency_redeliver_after must be {SECONDS}$"),
        ("broker_url='memory://'", "idempotency_redis_url is not set, .*for the records$"),
    ],
    ids=["name", "value", "no Redis"],
)
def test_an_invalid_setting_is_one_line(tmp_path: Path, settings: str, error: str) -> None:
    (tmp_path / "shop.py").write_text(SHOP.format(settings=settings))

    command = [sys.executable, "-m", "celery", "-q", "-A", "shop", "worker", "--pool", "solo"]
    path = os.pathsep.join((str(tmp_path), str(REPOSITORY)))
    # Celery warns of being root, where it is.
    environment = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}
    worker = subprocess.run(command, env=environment, cwd=tmp_path, **how)

    assert worker.returncode != 0
    (line,) = worker.stderr.splitlines()
    assert re.match("Error: " + error.format("the Celery configuration: "), line)
    assert "secret" not in worker.stdout


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (9808, ("127.0.0.1", 9808)),
        ("9808", ("127.0.0.1", 9808)),
        ("0.0.0.0:9808", ("0.0.0.0", 9808)),
        ("worker-1:65535", ("worker-1", 65535)),
        ("[::1]:9808", ("::1", 9808)),
    ],
)
def test_a_port_for_metrics_is_of_the_loopback(setting: Any, expected: tuple[str, int]) -> None:
    assert address(setting) == expected


@pytest.mark.parametrize(
    "setting",
    [0, -1, 65536, True, 9808.0, "", "x", ":9808", "host:", "::1:9808", "9" * 5000, "\u0663"],
)
def test_another_address_of_metrics_is_refused(setting: Any) -> None:
    with pytest.raises(SettingsError, match="must be a port, which is served at 127.0.0.1"):
        address(setting)


def test_a_plain_task_with_options_is_an_error_at_the_start(tmp_path: Path) -> None:
    app = """
from celery import Celery  # and nothing of this package, which Celery's command line loads
app = Celery("shop", broker="filesystem://", backend="cache+memory://")
@app.task(idempotency_key="order:{order_id}")
def charge(order_id, amount): ...
"""
    (tmp_path / "shop.py").write_text(app)
    command = [sys.executable, "-m", "celery", "-q", "-A", "shop"]

    doctor = [*command, "idempotency", "doctor"]
    start = [*command, "worker", "--pool", "solo", "--loglevel", "ERROR"]
    found = subprocess.run(doctor, cwd=tmp_path, capture_output=True, text=True)
    worker = subprocess.Popen(start, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in worker.stderr or () if "ERROR" in line)
    finally:
        worker.kill()
        worker.communicate()

    assert found.returncode != 0
    for text in (found.stderr, line):
        assert "shop.charge" in text
        assert "base=IdempotentTask" in text
