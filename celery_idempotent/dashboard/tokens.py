"""Tokens: signed records, without which no request changes anything."""

from __future__ import annotations

import secrets

from itsdangerous import BadData, URLSafeTimedSerializer

#: Seconds for which a token stays valid.
TOKEN_SECONDS = 900

#: Key and version of a record as shown to a user; it is changed only if it is still the same.
ShownRecord = tuple[str, str]


class Tokens:
    """Signs the records that a user has seen and may change.

    Another site cannot read a token, so it cannot forge the user's request either.

    Args:
        secret: the same in all processes that serve the dashboard; None for a random one.
    """

    def __init__(self, secret: str | bytes | None) -> None:
        self._serializer = URLSafeTimedSerializer(
            secret or secrets.token_bytes(32), salt="celery-idempotent dashboard: records"
        )

    def sign(self, user: str, records: list[ShownRecord]) -> str:
        """Returns the token of records that are shown to `user`."""
        return self._serializer.dumps([user, records])

    def verify(self, token: str, user: str) -> list[ShownRecord] | None:
        """Returns the records of a token; None if it is forged, too old, or another user's."""
        try:
            owner, records = self._serializer.loads(token, max_age=TOKEN_SECONDS)
        except BadData:
            return None
        return [(key, version) for key, version in records] if owner == user else None
