"""A key: which record a call belongs to, and which arguments it came with."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote

from celery_idempotent.key.canonical import canonical, digest

KEY_BYTES = 16
FINGERPRINT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Key:
    """What a rule derived.

    `digest` is 128 bits of BLAKE2b in URL-safe letters; what was hashed appears nowhere, so names
    in Redis hold no personal data, no braces and no line breaks. `fingerprint` tells calls with
    one key and different arguments apart; it is empty where the key itself covers all of them.
    """

    task: str
    digest: str
    fingerprint: bytes = b""

    def __str__(self) -> str:
        """``task:digest``, fit for a URL, a log line, or as the key of a system downstream."""
        return f"{_safe(self.task)}:{self.digest}"

    @classmethod
    def of(cls, task: str, form: bytes, fingerprint: bytes = b"") -> Key:
        """The key of `task` for the canonical `form` of whatever its rule yields."""
        code = urlsafe_b64encode(digest(_form_of(task) + form, KEY_BYTES))
        return cls(task, code[:22].decode(), fingerprint)

    def part(self, name: str) -> Key:
        """The key of a part of what has this key."""
        return Key.of(self.task, canonical((self.digest, name)))


def fingerprint_of(form: bytes) -> bytes:
    """The fingerprint of the canonical `form` of all arguments."""
    return digest(b"fingerprint" + form, FINGERPRINT_BYTES)


@lru_cache(1024)
def _form_of(task: str) -> bytes:
    return canonical(task)


@lru_cache(1024)
def _safe(task: str) -> str:
    return quote(task, safe="")
