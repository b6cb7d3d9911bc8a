"""Runs ``celery idempotency`` in the process of a test."""

from __future__ import annotations

from types import SimpleNamespace

from celery import Celery
from click.testing import CliRunner

from celery_idempotent.cli import idempotency


def celery(app: Celery, *arguments: str, code: int = 0, answer: str | None = None) -> str:
    """Runs ``celery -A app idempotency …``; returns its output, asserts its exit code."""
    obj = SimpleNamespace(app=app)
    result = CliRunner().invoke(idempotency, arguments, obj=obj, input=answer)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output
