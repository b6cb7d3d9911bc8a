"""A project of a user, tested by pytest in a process of its own, with the examples as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT, block_with

pytestmark = pytest.mark.exhaustive

SHOP = (
    "class gateway:\n"
    "    charges = []\n"
    "    @classmethod\n"
    "    def charge(cls, *charge):\n"
    "        cls.charges.append(charge)\n"
    '        return "charged"\n\n'
) + block_with(ROOT / "README.md", 'Celery("shop"')

SETTINGS = block_with(ROOT / "docs/testing.md", "task_always_eager=True, idempotency_enabled=False")

CONFTEST = f"""
import django
from django.conf import settings
from shop import app

settings.configure(
    DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}}
)
django.setup()
{SETTINGS}
"""

EXISTING = """
from shop import charge, gateway

def test_every_call_runs():
    gateway.charges.clear()
    for _ in range(2):
        assert charge.delay(42, amount=999).get() == "charged"
    assert gateway.charges == [(42, 999)] * 2
"""

PYTEST = "\n\n".join(
    block_with(ROOT / "docs/testing.md", text)
    for text in ("test_a_second_charge_does_not_run(idem", "test_a_crashed_charge")
)

DJANGO = "from shop import charge\n" + block_with(ROOT / "docs/testing.md", "IdempotencyTestMixin")

UNITTEST = """
import unittest
from celery_idempotent.testing import IdempotencyTestMixin
from shop import charge

class Crash(IdempotencyTestMixin, unittest.TestCase):
    def setUp(self):
        super().setUp()
        self.idempotency.crash(charge, 42, amount=999)

    def test_is_taken_over(self):
        charge.delay(42, amount=999)
        assert charge.idempotency_record(42, amount=999).attempt == 2

class NoCall(IdempotencyTestMixin, unittest.TestCase):
    def test_is_not_green(self):
        with self.assertRaisesRegex(AssertionError, "absent after 0 executions"):
            self.idempotency.assert_ran_once(charge, 42, amount=999)
"""

WORKER = (
    "import pytest\n"
    + block_with(ROOT / "docs/testing.md", "def celery_config")
    + """
from celery_idempotent import IdempotentTask

pytest_plugins = ("celery.contrib.pytest",)

@pytest.fixture(scope="session")
def celery_session_app(celery_session_app):
    celery_session_app.conf.update(
        result_backend="cache+memory://", broker_transport_options={"polling_interval": 0.05}
    )
    return celery_session_app

@pytest.fixture(scope="session")
def celery_worker_parameters():
    return {"perform_ping_check": False}

@pytest.mark.parametrize("number", range(2))
def test_each_test_has_its_own_records(
    number, celery_session_app, celery_session_worker, idempotency
):
    @celery_session_app.task(base=IdempotentTask, shared=False, name="shop.pack")
    def pack(order):
        return "packed"

    celery_session_worker.reload()
    for _ in range(2):
        assert pack.delay(42).get(timeout=60) == "packed"
    idempotency.assert_ran_once(pack, 42)
"""
)

FILES = {
    "shop.py": SHOP,
    "conftest.py": CONFTEST,
    "test_existing.py": EXISTING,
    "test_pytest.py": PYTEST,
    "test_django.py": DJANGO,
    "test_unittest.py": UNITTEST,
    "test_worker.py": WORKER,
}


def run_pytest(directory: Path, *options: str) -> str:
    """Returns the output of pytest in this directory, with its line for each test."""
    elsewhere = "redis://127.0.0.1:1/0"  # no server listens there
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "REDIS_URL": elsewhere}
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *options]
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 100}
    done = subprocess.run(command, cwd=directory, env=environment, **how)
    print(done.stdout, done.stderr)
    return done.stdout


def test_the_tests_of_the_project_pass(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, "utf-8")

    report = run_pytest(tmp_path)

    assert set(re.findall(r"^PASSED (\S+)$", report, flags=re.M)) == {
        "test_existing.py::test_every_call_runs",
        "test_pytest.py::test_a_second_charge_does_not_run",
        "test_pytest.py::test_a_crashed_charge_is_taken_over",
        "test_django.py::ChargeTest::test_a_second_charge_does_not_run",
        "test_unittest.py::Crash::test_is_taken_over",
        "test_unittest.py::NoCall::test_is_not_green",
        "test_worker.py::test_each_test_has_its_own_records[0]",
        "test_worker.py::test_each_test_has_its_own_records[1]",
    }


def test_a_server_that_is_configured_is_the_only_one(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP, "utf-8")
    (tmp_path / "test_pytest.py").write_text(PYTEST, "utf-8")

    report = run_pytest(tmp_path, "-o", "idempotency_redis_url=redis://:secret@127.0.0.1:2/0")

    assert "RedisServerError: redis://127.0.0.1:2/0 does not reply" in report
    assert "2 errors" in report
