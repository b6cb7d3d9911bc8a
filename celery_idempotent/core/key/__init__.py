"""The key of a call, which names its record: parts, text and hashing. No I/O.

`rule.KeyRule` derives a key from the arguments of a call; all other code only passes it on. Every
key is a digest, so no argument appears in Redis, in a log or in a URL.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from functools import lru_cache
from hashlib import blake2b
from typing import Any
from urllib.parse import quote
from uuid import UUID

from celery_idempotent.core.key.canonical import VERSION, digest
from celery_idempotent.core.key.canonical import canonical as canonical_bytes
from celery_idempotent.errors import KeyRuleError

KEY_BYTES = 16
FINGERPRINT_BYTES = 8
#: Begins the digest of an explicit key; not a letter of Base64, nor special in URLs and patterns.
EXPLICIT_MARK = "~"
#: As an option of a task, its key rule; as an option of ``apply_async``, the call's explicit key.
KEY_OPTION = "idempotency_key"


class Key(str):
    """The key of a call: ``task:digest``, with the parts as attributes.

    A derived key never equals an explicit key, which a caller supplies: they are hashed with
    different tags, and the digest of an explicit key begins with a tilde.

    As text it fits in a URL, a log line, or the idempotency key of another API. `digest` is 128
    bits of BLAKE2b in URL-safe letters. The hashed bytes appear nowhere, so names in Redis contain
    no personal data, no braces and no line breaks. `fingerprint` differs between calls with the
    same key and different arguments; empty if the key covers all arguments or is the task id.
    """

    task: str
    digest: str
    fingerprint: bytes
    #: Digest of the id of one message, if the key is that of its own record (`of_message`); empty
    #: in the key of a call.
    message: str

    def __new__(cls, task: str, digest: str, fingerprint: bytes = b"", message: str = "") -> Key:
        key = super().__new__(cls, f"{_quoted(task)}:{digest}")
        key.task, key.digest, key.fingerprint, key.message = task, digest, fingerprint, message
        return key

    def __eq__(self, other: object) -> bool:
        """Compares all parts. No text equals a key: compare its ``str()`` with `Record.key`."""
        if not isinstance(other, Key):
            return False
        return self._parts == other._parts

    __ne__ = object.__ne__

    def __hash__(self) -> int:
        return hash(self._parts)

    @property
    def _parts(self) -> tuple[str, bytes, str]:
        return str(self), self.fingerprint, self.message

    def __getnewargs__(self) -> tuple[str, str, bytes, str]:  # type: ignore[override]
        """The arguments of the constructor, for pickle and copy."""
        return self.task, self.digest, self.fingerprint, self.message

    @property
    def explicit(self) -> bool:
        """Whether the caller supplied this key; else the task's rule derived it."""
        return self.digest.startswith(EXPLICIT_MARK)

    def with_fingerprint(self, fingerprint: bytes) -> Key:
        """Returns this key with another fingerprint."""
        return Key(self.task, self.digest, fingerprint, self.message)

    def of_message(self, task_id: str) -> Key:
        """Returns the key of one message's record, for a key that may run again."""
        # An id with a lone surrogate is hashed too: `layout.write_task_id` rejects it with a clear
        # error once a command is sent.
        message = text_digest(task_id.encode(errors="surrogatepass"))
        return Key(self.task, self.digest, self.fingerprint, message)

    def kept_message(self, task_id: str) -> Key:
        """Returns the key under which `core.task.publish.kept_message` keeps a message.

        It is kept once `task_id` has ended for good, so that an operator can rerun it.
        """
        return Key(self.task, self.digest, message=f"message:{self.of_message(task_id).message}")

    @property
    def turn(self) -> Key:
        """The key of the call, for the key of one message's record."""
        return Key(self.task, self.digest, self.fingerprint)

    @classmethod
    def of(
        cls, task: str, hashed: bytes, fingerprint: bytes = b"", *, explicit: bool = False
    ) -> Key:
        """Returns the key of `task` for these canonical bytes, which begin with a tag."""
        mark = EXPLICIT_MARK if explicit else ""
        return cls(task, mark + text_digest(_task_bytes(task) + hashed), fingerprint)

    def part(self, name: str) -> Key:
        """Returns a key for one part of this call, such as one item of a ``map``."""
        return Key.of(self.task, canonical_bytes((self.digest, name)), explicit=self.explicit)


def fingerprint_of(arguments: bytes) -> bytes:
    """Returns the fingerprint of the canonical bytes of all arguments."""
    return digest(b"fingerprint" + arguments, FINGERPRINT_BYTES)


def text_digest(data: bytes) -> str:
    """Returns the digest of `data` in URL-safe letters."""
    # The same as `digest(data, KEY_BYTES)`, inlined because every key pays for it.
    hashed = blake2b(data, digest_size=KEY_BYTES, person=VERSION).digest()
    return urlsafe_b64encode(hashed)[:22].decode()


@lru_cache(1024)
def _task_bytes(task: str) -> bytes:
    return canonical_bytes(task)


@lru_cache(1024)
def _quoted(task: str) -> str:
    return quote(task, safe="")


#: In errors: what a key that a caller passes, or a key rule returns, can be.
KINDS = "text, an integer, a UUID or a tuple of these"
#: Maximum characters in the key of a message, over all parts of a tuple.
MAX_LENGTH = 255


def message_form(task: str, value: Any) -> str | list[str]:
    """Returns an explicit key in the form that a message carries: text, or a list of texts.

    Every encoding of headers returns this form unchanged, so publisher and worker derive the same
    key from it.

    Raises:
        KeyRuleError: if `value` cannot be a key. The message never shows it.
    """
    if isinstance(value, Key):
        # Hashed again, it would be another key, and a call that has already run would run again.
        raise KeyRuleError(
            f"{task}: {KEY_OPTION} is a Key, and would be hashed to another key; leave it out "
            "to derive the key from the arguments, or pass its str()"
        )
    parts = [_part(part) for part in (value if isinstance(value, (list, tuple)) else [value])]
    if not parts or not all(parts):
        raise KeyRuleError(f"{task}: {KEY_OPTION} must be non-empty {KINDS}, or False")
    length = sum(map(len, parts))
    if length > MAX_LENGTH:
        raise KeyRuleError(
            f"{task}: {KEY_OPTION} has {length} characters, and {MAX_LENGTH} are allowed: pass "
            "a digest of it"
        )
    return parts if isinstance(value, (list, tuple)) else parts[0]


def as_text(value: Any) -> Any:
    """Returns an integer or a UUID as text, anything else unchanged."""
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__repr__(value)  # the text of an IntEnum differs between Python versions
    return str(value) if isinstance(value, UUID) else value


def _part(value: Any) -> str:
    """Returns one part of a key as text; empty if it cannot be one."""
    text = as_text(value)
    return str.__str__(text) if isinstance(text, str) else ""
