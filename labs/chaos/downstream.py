"""The downstream system: an account for each order, protected by fencing tokens.

Each execution sends its token when it starts and when it writes. An account keeps the highest token
and rejects lower ones. All requests are stored in their order, whether accepted or not.

It is a service with its own SQLite database, so that a client that is frozen or killed during a
request does not block others.
"""

from __future__ import annotations

import json
import socket
import socketserver
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers.program import Stoppable

_TABLES = """
CREATE TABLE accounts (name TEXT PRIMARY KEY, token INTEGER, receipt TEXT);
CREATE TABLE entries (
    number INTEGER PRIMARY KEY, account TEXT, execution TEXT, token INTEGER, receipt TEXT,
    accepted INTEGER
);
"""
_ADMIT = """
INSERT INTO accounts VALUES (:account, :token, :receipt)
ON CONFLICT (name) DO UPDATE SET token = :token, receipt = coalesce(:receipt, receipt)
WHERE token <= :token
"""
_RECORD = "INSERT INTO entries VALUES (NULL, :account, :execution, :token, :receipt, :accepted)"

#: Timeout of a request, and poll interval of the server's shutdown, in seconds.
_TIMEOUT = 30.0
_POLL_INTERVAL = 0.05


@dataclass(frozen=True)
class Request:
    """A request of an execution: its start (without a receipt) or the write of its receipt."""

    execution: str
    token: int
    receipt: str | None
    accepted: bool


class Downstream(Stoppable):
    """The service, on `port` of 127.0.0.1."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        with _database(path) as database:
            database.executescript(_TABLES)
        lock = threading.Lock()

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                line = self.rfile.readline()
                if not line.endswith(b"\n"):
                    return  # the client was killed
                request = json.loads(line)
                with lock, _database(path) as database:
                    accepted = database.execute(_ADMIT, request).rowcount == 1
                    database.execute(_RECORD, request | {"accepted": accepted})
                self.wfile.write(b"1" if accepted else b"0")

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                """Ignores clients that have disconnected."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(
            target=self._server.serve_forever, args=(_POLL_INTERVAL,), daemon=True
        ).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def send(port: int, account: str, execution: str, token: int, receipt: str | None = None) -> bool:
    """Sends the start of an execution, or its `receipt`; returns whether it is accepted."""
    request = {"account": account, "execution": execution, "token": token, "receipt": receipt}
    with socket.create_connection(("127.0.0.1", port), _TIMEOUT) as connection:
        connection.sendall(json.dumps(request).encode() + b"\n")
        reply = connection.recv(1)
    if not reply:
        raise ConnectionError("the downstream system closed the connection without a reply")
    return reply == b"1"


def receipts(path: Path) -> dict[str, list[str | None]]:
    """Returns the receipt of each account."""
    with _database(path) as database:
        accounts = database.execute("SELECT name, receipt FROM accounts")
        return {name: [receipt] for name, receipt in accounts}


def requests(path: Path) -> dict[str, list[Request]]:
    """Returns all requests in their order, by account."""
    by_account: dict[str, list[Request]] = {}
    query = "SELECT account, execution, token, receipt, accepted FROM entries ORDER BY number"
    with _database(path) as database:
        for account, execution, token, receipt, accepted in database.execute(query):
            request = Request(execution, token, receipt, bool(accepted))
            by_account.setdefault(account, []).append(request)
    return by_account


def stale_accepted(requests: list[Request]) -> int:
    """Counts the writes to an account that were accepted after a later execution had started."""
    newest, accepted = "", 0
    for request in requests:
        if request.receipt is None:
            # A start with a lower token was overtaken before its request arrived.
            newest = request.execution if request.accepted else newest
        elif request.accepted and request.execution != newest:
            accepted += 1
    return accepted


def stale_rejected(requests: list[Request]) -> int:
    """Counts the writes to an account that were rejected."""
    return sum(each.receipt is not None and not each.accepted for each in requests)


@contextmanager
def _database(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA synchronous = OFF")  # the machine does not crash
        with database:
            yield database
