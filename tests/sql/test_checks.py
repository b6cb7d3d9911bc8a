"""The system checks of the Django app."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.servers.redis_server import RedisServer
from tests.sql.databases import migrate, output_of

pytestmark = pytest.mark.exhaustive

OURS = "celery_idempotent.contrib.django.middleware.IdempotencyMiddleware"
AUTH = "django.contrib.auth.middleware.AuthenticationMiddleware"
CSRF = "django.middleware.csrf.CsrfViewMiddleware"
OTHERS = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
ENGINE = {"ENGINE": "tests.sql.django_checks.idem"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database with the table."""
    url = f"sqlite:///{tmp_path_factory.mktemp('checks')}/shop.db"
    migrate(url)
    return url


def check(url: str, server: RedisServer, *cases: dict[str, Any]) -> list[list[list[str]]]:
    """Returns id, text and hint of each message of the checks, for each of the settings."""
    messages: list[list[list[str]]] = output_of("django_checks", url, server.url, json.dumps(cases))
    return messages


CORRECT = {"MIDDLEWARE": [*OTHERS, CSRF, AUTH, OURS], "IDEMPOTENCY_MIDDLEWARE": ENGINE}

MISTAKES: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"CELERY_IDEMPOTENCY_LEASE": -1}, "E001", ("idempotency_lease",)),
    ({"CELERY_IDEMPOTENCY_LEESE": 1}, "E001", ("idempotency_leese", "idempotency_lease")),
    ({"CELERY_IDEMPOTENCY_TRANSACTION": "other"}, "E002", ("'other'", "default")),
    ({"CELERY_IDEMPOTENCY_TRANSACTION": "no.module:engine"}, "E002", ("no.module:engine",)),
    ({"DATABASE": {"AUTOCOMMIT": False}}, "E002", ("AUTOCOMMIT",)),
    ({"DATABASE": {"ATOMIC_REQUESTS": True}}, "W002", ("non_atomic_requests", "default")),
    ({"MIDDLEWARE": [*OTHERS, AUTH, OURS]}, "E003", ("ENGINE",)),
    ({**CORRECT, "MIDDLEWARE": [*OTHERS, OURS, AUTH]}, "E004", ("AuthenticationMiddleware",)),
    ({**CORRECT, "MIDDLEWARE": [*OTHERS, AUTH, OURS, CSRF]}, "E003", ("CsrfViewMiddleware",)),
    ({"PLAIN": {"idempotency_key": "{order}"}}, "E005", ("shop.bill", "base=IdempotentTask")),
    (
        {**CORRECT, "IDEMPOTENCY_MIDDLEWARE": {**ENGINE, "RETRY_AFTERR": 3}},
        "E003",
        ("RETRY_AFTER?",),
    ),
]


def test_each_mistake_has_one_message(url: str, server: RedisServer) -> None:
    found = check(url, server, CORRECT, *(settings for settings, _, _ in MISTAKES), CORRECT)

    assert found[0] == found[-1] == []
    for (settings, number, texts), messages in zip(MISTAKES, found[1:-1], strict=True):
        assert [message[0] for message in messages] == [number], settings
        ((_, text, hint),) = messages
        assert all(each in f"{text} {hint}" for each in texts), text


def test_a_missing_table_is_a_warning_and_migrate_creates_it(
    server: RedisServer, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"

    (((found, text, hint),),) = check(url, server, {})
    assert found == "W001"
    assert "celery_idempotency_outcomes" in text
    assert "manage.py migrate celery_idempotent --database default" in hint

    migrate(url)  # runs the checks of databases first
    assert check(url, server, {}) == [[]]
