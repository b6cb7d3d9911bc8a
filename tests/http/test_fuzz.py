"""Random requests, concurrent and broken off: no answer to another identity, nothing twice.

HTTP_FUZZ_EXAMPLES=20000 python -m pytest tests/http/test_fuzz.py --timeout 0
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings

from celery_idempotent import Idempotency
from celery_idempotent.contrib import asgi, wsgi
from celery_idempotent.contrib.http.middleware import record_key
from celery_idempotent.store.run_sync import run_sync
from tests.http.drivers import asgi as asgi_server
from tests.http.drivers import wsgi as wsgi_server
from tests.http.fuzz import (
    MAX_BODY,
    MAX_RESPONSE,
    SCENARIOS,
    AppError,
    Journal,
    Plan,
    check,
    check_end,
)
from tests.servers.redis_server import RedisServer

pytestmark = pytest.mark.exhaustive

EXAMPLES = int(os.environ.get("HTTP_FUZZ_EXAMPLES", "150"))
OPTIONS = {"max_body_bytes": MAX_BODY, "max_response_bytes": MAX_RESPONSE}

fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def engine(server: RedisServer) -> Iterator[Idempotency]:
    engine = Idempotency(server.url, key_prefix=uuid4().hex, name="fuzz", lease=60)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def loop(engine: Idempotency) -> Iterator[asyncio.AbstractEventLoop]:
    """One event loop for all scenarios, so that they share its connections."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.run_until_complete(engine.aclose())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def headers_of(plan: Plan) -> list[tuple[str, str]]:
    headers = [("X-User", user) for user in plan.users]
    headers += [("Idempotency-Key", key) for key in plan.keys]
    return headers + [("Content-Type", plan.content_type)] * bool(plan.content_type)


def cut(body: bytes, pieces: int) -> list[bytes]:
    step = -(-len(body) // pieces) or 1
    return [body[i : i + step] for i in range(0, len(body), step)] or [b""]


def states(engine: Idempotency, journal: Journal, scenario: str) -> dict[Any, str | None]:
    """Returns the state of the record of each identity and key."""
    found: dict[Any, str | None] = {}
    for user, key in journal.executions:
        derived = engine.key_of(record_key(f"{scenario} header x-user: {user}", key))
        record = run_sync(engine.executor.store.get(derived))
        found[user, key] = None if record is None else record.state.value
    return found


class Scenario:
    """Requests of several clients to a middleware; identities begin with the scenario's name."""

    #: Has the middleware and `by_header`.
    module: Any

    def __init__(self, engine: Idempotency) -> None:
        self.name = uuid4().hex
        self.journal = Journal()
        by_user = self.module.by_header("X-User")

        def identity(request: Any) -> str | None:
            user = by_user(request)
            return user and f"{self.name} {user}"

        middleware = self.module.IdempotencyMiddleware
        self.app = middleware(self.respond, engine, identity=identity, **OPTIONS)


class AsgiScenario(Scenario):
    """Runs a scenario with the ASGI middleware."""

    module = asgi

    async def respond(self, scope: Any, receive: Any, send: Any) -> None:
        plan: Plan = scope["plan"]
        execution = self.journal.begin(plan)
        try:
            for _ in range(plan.pauses):
                await asyncio.sleep(0)
            headers = [(b"x-nonce", b"%d" % execution.nonce)]
            headers.append((b"set-cookie", b"session=%d" % execution.nonce))
            await send({"type": "http.response.start", "status": plan.status, "headers": headers})
            sent = 0
            chunks = plan.content(execution.nonce)
            for i, chunk in enumerate(chunks):
                if plan.fails_at == i:
                    raise AppError
                sent += len(chunk)
                more = i + 1 < len(chunks)
                execution.responded = not more or sent > MAX_RESPONSE
                await send({"type": "http.response.body", "body": chunk, "more_body": more})
        finally:
            execution.ended = True

    async def request(self, plan: Plan) -> None:
        self.journal.requests[plan.identity, plan.key].add(plan.sent)
        length = len(plan.body) + plan.lie
        headers = [*headers_of(plan), *([("Content-Length", str(length))] * bool(plan.lie))]
        scope = asgi_server.scope(None, headers, method=plan.method, path=plan.path, plan=plan)
        messages = asgi_server.body_messages(*cut(plan.body, plan.cuts))
        if plan.leaves_request_after is not None:
            messages = [
                {**message, "more_body": True} for message in messages[: plan.leaves_request_after]
            ]
            messages.append(asgi_server.DISCONNECT)
        sent = 0

        async def send(message: Any) -> None:
            nonlocal sent
            sent += 1
            if plan.leaves_response_after is not None and sent > plan.leaves_response_after:
                raise OSError("the client is gone")

        sending = asyncio.ensure_future(asgi_server.request(self.app, scope, messages, send))
        if plan.cancelled_after is not None:
            for _ in range(plan.cancelled_after):
                await asyncio.sleep(0)
            sending.cancel()
        try:
            response = await sending
        except (AppError, OSError, asyncio.CancelledError):
            return
        if plan.is_plain and response.messages:
            check(plan, response, self.journal)

    async def run(self, rounds: list[list[Plan]]) -> None:
        for plans in rounds:
            await asyncio.gather(*(self.request(plan) for plan in plans))


class WsgiScenario(Scenario):
    """Runs a scenario with the WSGI middleware."""

    module = wsgi

    def respond(self, environ: Any, start_response: Any) -> Iterator[bytes]:
        plan: Plan = environ["test.plan"]
        execution = self.journal.begin(plan)
        try:
            headers = [("X-Nonce", str(execution.nonce))]
            headers.append(("Set-Cookie", f"session={execution.nonce}"))
            write = start_response(f"{plan.status} Any", headers)
            sent = 0
            chunks = plan.content(execution.nonce)
            for i, chunk in enumerate(chunks):
                if plan.fails_at == i:
                    raise AppError
                sent += len(chunk)
                execution.responded = i + 1 == len(chunks) or sent > MAX_RESPONSE
                if i == 0 and plan.pauses:
                    write(chunk)
                else:
                    yield chunk
        finally:
            execution.ended = True

    def request(self, plan: Plan) -> None:
        arrived = cut(plan.body, plan.cuts)[: plan.leaves_request_after]
        plan = replace(
            plan,
            # As a server joins repeated fields.
            users=(",".join(plan.users),) if plan.users else (),
            keys=(",".join(plan.keys),) if plan.keys else (),
            leaves_request_after=len(arrived) if b"".join(arrived) != plan.body else None,
        )
        self.journal.requests[plan.identity, plan.key].add(plan.sent)
        environ = wsgi_server.environ(
            None,
            plan.body,
            headers_of(plan),
            REQUEST_METHOD=plan.method,
            PATH_INFO=plan.path,
            CONTENT_LENGTH=str(len(plan.body) + plan.lie),
            **{"test.plan": plan, "wsgi.input": Input(arrived)},
        )
        try:
            response = wsgi_server.request(self.app, environ, validate=False)
        except (AppError, OSError):
            return
        if plan.is_plain:
            check(plan, response, self.journal)

    def run(self, rounds: list[list[Plan]], threads: ThreadPoolExecutor) -> None:
        for plans in rounds:
            for sending in [threads.submit(self.request, plan) for plan in plans]:
                sending.result()


class Input(BytesIO):
    """The part of a body that arrives, in short reads."""

    def __init__(self, arrived: list[bytes]) -> None:
        super().__init__(b"".join(arrived))
        self.step = max(map(len, arrived), default=0) or 1

    def read(self, size: int | None = -1) -> bytes:
        return super().read(min(size, self.step) if size and size > 0 else size)


@fuzz
@given(SCENARIOS)
def test_asgi(engine: Idempotency, loop: Any, rounds: list[list[Plan]]) -> None:
    scenario = AsgiScenario(engine)
    loop.run_until_complete(scenario.run(rounds))
    check_end(scenario.journal, states(engine, scenario.journal, scenario.name))


@fuzz
@given(SCENARIOS)
def test_wsgi(engine: Idempotency, rounds: list[list[Plan]]) -> None:
    scenario = WsgiScenario(engine)
    with ThreadPoolExecutor(3) as threads:
        scenario.run(rounds, threads)
    check_end(scenario.journal, states(engine, scenario.journal, scenario.name))
