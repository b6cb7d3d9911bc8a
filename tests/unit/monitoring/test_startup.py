"""What a task wants of a worker that starts without its store."""

from __future__ import annotations

import pytest

from celery_idempotent.monitoring.startup import policy_of
from celery_idempotent.settings import Settings


@pytest.mark.parametrize(
    ("on_store_error", "said", "policy"),
    [
        ("retry", None, "wait"),
        ("raise", None, "wait"),
        ("run", None, "go"),
        ("run", "stop", "stop"),
        ("retry", "go", "go"),
    ],
)
def test_policy(on_store_error: str, said: str | None, policy: str) -> None:
    settings = Settings(on_store_error=on_store_error, on_store_unavailable_at_start=said)

    assert policy_of(settings) == policy
