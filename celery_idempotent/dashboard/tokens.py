"""Signed texts in forms: CSRF tokens, and the records of a confirmation."""

from __future__ import annotations

import secrets
from typing import Any

from itsdangerous import BadData, URLSafeTimedSerializer

#: Seconds for which a form stays valid.
FORM_SECONDS = 12 * 3600
#: Seconds for which a confirmation stays valid.
CONFIRMATION_SECONDS = 900


#: Key and version of a record as shown to a user; it is changed only if it is still the same.
ShownRecord = tuple[str, str]


class Tokens:
    """Signs and verifies texts, each valid for one user and one purpose.

    Args:
        secret: the same in all processes that serve the dashboard; None for a random one.
    """

    def __init__(self, secret: str | bytes | None) -> None:
        self._serializer = URLSafeTimedSerializer(
            secret or secrets.token_bytes(32), salt="celery-idempotent dashboard"
        )

    def csrf(self, user: str) -> str:
        """Returns a form's token."""
        return self._serializer.dumps(["csrf", user])

    def is_csrf(self, text: str, user: str) -> bool:
        """Whether `text` is the token of a form that was sent to `user`."""
        return bool(self._load(text, FORM_SECONDS) == ["csrf", user])

    def selection(self, user: str, records: list[ShownRecord]) -> str:
        """Returns the records of a confirmation, signed."""
        return self._serializer.dumps(["selection", user, records])

    def selected(self, text: str, user: str) -> list[ShownRecord] | None:
        """Returns the records of a confirmation; None if it is forged or too old."""
        match self._load(text, CONFIRMATION_SECONDS):
            case ["selection", owner, list(records)] if owner == user:
                return records
        return None

    def _load(self, text: str, max_age: int) -> Any:
        try:
            return self._serializer.loads(text, max_age=max_age)
        except BadData:
            return None
