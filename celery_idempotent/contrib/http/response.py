"""Responses: whether they are stored, and which parts."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from celery_idempotent.errors import CorruptRecordError

REPLAYED_HEADER = "Idempotency-Replayed"
UNPROTECTED_HEADER = "Idempotency-Unprotected"

#: Fields of one connection (RFC 9110, section 7.6.1), besides those that Connection names.
_CONNECTION_FIELDS = frozenset(
    {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
)
#: Fields about one response, such as when and by which server it was sent.
_RESPONSE_FIELDS = frozenset(
    {"age", "date", "server", REPLAYED_HEADER.lower(), UNPROTECTED_HEADER.lower()}
)
#: Fields with credentials or challenges to prove them.
_CREDENTIAL_FIELDS = frozenset(
    {"authentication-control", "authentication-info", "authorization", "dpop-nonce"}
    | {"optional-www-authenticate", "set-cookie", "set-cookie2", "www-authenticate"}
    | {"x-auth-token", "x-csrf-token", "x-xsrf-token"}
)
NEVER_STORED = _CONNECTION_FIELDS | _RESPONSE_FIELDS | _CREDENTIAL_FIELDS

#: Statuses below 500 after which a client should send the same request again: it came too late,
#: too early or too often, lacked valid credentials, or met a temporary state.
RETRIED_STATUSES = frozenset({401, 408, 409, 421, 423, 425, 429})

Headers = list[tuple[str, str]]


def stored_by_default(status: int, headers: Headers) -> bool:
    """Returns whether a response is final: below 500, and not in RETRIED_STATUSES."""
    return status < 500 and status not in RETRIED_STATUSES


@dataclass(frozen=True)
class Response:
    """A response."""

    status: int
    headers: Headers
    #: None for a stream or a file, whose body is not read.
    body: bytes | None = b""
    #: The phrase of its status line, if it has one.
    reason: str = ""

    @property
    def has_no_store(self) -> bool:
        """Whether its Cache-Control says no-store."""
        fields = [value for name, value in self.headers if name.lower() == "cache-control"]
        return "no-store" in (each.strip().lower() for each in ",".join(fields).split(","))

    def as_record(self, max_bytes: int) -> dict[str, Any]:
        """Returns the parts to store, in a form that every serializer accepts.

        Args:
            max_bytes: only the status of a response with a larger body is stored.
        """
        if self.body is None or len(self.body) > max_bytes or self.has_no_store:
            return {"status": self.status, "omitted": True}
        headers = [list(field) for field in _storable(self.headers, len(self.body))]
        stored = {"status": self.status, "reason": self.reason, "headers": headers}
        try:
            return {**stored, "text": self.body.decode("utf-8")}
        except UnicodeDecodeError:
            return {**stored, "base64": b64encode(self.body).decode("ascii")}

    @classmethod
    def from_record(cls, stored: Any) -> Response | None:
        """Returns a stored response, marked as a replay; None if its contents were not stored.

        Raises:
            CorruptRecordError: if `stored` is not a response.
        """
        try:
            if stored.get("omitted"):
                return None
            headers = [(str(name), str(value)) for name, value in stored["headers"]]
            headers.append((REPLAYED_HEADER, "true"))
            text = stored.get("text")
            body = b64decode(stored["base64"]) if text is None else text.encode("utf-8")
            return cls(int(stored["status"]), headers, body, str(stored["reason"]))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise CorruptRecordError("the record of a request holds no response") from None


def _storable(headers: Sequence[tuple[str, str]], length: int) -> Headers:
    """Returns the fields to store: all but NEVER_STORED and others of one connection."""
    dropped = set(NEVER_STORED)
    for name, value in headers:
        if name.lower() == "connection":
            dropped |= {option.strip().lower() for option in value.split(",")}
    return [
        (name, value)
        for name, value in headers
        if name.lower() not in dropped
        and not name.lower().startswith("proxy-")
        and (name.lower() != "content-length" or value == str(length))
    ]
