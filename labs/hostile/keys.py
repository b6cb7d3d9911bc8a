"""Derives the keys of many calls, as publisher and as worker, and compares which are equal."""

from __future__ import annotations

import inspect
from functools import partial
from hashlib import blake2b
from typing import Any

from kombu import serialization

from celery_idempotent.core.configuration.arguments import normalised
from celery_idempotent.core.key.rule import KeyRule
from celery_idempotent.errors import KeyRuleError
from labs.hostile.arguments import (
    Arguments,
    Generator,
    NotComparableError,
    identity_of,
    received,
)

SERIALIZERS = ("json", "pickle", "msgpack", "yaml")


def task(a: Any, b: Any = 0, *rest: Any, c: Any = None, **more: Any) -> Any:
    """Has the parameters that the generator knows."""
    return [a, b, rest, c, more]


class Verdict:
    """What became of the calls of one serializer."""

    def __init__(self) -> None:
        self.calls = self.unsendable = self.refused = 0
        self.failures: list[str] = []
        self._identity_of_key: dict[bytes, bytes] = {}
        self._key_of_identity: dict[bytes, bytes] = {}

    @property
    def keys(self) -> int:
        return len(self._identity_of_key)

    def count(self, key: bytes, identity: bytes, call: Arguments) -> None:
        if self._identity_of_key.setdefault(key, identity) != identity:
            self.failures.append(f"shares its key with a different call: {call!r}")
        if self._key_of_identity.setdefault(identity, key) != key:
            self.failures.append(f"has another key than an equal call: {call!r}")


def run(serializer: str, calls: int, seed: int) -> Verdict:
    """Derives the keys of random calls."""
    serialization.enable_insecure_serializers()
    rule = KeyRule("hostile.task", None, inspect.signature(task), partial(normalised, serializer))
    generator, verdict = Generator(seed), Verdict()
    for _ in range(calls):
        _check(rule, serializer, generator.draw(), verdict)
    return verdict


def _check(rule: KeyRule, serializer: str, call: Arguments, verdict: Verdict) -> None:
    verdict.calls += 1
    in_worker = received(call, serializer)
    if in_worker is None:
        verdict.unsendable += 1
    try:
        sent = _derived(rule, call)
        if in_worker is None:
            return  # any answer but a crash
        key, identity = _derived(rule, in_worker), _identity(in_worker)
    except Exception as error:
        verdict.failures.append(f"raises {type(error).__name__}: {call!r}")
        return
    if sent != key:
        verdict.failures.append(f"has another key in the worker: {call!r}")
    elif (key is None) != (identity is None):
        verdict.failures.append(f"is {'refused' if key is None else 'accepted'}: {call!r}")
    elif key is None or identity is None:
        verdict.refused += 1
    else:
        verdict.count(key, identity, call)


def _derived(rule: KeyRule, call: Arguments) -> bytes | None:
    try:
        return rule.derive(*call).digest.encode()
    except KeyRuleError:
        return None


def _identity(call: Arguments) -> bytes | None:
    try:
        identity = identity_of(call)
    except NotComparableError:
        return None
    return blake2b(_ordered(identity), digest_size=12).digest()


def _ordered(identity: Any) -> bytes:
    """Returns bytes that do not depend on the order of a set."""
    if isinstance(identity, frozenset):
        return b"<%b>" % b"".join(sorted(map(_ordered, identity)))
    if isinstance(identity, tuple):
        return b"(%b)" % b",".join(map(_ordered, identity))
    return ascii(identity).encode()
