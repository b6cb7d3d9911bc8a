"""The responses of the middleware itself: problem documents (RFC 9457)."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from celery_idempotent import errors
from celery_idempotent.contrib.http.request import MAX_KEY_LENGTH

#: Precedes the name of a problem in its type.
TYPE_BASE = "urn:celery-idempotent:"


class Text(NamedTuple):
    """The contents of a problem document."""

    status: int
    title: str
    detail: str
    #: Whether the same request can succeed later.
    retry: bool = False


class Problem(Enum):
    """Reasons why the app does not answer a request, and what the client can do."""

    KEY_MISSING = Text(
        400,
        "An Idempotency-Key is required",
        "Send an Idempotency-Key header with a value that is unique for this operation, such as a "
        "UUID, and send the same value when you retry it.",
    )
    KEY_INVALID = Text(
        400,
        "The Idempotency-Key is malformed",
        f"Send one Idempotency-Key header with 1 to {MAX_KEY_LENGTH} visible ASCII characters, in "
        "double quotes if it contains a space, a comma, a semicolon, a quote or a backslash.",
    )
    IDENTITY_MISSING = Text(
        400,
        "The sender of this Idempotency-Key is unknown",
        "A key belongs to the client that sends it. Authenticate, with each credential sent once, "
        "or send the request without a key. An API without authentication must set its option "
        "identity to anonymous.",
    )
    BODY_INCOMPLETE = Text(
        400,
        "The request body is incomplete",
        "The body is shorter than Content-Length, or Content-Length is not a number. The request "
        "was not executed; send it again.",
    )
    REQUEST_INCOMPARABLE = Text(
        400,
        "The request cannot be compared with others",
        "A value in it is NaN, nested too deeply or too large. The request was not executed.",
    )
    BODY_TOO_LARGE = Text(
        413,
        "The request body is too large for an Idempotency-Key",
        "The body of a request with a key is limited to {max_body_bytes} bytes.",
    )
    REQUEST_IN_PROGRESS = Text(
        409,
        "A request with this Idempotency-Key is still in progress",
        "Send the same request again later to get its response.",
        retry=True,
    )
    RESPONSE_NOT_STORED = Text(
        409,
        "The request was executed, and its response was not stored",
        "The response was too large, streamed or marked no-store, or responses are not stored. "
        "Look up the effect of the request; to execute it a second time, send a new key.",
    )
    LENGTH_REQUIRED = Text(
        411,
        "The length of the request body is unknown",
        "Send a Content-Length: a chunked body of a request with a key cannot be read here.",
    )
    REPLAY_FORBIDDEN = Text(
        403,
        "The stored response is not available to this client",
        "This request was executed before, and was not executed again. Its response is only for "
        "clients that are still authorized.",
    )
    KEY_REUSED = Text(
        422,
        "The Idempotency-Key was used for a different request",
        "The method, path, query, content type or body differs from that of the first request with "
        "this key. Send a new key for a new operation; a retry repeats the same bytes.",
    )
    OUTCOME_UNKNOWN = Text(
        500,
        "The outcome of this request is unknown",
        "The request may have been executed, and is not executed again: its executions have "
        "crashed, or its record cannot be read. Look up its effect; an operator can remove the "
        "record.",
    )
    STORE_UNAVAILABLE = Text(
        503,
        "Idempotency keys cannot be checked at the moment",
        "The request was not executed now, and may have been executed before. Send it again later "
        "with the same key.",
        retry=True,
    )

    @property
    def type_name(self) -> str:
        """The end of the problem's type; clients may depend on it."""
        return self.name.lower().replace("_", "-")


#: The problems that report errors of the engine to clients.
OF_ERRORS: dict[type[errors.IdempotencyError], Problem] = {
    errors.KeyReusedError: Problem.KEY_REUSED,
    errors.KeyRuleError: Problem.REQUEST_INCOMPARABLE,
    errors.LeaseLostError: Problem.REQUEST_IN_PROGRESS,
    errors.PoisonedTaskError: Problem.OUTCOME_UNKNOWN,
    errors.ResultNotStoredError: Problem.RESPONSE_NOT_STORED,
    errors.StoreUnavailableError: Problem.STORE_UNAVAILABLE,
    errors.CorruptRecordError: Problem.OUTCOME_UNKNOWN,
}
