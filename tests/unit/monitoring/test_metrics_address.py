"""Where a worker serves its metrics."""

from __future__ import annotations

from typing import Any

import pytest

from celery_idempotent.contrib.prometheus import address
from celery_idempotent.errors import SettingsError


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (9808, ("127.0.0.1", 9808)),
        ("9808", ("127.0.0.1", 9808)),
        ("0.0.0.0:9808", ("0.0.0.0", 9808)),
        ("worker-1:65535", ("worker-1", 65535)),
        ("[::1]:9808", ("::1", 9808)),
    ],
)
def test_a_port_alone_is_of_the_loopback(setting: Any, expected: tuple[str, int]) -> None:
    assert address(setting) == expected


@pytest.mark.parametrize(
    "setting",
    [0, -1, 65536, True, 9808.0, "", "x", ":9808", "host:", "::1:9808", "9" * 5000, "\u0663"],
)
def test_others_are_refused(setting: Any) -> None:
    with pytest.raises(SettingsError, match="must be a port, which is served at 127.0.0.1"):
        address(setting)
