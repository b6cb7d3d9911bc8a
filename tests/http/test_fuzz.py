"""Random requests, concurrent and broken off: no answer to another identity, nothing twice.

HTTP_FUZZ_EXAMPLES=20000 python -m pytest tests/http/test_fuzz.py --timeout 0
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_idempotent import Idempotency
from celery_idempotent.contrib import asgi, wsgi
from celery_idempotent.contrib.http.middleware import record_key
from celery_idempotent.contrib.http.request import parse_key
from celery_idempotent.core.store import run_sync
from tests.http.drivers import asgi as asgi_server
from tests.http.drivers import wsgi as wsgi_server
from tests.servers.redis_server import RedisServer

MAX_BODY, MAX_RESPONSE = 64, 256
#: Statuses below 500 that do not end a key.
RETRIED = {401, 408, 409, 421, 423, 425, 429}


@dataclass(frozen=True)
class Plan:
    """One request, and what the app and its client do with it."""

    #: The fields X-User and Idempotency-Key.
    users: tuple[str, ...]
    keys: tuple[str, ...]
    method: str
    path: str
    content_type: str
    body: bytes
    #: Into how many messages, or reads, the body is cut.
    cuts: int
    #: Bytes that the client adds to the length that it declares.
    lie: int
    #: The client closes the connection after that many chunks of its body, or of the response.
    leaves_request_after: int | None
    leaves_response_after: int | None
    #: Turns of the event loop after which the server cancels the request (ASGI).
    cancelled_after: int | None
    #: What the app responds.
    status: int
    size: int
    chunks: int
    #: The app raises before that chunk.
    fails_at: int | None
    #: Turns for which the app waits before its response.
    pauses: int

    @property
    def identity(self) -> str | None:
        """The user, as the middleware must identify it; None if it cannot."""
        return self.users[0] if len(self.users) == 1 and self.users[0] else None

    @property
    def key(self) -> str | None:
        """The key, if it is valid."""
        return parse_key(self.keys)

    @property
    def sent(self) -> tuple[str, str, bytes]:
        """What must be the same in a retry."""
        return self.path, self.content_type, self.body

    @property
    def is_plain(self) -> bool:
        """Whether client and server take part to the end."""
        leaves = (self.leaves_request_after, self.leaves_response_after, self.cancelled_after)
        return leaves == (None, None, None) and self.lie == 0

    def content(self, nonce: int) -> list[bytes]:
        """The chunks of the response of the execution `nonce`."""
        text = f"{self.identity}/{nonce}/".encode().ljust(self.size, b".")
        step = -(-len(text) // self.chunks)
        return [text[i * step : (i + 1) * step] for i in range(self.chunks)]


NONCES = itertools.count(1)


@dataclass
class Execution:
    """One execution of the app."""

    plan: Plan
    nonce: int
    #: The app has given its whole response, or so much that it is sent without being stored.
    responded: bool = False
    ended: bool = False

    @property
    def is_final(self) -> bool:
        """Whether its response ends the key."""
        status = self.plan.status
        return self.responded and status < 500 and status not in RETRIED

    @property
    def headers(self) -> list[tuple[str, str]]:
        return [("x-nonce", str(self.nonce)), ("set-cookie", f"session={self.nonce}")]

    def chunks(self) -> Iterator[tuple[bytes, bool]]:
        """Yields the chunks of its response, and whether there are more."""
        sent, chunks = 0, self.plan.content(self.nonce)
        for i, chunk in enumerate(chunks):
            if self.plan.fails_at == i:
                raise AppError
            sent += len(chunk)
            more = i + 1 < len(chunks)
            self.responded = not more or sent > MAX_RESPONSE
            yield chunk, more


@dataclass
class Journal:
    """The executions of one scenario, for each identity and key."""

    executions: dict[Any, list[Execution]] = field(default_factory=lambda: defaultdict(list))
    #: What was sent with each key; a request may be cancelled before it is executed.
    requests: dict[Any, set[Any]] = field(default_factory=lambda: defaultdict(set))
    faults: list[str] = field(default_factory=list)

    def begin(self, plan: Plan) -> Execution:
        """Notes that the app begins to execute a request."""
        execution = Execution(plan, next(NONCES))
        if not plan.keys or plan.method != "POST":
            return execution
        if plan.identity is None or plan.key is None:
            self.faults.append(f"executed without an identity or a key: {plan}")
        if plan.lie > 0 or plan.leaves_request_after is not None or len(plan.body) > MAX_BODY:
            self.faults.append(f"executed with a part of its body: {plan}")
        others = self.executions[plan.identity, plan.key]
        if not all(other.ended or other.responded for other in others):
            self.faults.append(f"two executions at once: {plan}")
        if any(other.is_final for other in others):
            self.faults.append(f"executed after a final response: {plan}")
        others.append(execution)
        return execution


class AppError(Exception):
    """The app raises it on purpose."""


def check(plan: Plan, response: Any, journal: Journal) -> None:
    """Checks one whole response of a client that has stayed."""
    headers = response.headers
    others = journal.executions[plan.identity, plan.key]
    if headers.get("content-type") == "application/problem+json":
        assert plan.keys, plan
        assert "set-cookie" not in headers
        name = json.loads(response.body)["type"].rpartition(":")[2]
        if plan.key is None:
            assert name == "key-invalid", plan
        elif plan.identity is None:
            assert name == "identity-missing", plan
        elif len(plan.body) > MAX_BODY:
            assert name == "body-too-large", plan
        elif name == "key-reused":
            assert len(journal.requests[plan.identity, plan.key]) > 1, plan
        elif name == "response-not-stored":
            assert any(other.is_final and other.plan.size > MAX_RESPONSE for other in others), plan
        else:
            assert name == "request-in-progress", plan
        return
    assert response.status == plan.status or "idempotency-replayed" in headers, plan
    user, nonce, _ = response.body.split(b"/", 2)
    assert user.decode() == str(plan.identity), f"an answer to another identity: {plan}"
    if "idempotency-replayed" in headers:
        (original,) = [other for other in others if other.nonce == int(nonce)]
        assert original.is_final, plan
        assert response.status == original.plan.status
        assert response.body == b"".join(original.plan.content(original.nonce))
        assert headers["x-nonce"] == str(original.nonce)
        assert "set-cookie" not in headers
        assert original.plan.sent == plan.sent
    else:
        assert headers["set-cookie"] == f"session={int(nonce)}"
        assert response.body == b"".join(plan.content(int(nonce)))


def check_end(journal: Journal, states: dict[Any, Any]) -> None:
    """Checks a scenario as a whole.

    Args:
        states: the state of the record of each identity and key, None where there is none.
    """
    assert journal.faults == []
    for name, executions in journal.executions.items():
        final = [execution for execution in executions if execution.is_final]
        assert len(final) <= 1, name
        certain = [e for e in final if e.plan.cancelled_after is None]
        assert states[name] in ((None, "COMPLETED") if not certain else ("COMPLETED",)), name
        if not final:
            assert states[name] is None, name


def mostly(usual: Any, *rare: Any) -> st.SearchStrategy[Any]:
    """Returns the usual value, or one of a list of them; and now and then one of the others."""
    values = usual if isinstance(usual, list) else [usual]
    return st.sampled_from(values * (20 // len(values)) + list(rare))


ODD_KEYS = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=9)
KEYS = mostly([("k1",), ('"k1"',)], ("k2",), ('"k 2"',), (), ("",), ("a,b",), ("k1", "k1"), None)
#: Requests most of whose parts are ordinary.
PLANS = st.builds(
    Plan,
    users=mostly([("alice",), ("bob",)], (), ("",), ("alice", "bob")),
    keys=KEYS.flatmap(lambda keys: st.tuples(ODD_KEYS) if keys is None else st.just(keys)),
    method=mostly("POST", "GET"),
    path=mostly("/pay", "/other"),
    content_type=mostly("", "text/plain", 'multipart/form-data; boundary="x"'),
    body=mostly(b"a", b"", b"b", b"--x\r\n", b"a" * (MAX_BODY + 1)),
    cuts=st.integers(1, 3),
    lie=mostly(0, 3),
    leaves_request_after=mostly(None, 0, 1),
    leaves_response_after=mostly(None, 0, 1, 2),
    cancelled_after=mostly(None, *range(12)),
    status=mostly([200, 404], 201, *RETRIED, 500, 503),
    size=mostly([40, 40, MAX_RESPONSE + 40], 0),
    chunks=st.integers(1, 3),
    fails_at=mostly(None, 0, 1),
    pauses=st.integers(0, 3),
)
SCENARIOS = st.lists(st.lists(PLANS, min_size=1, max_size=4), min_size=1, max_size=5)


pytestmark = pytest.mark.exhaustive

EXAMPLES = int(os.environ.get("HTTP_FUZZ_EXAMPLES", "150"))
OPTIONS = {"max_body_bytes": MAX_BODY, "max_response_bytes": MAX_RESPONSE}

limits = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
fuzz = settings(max_examples=EXAMPLES, **limits)


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
        record = None
        if key is not None:
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
            headers = [(name.encode(), value.encode()) for name, value in execution.headers]
            await send({"type": "http.response.start", "status": plan.status, "headers": headers})
            for chunk, more in execution.chunks():
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
            arriving = messages[: plan.leaves_request_after]
            messages = [{**message, "more_body": True} for message in arriving]
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
        chunks = execution.chunks()
        try:
            write = start_response(f"{plan.status} Any", execution.headers)
            if plan.pauses:
                write(next(chunks)[0])
            for chunk, _ in chunks:
                yield chunk
        finally:
            execution.ended = True

    def request(self, plan: Plan) -> None:
        arrived = cut(plan.body, plan.cuts)[: plan.leaves_request_after]
        leaves = len(arrived) if b"".join(arrived) != plan.body else None
        # As a server joins repeated fields.
        users, keys = ((",".join(each),) if each else () for each in (plan.users, plan.keys))
        plan = replace(plan, users=users, keys=keys, leaves_request_after=leaves)
        self.journal.requests[plan.identity, plan.key].add(plan.sent)
        changes = {"REQUEST_METHOD": plan.method, "PATH_INFO": plan.path, "test.plan": plan}
        changes |= {"CONTENT_LENGTH": str(len(plan.body) + plan.lie), "wsgi.input": Input(arrived)}
        environ = wsgi_server.environ(None, plan.body, headers_of(plan), **changes)
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
