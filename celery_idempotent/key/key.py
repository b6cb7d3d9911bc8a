"""A key: names the record of a call, and distinguishes calls with other arguments."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from urllib.parse import quote

from celery_idempotent.key.canonical import VERSION, canonical, digest

KEY_BYTES = 16
FINGERPRINT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Key:
    """What a rule derives from a call.

    `digest` is 128 bits of BLAKE2b in URL-safe letters; what was hashed appears nowhere, so names
    in Redis hold no personal data, no braces and no line breaks. `fingerprint` differs between
    calls with the same key and different arguments; it is empty where the key covers all arguments.
    """

    task: str
    digest: str
    fingerprint: bytes = b""

    def __str__(self) -> str:
        """``task:digest``, fit for a URL, a log line, or as an idempotency key of another API."""
        return f"{_quoted(self.task)}:{self.digest}"

    @classmethod
    def of(cls, task: str, hashed: bytes, fingerprint: bytes = b"") -> Key:
        """Returns the key of `task` for the canonical bytes that its rule derived."""
        data = blake2b(_task_bytes(task) + hashed, digest_size=KEY_BYTES, person=VERSION).digest()
        return cls(task, urlsafe_b64encode(data)[:22].decode(), fingerprint)

    def part(self, name: str) -> Key:
        """Returns the key of the part `name` of the call that has this key."""
        return Key.of(self.task, canonical((self.digest, name)))


def fingerprint_of(arguments: bytes) -> bytes:
    """Returns the fingerprint of the canonical bytes of all arguments."""
    return digest(b"fingerprint" + arguments, FINGERPRINT_BYTES)


@lru_cache(1024)
def _task_bytes(task: str) -> bytes:
    return canonical(task)


@lru_cache(1024)
def _quoted(task: str) -> str:
    return quote(task, safe="")
