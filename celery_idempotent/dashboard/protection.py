"""Users and their rights; checks of the host, user, origin and body of each request."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import inspect
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from celery_idempotent.core.events.report import Repeats, like_it
from celery_idempotent.core.printable import printable
from celery_idempotent.errors import SettingsError

logger = logging.getLogger(__name__)

#: Maximum bytes of a request body; a selection of records is the largest.
MAX_BODY = 256 * 1024
#: Seconds that the refusal of a wrong password takes; maximum refusals at once of one client, and
#: of all clients.
WRONG_PASSWORD_SECONDS, MAX_REFUSALS, MAX_ALL_REFUSALS = 1.0, 4, 20
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
#: Pages that other sites may link to: read-only and cheap. A key may follow "records".
LINKED_PAGES = frozenset({"", "records", "explain", "workers", "doctor"})
#: The names of this machine. Others are refused without a password: another site can point its own
#: name at 127.0.0.1 (DNS rebinding), and its pages could then read the dashboard.
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    # With no-referrer, browsers would send "Origin: null" with forms, which `is_same_origin`
    # refuses.
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "x-robots-tag": "noindex",
    "cache-control": "no-store",
}


_refusals = Repeats()


def _warn(reason: str, subject: str) -> None:
    """Logs the refusal of a request of `subject`, once a minute for each reason."""
    if (others := _refusals.left_out(reason)) is not None:
        logger.warning("Refused %s %s%s", reason, printable(subject), like_it(others))


@dataclass(frozen=True, slots=True)
class Access:
    """A user of the dashboard. Every user may see the records, without their values."""

    #: The user's name, for logs and signals.
    user: str
    #: Whether the user may forget records, and rerun calls that have failed or were rejected.
    forget: bool = False
    #: Whether the user may see results, errors and the arguments of ended calls.
    results: bool = False
    #: Whether a user who may forget may also rerun completed calls, which repeats their effects.
    repeat: bool = False


#: Returns the access of a request, or None if its user may not see the dashboard.
Authorize = Callable[[HTTPConnection], "Access | Awaitable[Access | None] | None"]


class BasicAuth:
    """HTTP basic authentication of one user.

    The refusal of a wrong password takes a second. Meanwhile, even if the client disconnects, only
    a few other passwords are checked, so guessing in parallel or disconnecting early gains nothing.

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
        self._access = Access(user, forget=True, results=True, repeat=True)
        #: For each client, the number of its refusals that are still being delayed.
        self._refusals: Counter[str] = Counter()

    async def __call__(self, connection: HTTPConnection) -> Access | None:
        """Checks the credentials in constant time.

        Raises:
            HTTPException: 429 while too many wrong ones are being refused.
        """
        scheme, _, encoded = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "basic":
            return None
        try:
            given = base64.b64decode(encoded.strip(), validate=True)
        except (binascii.Error, ValueError):
            return None
        client = connection.client.host if connection.client else "an unknown address"
        refusals = self._refusals
        if refusals[client] >= MAX_REFUSALS or refusals.total() >= MAX_ALL_REFUSALS:
            raise HTTPException(429, "There are too many wrong passwords: try again.")
        if hmac.compare_digest(given, self._expected):
            return self._access
        _warn("a wrong user or password from", client)
        refusals[client] += 1
        try:
            await asyncio.sleep(WRONG_PASSWORD_SECONDS)
        finally:
            self._refusals -= Counter({client: 1})
        return None


def local_user(connection: HTTPConnection) -> Access:
    """Grants every right, for a server that only this machine can reach."""
    return Access("local", forget=True, results=True, repeat=True)


@dataclass(frozen=True, slots=True)
class Protection:
    """Middleware around the whole dashboard."""

    app: ASGIApp
    authorize: Authorize
    #: Accepted names in the Host header; None for all.
    allowed_hosts: Collection[str] | None
    #: Denies everyone the right to forget.
    read_only: bool
    #: Prefix of all request paths.
    url_prefix: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards an admitted request, with the dashboard's path and the access in its state."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        root = scope["root_path"] = scope.get("root_path", "") + self.url_prefix
        scope.setdefault("state", {})["root"] = root
        refusal = await self._refusal(scope)
        if refusal is None and scope["path"] == root:
            # To a path. The redirect of Starlette would have the Host header of the request, which
            # the sender chooses.
            refusal = RedirectResponse(f"{root}/")
        await (refusal or self.app)(scope, receive, send_with_headers)

    async def _refusal(self, scope: Scope) -> Response | None:
        connection = HTTPConnection(scope)
        if not self._is_allowed_host(connection):
            return _refuse(400, "This host name is not allowed: use the server's address.")
        try:
            access = self.authorize(connection)
            if inspect.isawaitable(access):
                access = await access
        except HTTPException as refusal:
            return _refuse(refusal.status_code, refusal.detail, refusal.headers)
        if access is None:
            challenge = getattr(self.authorize, "challenge", None)
            if challenge is None:
                return _refuse(403, "You may not see this dashboard.")
            headers = {"www-authenticate": challenge}
            return _refuse(401, "The dashboard requires a user and a password.", headers)
        if not is_same_origin(connection) and not _is_link(connection):
            _warn("a request from another site for", access.user)
            return _refuse(403, "This request comes from another site.")
        scope["state"]["access"] = replace(access, forget=False) if self.read_only else access
        return None

    def _is_allowed_host(self, connection: HTTPConnection) -> bool:
        if self.allowed_hosts is None:
            return True
        try:
            name = urlsplit(f"//{connection.headers.get('host', '')}").hostname
        except ValueError:
            return False
        return name in self.allowed_hosts


def is_same_origin(connection: HTTPConnection) -> bool:
    """Whether a request comes from a page of this server or from a program.

    Browsers send Sec-Fetch-Site only to HTTPS or localhost, but Origin with every POST or DELETE.
    """
    site = connection.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = connection.headers.get("origin")
    return origin is None or origin.partition("://")[2] == connection.headers.get("host")


def _is_link(connection: HTTPConnection) -> bool:
    """Whether a browser follows another site's link to a page, outside a frame."""
    scope, headers = connection.scope, connection.headers
    page = scope["path"].removeprefix(scope["root_path"]).lstrip("/").partition("/")[0]
    return (
        scope["method"] in SAFE_METHODS
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
        and page in LINKED_PAGES
    )


async def read_body(request: Request) -> bytes:
    """Returns the body of a request.

    Raises:
        HTTPException: 413 if it is too large, 400 if its client disconnects.
    """
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                raise HTTPException(413, f"The request has more than {MAX_BODY} bytes.")
    except ClientDisconnect:  # which the server would log with a traceback
        raise HTTPException(400, "The request is incomplete.") from None
    return bytes(body)


async def read_form(request: Request) -> dict[str, str]:
    """Returns the fields of a form.

    Raises:
        HTTPException: 413 if it is too large, 400 if it has too many fields.
    """
    body = (await read_body(request)).decode(errors="replace")
    try:
        return dict(parse_qsl(body, keep_blank_values=True, max_num_fields=20))
    except ValueError:
        raise HTTPException(400, "The form has too many fields.") from None


def parse_json(text: str | bytes, what: str) -> Any:
    """Returns the value of a JSON text.

    Raises:
        HTTPException: 400 if it is not JSON, is nested too deeply, or a number is too long.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise HTTPException(400, f"{what} is not JSON.") from None


def _refuse(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return PlainTextResponse(f"{text}\n", status, headers)


def on_defect(request: Request, error: Exception) -> Response:
    """Responds to a defect, which the server logs: this response is sent outside the middleware."""
    return _refuse(500, "Internal Server Error: the log has the reason.", HEADERS)
