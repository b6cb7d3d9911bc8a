"""A database with two users for the Django project, and an engine for each test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from celery_idempotent import Idempotency
from tests.http.drivers.web_server import LEASE, MAX_BYTES, REPOSITORY
from tests.servers.redis_server import RedisServer

CREATE_USERS = """
import django
django.setup()
from django.contrib.auth.models import User
from django.core.management import call_command
call_command("migrate", verbosity=0)
for name in ("alice", "bob"):
    User.objects.create_user(name, password=name)
"""


@pytest.fixture(scope="session")
def site_environment(server: RedisServer) -> dict[str, str]:
    return {"STORE_URL": server.url, "LEDGER_URL": server.url}


@pytest.fixture(scope="session")
def django_environment(
    site_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    database: Path = tmp_path_factory.mktemp("django") / "site.sqlite3"
    settings = "tests.http.sites.django_settings"
    environment = {"DATABASE": str(database), "DJANGO_SETTINGS_MODULE": settings} | site_environment
    command = [sys.executable, "-c", CREATE_USERS]
    subprocess.run(command, cwd=REPOSITORY, env=os.environ | environment, check=True)
    return environment


@pytest.fixture
def idem(server: RedisServer) -> Iterator[Idempotency]:
    options = {"lease": LEASE, "max_result_size": MAX_BYTES}
    engine = Idempotency(server.url, key_prefix=uuid4().hex, name="web", **options)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def django_project(django_environment: dict[str, str]) -> None:
    """Configures Django in this process, once, without variables that outlive the fixture."""
    from django.conf import settings

    with pytest.MonkeyPatch.context() as patch:
        for name in ("STORE_URL", "LEDGER_URL", "DATABASE"):
            patch.setenv(name, django_environment[name])
        from tests.http.sites import common  # noqa: F401
        from tests.http.sites import django_settings as module
    settings.configure(
        DEBUG_PROPAGATE_EXCEPTIONS=True,
        **{name: value for name, value in vars(module).items() if name.isupper()},
    )
    import django

    django.setup()
