"""Random requests of several clients at once, and what must be true of their responses.

A scenario is a list of rounds; the requests of a round are sent at once. The app follows the plan
of each request, and keeps a journal of its executions, against which the responses are checked.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from celery_idempotent.contrib.http.request import parse_key

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


@dataclass
class Journal:
    """The executions of one scenario, for each identity and key."""

    executions: dict[Any, list[Execution]] = field(default_factory=lambda: defaultdict(list))
    #: What was sent with each key; a request may be cancelled before it is executed.
    requests: dict[Any, set[Any]] = field(default_factory=lambda: defaultdict(set))
    numbers: Iterable[int] = field(default_factory=lambda: itertools.count(1))
    faults: list[str] = field(default_factory=list)

    def begin(self, plan: Plan) -> Execution:
        """Notes that the app begins to execute a request."""
        execution = Execution(plan, next(self.numbers))  # type: ignore[call-overload]
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


ODD_KEYS = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=9).map(
    lambda key: (key,)
)
USERS = mostly([("alice",), ("bob",)], (), ("",), ("alice", "bob"))
KEYS = mostly([("k1",), ('"k1"',)], ("k2",), ('"k 2"',), (), ("",), ("a,b",), ("k1", "k1"), None)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Returns one request, most of whose parts are ordinary."""
    return Plan(
        users=draw(USERS),
        keys=draw(KEYS) or draw(ODD_KEYS),
        method=draw(mostly("POST", "GET")),
        path=draw(mostly("/pay", "/other")),
        content_type=draw(mostly("", "text/plain", 'multipart/form-data; boundary="x"')),
        body=draw(mostly(b"a", b"", b"b", b"--x\r\n", b"a" * (MAX_BODY + 1))),
        cuts=draw(st.integers(1, 3)),
        lie=draw(mostly(0, 3)),
        leaves_request_after=draw(mostly(None, 0, 1)),
        leaves_response_after=draw(mostly(None, 0, 1, 2)),
        cancelled_after=draw(mostly(None, *range(12))),
        status=draw(mostly([200, 404], 201, *RETRIED, 500, 503)),
        size=draw(mostly([40, 40, MAX_RESPONSE + 40], 0)),
        chunks=draw(st.integers(1, 3)),
        fails_at=draw(mostly(None, 0, 1)),
        pauses=draw(st.integers(0, 3)),
    )


SCENARIOS = st.lists(st.lists(plans(), min_size=1, max_size=4), min_size=1, max_size=5)
