"""The payments API: one charge for a key, even if the web process dies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.http.drivers.web_server import REPOSITORY, WebServer, serving
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually

pytestmark = pytest.mark.exhaustive

WORKER = (sys.executable, "-m", "celery", "-A", "examples.fastapi_payments.tasks", "worker")
BODY = {"account": "A-1", "amount": 999}


@pytest.fixture(scope="module")
def celery_environment(server: RedisServer) -> dict[str, str]:
    return {"CELERY_BROKER_URL": server.url, "CELERY_RESULT_BACKEND": server.url}


@pytest.fixture(scope="module")
def web(celery_environment: dict[str, str]) -> Iterator[WebServer]:
    with serving("examples.fastapi_payments.web:api", **celery_environment) as web:
        yield web


def test_a_payment_is_charged_once_for_all_its_requests(
    web: WebServer, server: RedisServer, celery_environment: dict[str, str], tmp_path: Path
) -> None:
    key = uuid4().hex
    client = server.client()

    first, again = (web.post("/payments", key, BODY) for _ in range(2))
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json() == again.json()
    assert client.llen("celery") == 1
    assert web.post("/payments", key, {**BODY, "amount": 1}).status_code == 422
    assert web.post("/payments", None, BODY).status_code == 400

    # As if the web process died before it stored the response: a retry publishes the task again.
    (record,) = client.keys("idem:payments-api:*")
    client.delete(record)
    after = web.post("/payments", key, BODY)
    assert after.json() == first.json()
    assert client.llen("celery") == 2

    log = tmp_path / "worker.log"
    with log.open("wb") as output:
        command = [*WORKER, "-P", "solo", "-l", "INFO", "--without-gossip", "--without-mingle"]
        how = {"env": {**os.environ, **celery_environment}, "stdout": output, "stderr": output}
        worker = subprocess.Popen(command, cwd=REPOSITORY, **how)
        eventually(lambda: log.read_text().count("succeeded in") >= 2, "both have succeeded")
        worker.terminate()
        worker.wait(30)
    assert log.read_text().count(f"for payment {first.json()['payment']}") == 1
