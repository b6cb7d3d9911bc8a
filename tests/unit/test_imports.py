"""What ``import celery_idempotent`` loads: it is a part of the start of every process."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Runs in a process of its own; prints the modules that only this package loads.
_PRINT_IMPORTED = """
import sys
import celery.app.amqp, celery.app.log, celery.app.task, celery.canvas, celery.result
import celery.backends.redis, kombu.transport.redis
before = set(sys.modules)
{statement}
print(*sorted(set(sys.modules) - before))
"""

#: Each is needed by a part that imports it when it is used.
FORBIDDEN = (
    *("asyncpg", "cryptography.fernet", "django", "prometheus_client", "sentry_sdk", "sqlalchemy"),
    *("humanize", "jinja2", "rich", "starlette", "uvicorn"),
    *("celery_idempotent.cli", "celery_idempotent.contrib", "celery_idempotent.dashboard"),
    *(
        "celery_idempotent.doctor",
        "celery_idempotent.testing",
        "celery_idempotent.functions.engine",
    ),
    "celery_idempotent.store.inspection.record_query",
    "celery_idempotent.store.inspection.record_reader",
)


def imported_by(statement: str) -> list[str]:
    code = _PRINT_IMPORTED.format(statement=statement)
    return subprocess.check_output([sys.executable, "-c", code], text=True).split()


@pytest.fixture(scope="module")
def imported() -> list[str]:
    return imported_by("from celery_idempotent import IdempotentTask")


@pytest.mark.parametrize("name", FORBIDDEN)
def test_tasks_do_without(imported: list[str], name: str) -> None:
    assert not [each for each in imported if each == name or each.startswith(f"{name}.")]


def test_tasks_load_few_modules_of_others(imported: list[str]) -> None:
    others = {name.partition(".")[0] for name in imported} - {"celery_idempotent"}

    assert others <= {"mmap", "ctypes", "_ctypes", "difflib", "gc"}


def test_functions_load_the_engine() -> None:
    assert "celery_idempotent.functions.engine" in imported_by(
        "from celery_idempotent import Idempotency"
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    import celery_idempotent

    with pytest.raises(AttributeError, match="has no attribute 'nonesuch'"):
        celery_idempotent.nonesuch  # noqa: B018
