"""Runs ``celery -A shop idempotency …`` in this process."""

from __future__ import annotations

from types import SimpleNamespace

from celery import Celery
from click.testing import CliRunner

from celery_idempotent.cli import idempotency


def run(app: Celery, *arguments: str, code: int = 0, answer: str | None = None) -> str:
    """Returns the output of a command; asserts its exit code.

    Args:
        answer: the standard input.
    """
    obj = SimpleNamespace(app=app)
    result = CliRunner().invoke(idempotency, arguments, obj=obj, input=answer)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output
