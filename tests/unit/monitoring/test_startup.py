"""The policy of a worker whose store is unavailable when it starts."""

from __future__ import annotations

import pytest

from celery_idempotent.monitoring.startup import policy_of
from celery_idempotent.settings import Settings


@pytest.mark.parametrize(
    ("on_store_error", "option", "policy"),
    [
        ("retry", None, "wait"),
        ("raise", None, "wait"),
        ("run", None, "continue"),
        ("run", "exit", "exit"),
        ("retry", "continue", "continue"),
    ],
)
def test_the_policy_depends_on_both_options(
    on_store_error: str, option: str | None, policy: str
) -> None:
    settings = Settings(on_store_error=on_store_error, on_store_unavailable_at_start=option)

    assert policy_of(settings) == policy
