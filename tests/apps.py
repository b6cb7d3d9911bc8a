"""Closes the Celery apps of tests, and runs ``celery -A shop idempotency …`` in this process."""

from __future__ import annotations

from types import SimpleNamespace

from celery import Celery
from celery.backends.redis import RedisBackend
from click.testing import CliRunner

from celery_idempotent.operations.cli import idempotency


def close(app: Celery) -> None:
    """Closes an app, whose results may then be collected without their server.

    A result that is collected is unsubscribed from: on a stopped server that takes twenty seconds,
    and raises in another test. Celery's backend keeps a result whose `get` has timed out.
    """
    if isinstance(app.backend, RedisBackend):
        app.backend.result_consumer.subscribed_to.clear()
        app.backend.result_consumer._pubsub = None
    app.close()


def run_command(app: Celery, *arguments: str, code: int = 0, answer: str | None = None) -> str:
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
