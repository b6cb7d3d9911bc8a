"""Users of the dashboard, their rights, and HTTP basic authentication."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from celery_idempotent.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Access:
    """A user of the dashboard. Every user may see the records, without their values."""

    #: The name in logs and signals.
    user: str
    #: Whether the user may forget records and rerun ended calls.
    forget: bool = False
    #: Whether the user may see results and errors.
    results: bool = False


#: Returns the access of a request, or None if its user may not see the dashboard.
Authorize = Callable[[HTTPConnection], "Access | Awaitable[Access | None] | None"]


class BasicAuth:
    """HTTP basic authentication of one user.

    Args:
        credentials: ``USER:PASSWORD``.

    Raises:
        SettingsError: if `credentials` has another form.
    """

    #: The value of WWW-Authenticate in a 401.
    challenge = 'Basic realm="celery-idempotent", charset="UTF-8"'

    def __init__(self, credentials: str) -> None:
        user, colon, password = credentials.partition(":")
        if not (user and colon and password):
            raise SettingsError("the dashboard's credentials are not of the form USER:PASSWORD")
        self._expected = credentials.encode()
        self._access = Access(user, forget=True, results=True)

    def __call__(self, connection: HTTPConnection) -> Access | None:
        """Checks the credentials in constant time."""
        scheme, _, encoded = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "basic":
            return None
        try:
            given = base64.b64decode(encoded.strip(), validate=True)
        except (binascii.Error, ValueError):
            return None
        return self._access if hmac.compare_digest(given, self._expected) else None


def local_user(connection: HTTPConnection) -> Access:
    """Grants every right, for a server that only this machine can reach."""
    return Access("local", forget=True, results=True)
