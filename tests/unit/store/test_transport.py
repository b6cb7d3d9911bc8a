"""Commands as bytes: what redis-py would send."""

from __future__ import annotations

from typing import Any

from redis._parsers import Encoder
from redis.connection import PythonRespSerializer

from celery_idempotent.store import scripts
from celery_idempotent.store.transport import sync as transport
from celery_idempotent.store.transport.sync import ScriptCall


def as_redis_py_packs_it(*command: Any) -> bytes:
    return b"".join(
        PythonRespSerializer(6000, Encoder("utf-8", "strict", False).encode).pack(*command)
    )


def test_a_command() -> None:
    words = ("WAIT", 2, b"\xff\r\n", "ä", "")

    assert transport.packed(words) == as_redis_py_packs_it(*words)


def test_a_script_by_its_digest() -> None:
    script = scripts.load("forget")

    sent = transport.by_sha(ScriptCall(script, "idem:a", [7]))

    assert sent == as_redis_py_packs_it("EVALSHA", script.sha, 1, "idem:a", 7)


def test_a_script_by_its_source() -> None:
    script = scripts.load("forget")

    sent = transport.by_source(ScriptCall(script, "idem:ä", [7]))

    assert sent == as_redis_py_packs_it("EVAL", script.source, 1, "idem:ä", 7)
