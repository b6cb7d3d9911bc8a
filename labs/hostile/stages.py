"""The stages, each of which ends in a row of the verdict."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from labs.hostile import damage, forged, keys, messages
from tests.servers.redis_server import RedisServer

#: Settings under which records are damaged.
DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "until expired": {"idempotency_dedupe_publish": True},
    "until finished": {"idempotency_until": "finished", "idempotency_dedupe_publish": True},
    "until started": {"idempotency_until": "started"},
    "encrypted": {"idempotency_encryption_keys": [base64.urlsafe_b64encode(bytes(32)).decode()]},
}


class Row(NamedTuple):
    """What one stage has found."""

    stage: str
    figures: str
    failures: list[str]


def run(job: tuple[str, str, int, int]) -> Row:
    """Runs one stage: its name, what it is about, calls and seed."""
    logging.disable(logging.CRITICAL)  # each damaged record is an error in the log
    stage, subject, calls, seed = job
    return _STAGES[stage](subject, calls, seed)


def derive_keys(serializer: str, calls: int, seed: int) -> Row:
    verdict = keys.run(serializer, calls, seed)
    figures = (
        f"{verdict.calls:,} calls, {verdict.keys:,} different keys, {verdict.refused:,} refused, "
        f"{verdict.unsendable:,} that the serializer cannot write"
    )
    return Row(f"keys, {serializer}", figures, verdict.failures)


def send_messages(serializer: str, calls: int, seed: int) -> Row:
    with RedisServer.start("any") as server:
        broker = server.url.rpartition("/")[0] + "/1"
        verdict = messages.run(server.url, broker, serializer, calls, seed)
    sent = f"{verdict.calls:,} calls published and delivered twice"
    figures = f"{sent}, {verdict.runs:,} runs, {verdict.refused:,} refused"
    return Row(f"messages, {serializer}", figures, verdict.failures)


def damage_records(deployment: str, _: int, __: int) -> Row:
    with RedisServer.start("any") as server:
        *_, verdict = damage.records(server.url, **DEPLOYMENTS[deployment])
    return Row(f"records, {deployment}", _met(verdict), verdict.failures)


def damage_headers(*_: object) -> Row:
    verdict = damage.headers()
    return Row("headers", _met(verdict), verdict.failures)


def forge(_: str, inputs: int, seed: int) -> Row:
    with RedisServer.start("any") as server:
        verdict = forged.run(server.url, inputs, seed)
    ends = ", ".join(f"{count:,} {kind}" for kind, count in verdict.met.most_common())
    cost = f"at most {verdict.seconds:.1f} s and {verdict.megabytes} MB"
    return Row("forged", f"{verdict.inputs:,} inputs, {cost}: {ends}", verdict.failures)


def _met(verdict: damage.Verdict) -> str:
    ends = ", ".join(f"{count:,} {kind}" for kind, count in verdict.met.most_common())
    return f"{verdict.changes:,} changed bytes: {ends}"


_STAGES: dict[str, Callable[[str, int, int], Row]] = {
    "keys": derive_keys,
    "messages": send_messages,
    "records": damage_records,
    "headers": damage_headers,
    "forged": forge,
}
