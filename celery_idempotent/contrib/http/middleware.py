"""Handling of a request with a key, shared by all middleware and single endpoints.

They take three steps: `_admit` checks the key and its sender; `_begin` begins the execution, once
the body has been read; `_settle` stores the response or releases the key, once the app has
responded. A step raises :class:`Answered` to send the client a response other than the app's.

A step that waits for the store is a coroutine. Under WSGI it blocks instead of suspending, so that
`run_sync` can run it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import AsyncExitStack, contextmanager
from hashlib import blake2b
from inspect import isawaitable
from typing import Any, NoReturn

from celery_idempotent.contrib.http.problem import OF_ERRORS, TYPE_BASE, Problem
from celery_idempotent.contrib.http.request import KEY_HEADER, field_of, fields_of, parse_key
from celery_idempotent.contrib.http.response import (
    UNPROTECTED_HEADER,
    Headers,
    Response,
    stored_by_default,
)
from celery_idempotent.errors import IdempotencyError, SettingsError
from celery_idempotent.functions.direct_call import Decision
from celery_idempotent.functions.engine import DEFAULT_NAME, Block, Idempotency

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1024 * 1024
#: Larger error bodies are not stored: unauthorized clients can choose the text in them.
MAX_ERROR_BYTES = 64 * 1024

_LENGTH = re.compile("[0-9]{1,18}")

#: Methods that cannot have a key, because their responses describe the current resource or
#: connection.
_NEVER_KEYED = frozenset({"HEAD", "OPTIONS", "TRACE", "CONNECT"})


class Answered(Exception):
    """Ends the handling of a request: the client gets this response instead of the app's."""

    def __init__(self, response: Response) -> None:
        self.response = response


class Exchange(AsyncExitStack):
    """The context of one request that may have a key; closing it releases an uncompleted key."""

    #: The execution under which the app is to run, or has run; else None. `_begin` sets it.
    execution: Any = None


class BaseMiddleware:
    """Runs each request once for its Idempotency-Key, and replays the response to retries.

    Args:
        app: handles the requests.
        idem: the engine that stores the responses, with a name unique to this service.
        identity: gets the app's scope, environ or request; returns the text that identifies the
            sender, or None if it is unknown. A key belongs to an identity, so no client can read
            another one's response.
        methods: the HTTP methods to which keys apply; other requests are passed to the app.
        required: whether requests with these methods must have a key, or a function that decides
            it for a request.
        store_response: returns whether to store a response, given its status and headers (a list of
            pairs of text). If it is not stored, a retry runs the request again.
        authorize_replay: returns whether the client of a request may still have the stored
            response; if not, it gets 403. Under ASGI it may be a coroutine function.
        wait_timeout: seconds that a request waits for a running one with its key before 409.
        retry_after: seconds in the Retry-After header.
        max_body_bytes: the largest body of a request with a key; a larger one gets 413.
        max_response_bytes: the largest response body to store, by default the engine's
            max_result_size. For a larger body, an error above 64 KiB or a response with
            ``Cache-Control: no-store``, only the status is stored.
        problem_type_base: precedes the name of a problem in its type, such as the URL of a page
            that describes the problems.

    Raises:
        SettingsError: for the first invalid option, in one line.
    """

    #: Whether the app runs on an event loop.
    _is_async = False
    #: Begins messages about invalid options.
    _title = "IdempotencyMiddleware"

    def __init__(
        self,
        app: Any,
        idem: Idempotency,
        *,
        identity: Callable[[Any], str | None],
        methods: Collection[str] = ("POST", "PATCH"),
        required: bool | Callable[[Any], bool] = False,
        store_response: Callable[[int, Headers], bool] = stored_by_default,
        authorize_replay: Callable[[Any], bool | Awaitable[bool]] | None = None,
        wait_timeout: float = 0.0,
        retry_after: int = 1,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_response_bytes: int | None = None,
        problem_type_base: str = TYPE_BASE,
    ) -> None:
        self._check(isinstance(idem, Idempotency), "idem", "an Idempotency", idem)
        if idem.name == DEFAULT_NAME:
            raise SettingsError(
                f"{self._title}: idem has the default name, and services with one name "
                "answer each other's requests; give it the name of this service, such as "
                'Idempotency(…, name="payments-api")'
            )
        self._check(callable(identity), "identity", "a function of the request", identity)
        given: Any = methods
        is_list = isinstance(given, Collection) and not isinstance(given, str)
        is_valid = is_list and all(isinstance(method, str) and method for method in given)
        self._check(is_valid, "methods", 'a list of HTTP methods, such as ["POST", "PATCH"]', given)
        is_valid = callable(required) or isinstance(required, bool)
        self._check(is_valid, "required", "True, False or a function of the request", required)
        self._check(callable(store_response), "store_response", "a function", store_response)
        is_valid = authorize_replay is None or callable(authorize_replay)
        self._check(is_valid, "authorize_replay", "a function of the request", authorize_replay)
        if max_response_bytes is None:
            max_response_bytes = idem.settings.max_result_size
        for name, value in (
            ("retry_after", retry_after),
            ("max_body_bytes", max_body_bytes),
            ("max_response_bytes", max_response_bytes),
        ):
            self._check(type(value) is int and value >= 0, name, "a whole number, 0 or more", value)
        is_text = isinstance(problem_type_base, str)
        self._check(is_text, "problem_type_base", "text", problem_type_base)
        self._app = app
        self._idem = idem
        self._identity = identity
        self._methods = frozenset(method.upper() for method in methods)
        if wrong := min(self._methods & _NEVER_KEYED, default=None):
            raise SettingsError(f"{self._title}: methods cannot include {wrong}; remove it")
        self._required = required
        self._store_response = store_response
        self._authorize_replay = authorize_replay
        # An exception of the app releases the key: only a response can be stored.
        options = {"wait_timeout": wait_timeout, "replay_errors": ()}
        self._settings = idem.settings_for(options, self._title)
        self._retry_after = retry_after
        self._max_body_bytes = max_body_bytes
        self._max_response_bytes = max_response_bytes
        self._problem_type_base = problem_type_base

    def _check(self, valid: bool, name: str, kind: str, value: Any) -> None:
        if not valid:
            raise SettingsError(f"{self._title}: {name} must be {kind}, not {value!r}")

    def _applies(self, request: Any, method: str) -> bool:
        """Returns whether the request has a key or may need one, and its method is protected."""
        wanted = self._key_fields(request) or self._required is not False
        # Some servers pass a method unchanged, and some frameworks accept post as POST.
        return bool(wanted) and method.upper() in self._methods and self._settings.enabled

    def _admit(self, request: Any) -> tuple[str, ...] | None:
        """Returns a request's key for the engine, or None if it needs no key and has none."""
        key_fields = self._key_fields(request)
        if not key_fields:
            required = self._required(request) if callable(self._required) else self._required
            if required:
                raise self._refusal(Problem.KEY_MISSING)
            return None
        key = parse_key(key_fields)
        if key is None:
            raise self._refusal(Problem.KEY_INVALID)
        identity = self._identity(request)
        if not isinstance(identity, (str, type(None))):
            raise TypeError(f"identity must return text or None, not {type(identity).__name__}")
        if not identity:
            raise self._refusal(Problem.IDENTITY_MISSING)
        return record_key(identity, key)

    def _key_fields(self, request: Any) -> list[str]:
        return fields_of(request, KEY_HEADER)

    def _declared_length(self, request: Any, *, reads_chunks: bool = True) -> int:
        """Returns the Content-Length of a request, or 0; refuses a body that is too large.

        Args:
            reads_chunks: whether a body without a Content-Length can be read.
        """
        declared = field_of(request, "content-length")
        if not declared and not reads_chunks and field_of(request, "transfer-encoding"):
            raise self._refusal(Problem.LENGTH_REQUIRED)
        if declared and not _LENGTH.fullmatch(declared):
            raise self._refusal(Problem.BODY_INCOMPLETE)
        self._check_length(int(declared or 0))
        return int(declared or 0)

    def _check_length(self, received: int, declared: int = 0) -> None:
        """Refuses a body that is too large or, once it has ended, shorter than `declared`."""
        if received < declared:
            raise self._refusal(Problem.BODY_INCOMPLETE)
        if received > self._max_body_bytes:
            raise self._refusal(Problem.BODY_TOO_LARGE)

    async def _begin(
        self, exchange: Exchange, request: Any, admitted: tuple[str, ...], fingerprint: Any
    ) -> None:
        """Begins the execution of a request, unless one is running or has a response."""
        with self._refusing():
            key = self._idem.key_of(admitted, fingerprint)
            context = Block(self._idem, key, self._settings)
            execution: Any
            if self._is_async:
                execution = await exchange.enter_async_context(context)
            else:
                execution = exchange.enter_context(context)
            if execution.decision is Decision.RUN:
                exchange.execution = execution
                return
            if execution.decision is Decision.CONFLICT:
                raise self._refusal(Problem.REQUEST_IN_PROGRESS)
            stored = execution.replay
        await self._replay(request, stored)

    async def _settle(self, exchange: Exchange, request: Any, response: Response) -> Headers:
        """Stores the app's response, or releases the key so that a retry runs the request again.

        Returns the fields to add to the response.

        Args:
            response: a body larger than `max_response_bytes` may be cut off beyond that size.
        """
        returned = stored = self._to_store(response)
        with self._refusing():
            if stored is None:
                await exchange.aclose()
            else:
                returned = await self._finished(exchange.execution.complete(stored))
        if returned != stored:  # another execution has completed first
            await self._replay(request, returned)
        return [] if exchange.execution.protected else [(UNPROTECTED_HEADER, "true")]

    async def _finished(self, returned: Any) -> Any:
        """Returns `returned`, awaited first if the app runs on an event loop."""
        return await returned if self._is_async else returned

    async def _replay(self, request: Any, stored: Any) -> NoReturn:
        """Answers with a stored response, unless `authorize_replay` denies it to the client."""
        with self._refusing():
            response = Response.from_record(stored)
        if response is None:
            raise self._refusal(Problem.RESPONSE_NOT_STORED)
        if self._authorize_replay is not None:
            allowed: Any = self._authorize_replay(request)
            while self._is_async and isawaitable(allowed):
                allowed = await allowed
            if not isinstance(allowed, bool):
                kind = type(allowed).__name__
                raise TypeError(f"authorize_replay must return True or False, not {kind}")
            if not allowed:
                raise self._refusal(Problem.REPLAY_FORBIDDEN)
        raise Answered(response)

    def _to_store(self, response: Response) -> dict[str, Any] | None:
        """Returns the data to store; None means that a retry runs the request again."""
        if not self._store_response(response.status, [(n.lower(), v) for n, v in response.headers]):
            return None
        limit = self._max_response_bytes
        if response.status >= 400:
            limit = min(limit, MAX_ERROR_BYTES)
        return response.as_record(limit)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Answers with a problem document if the engine raises in the block."""
        try:
            yield
        except IdempotencyError as error:
            problems = (OF_ERRORS[kind] for kind in OF_ERRORS if isinstance(error, kind))
            if (found := next(problems, None)) is None:
                raise
            if found.value.status == 500 or found is Problem.REQUEST_INCOMPARABLE:
                logger.error("A request with an Idempotency-Key is refused: %s", error)
            raise self._refusal(found) from error

    def _refusal(self, reason: Problem) -> Answered:
        """Returns the exception that sends the client a problem document."""
        text = reason.value
        document = {
            "type": self._problem_type_base + reason.type_name,
            "title": text.title,
            "status": text.status,
            "detail": text.detail.format(max_body_bytes=self._max_body_bytes),
        }
        body = json.dumps(document).encode()
        headers = [("Content-Type", "application/problem+json"), ("Content-Length", str(len(body)))]
        if text.retry:
            headers.append(("Retry-After", str(self._retry_after)))
        return Answered(Response(text.status, headers, body))


def record_key(identity: str, key: str) -> tuple[str, str, str]:
    """Returns the key for the engine; the identity, which may be a credential, is hashed."""
    digest = blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=32)
    return "http", digest.hexdigest(), key
