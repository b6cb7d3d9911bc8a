"""Tasks of ``django.tasks``, which Celery runs by a backend."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.redis_server import RedisServer
from tests.worker.harness import REPOSITORY, WorkerProcess


@pytest.mark.parametrize("backend", ["django_tasks_celery", "django_tasks_fennel"])
def test_a_key_rule_reads_the_arguments(backend: str, store: RedisServer, tmp_path: Path) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} needs a newer Python")
    module = "tests.worker.django_tasks"
    environment = {"TASKS_BACKEND": backend, "TASKS_REDIS": store.url}
    worker = WorkerProcess(backend, ("--pool", "solo"), environment, tmp_path / "log", module)
    try:
        program = [sys.executable, "-c", f"from {module} import publish; publish()"]
        env = {**os.environ, **environment}
        run = subprocess.run(program, cwd=REPOSITORY, env=env, capture_output=True, text=True)
    finally:
        worker.kill()
    assert run.returncode == 0, run.stderr + worker.logs()

    first, by_keyword, at_default, reused, other, *pairs = run.stdout.splitlines()
    assert first.startswith("[1, 5, ")
    assert first == by_keyword == at_default
    assert reused.startswith("KeyReusedError")
    assert other.startswith("[2, 5, ")
    assert pairs[0] == pairs[1]
    assert pairs[2] == pairs[3]
    assert pairs[0].startswith("['a', 'b', ")
    assert pairs[2].startswith("[3, ")
