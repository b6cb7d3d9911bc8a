"""The options of the middleware are checked when it is created."""

from __future__ import annotations

from typing import Any

import pytest

from celery_idempotent import Idempotency
from celery_idempotent.contrib import asgi, wsgi
from celery_idempotent.contrib.asgi import IdempotencyMiddleware, anonymous
from celery_idempotent.errors import SettingsError

ENGINE = Idempotency("redis://127.0.0.1:1", name="options")


@pytest.mark.parametrize("module", [asgi, wsgi])
def test_identity_is_required(module: Any) -> None:
    with pytest.raises(TypeError, match="identity"):
        module.IdempotencyMiddleware(print, idem=ENGINE)


@pytest.mark.parametrize(
    "options",
    [
        *({"idem": None}, {"idem": "redis://"}, {"identity": None}, {"identity": "authorization"}),
        *({"methods": "POST"}, {"methods": None}, {"methods": [1]}, {"methods": [""]}),
        *({"methods": ["POST", method]} for method in ("HEAD", "options", "TRACE", "CONNECT")),
        *({"required": None}, {"required": "POST"}, {"store_response": True}),
        {"authorize_replay": True},
        *({"wait_timeout": -1}, {"wait_timeout": "1"}, {"retry_after": -1}, {"retry_after": 0.5}),
        *({"max_body_bytes": -1}, {"max_body_bytes": "1k"}, {"max_body_bytes": True}),
        *({"max_response_bytes": -1}, {"problem_type_base": None}),
    ],
    ids=str,
)
def test_a_wrong_option_is_named_in_one_line(options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as raised:
        IdempotencyMiddleware(print, **{"idem": ENGINE, "identity": anonymous, **options})

    (message,) = str(raised.value).splitlines()
    assert message.startswith("IdempotencyMiddleware: ")
    assert list(options)[-1] in message


def test_the_engine_needs_a_name_of_its_own() -> None:
    with pytest.raises(SettingsError) as raised:
        IdempotencyMiddleware(print, Idempotency("redis://127.0.0.1:1"), identity=anonymous)

    (message,) = str(raised.value).splitlines()
    assert message.startswith("IdempotencyMiddleware: idem ")
    assert 'name="payments-api"' in message


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="requird"):
        IdempotencyMiddleware(print, ENGINE, identity=anonymous, requird=True)  # type: ignore[call-arg]
