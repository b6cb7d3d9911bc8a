"""The system downstream: an account for each order, which asks its writers for their token.

Each execution shows its token when it begins and again when it writes. An account keeps the highest
that it has seen and takes nothing from a lower one. All that is asked is noted in the order in
which it was asked, whether granted or not.

It is a service with an SQLite database of its own, so that a writer that is frozen or killed while
it asks holds up nobody else.
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

from celery_idempotent.testing.process import Stoppable

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
_NOTE = "INSERT INTO entries VALUES (NULL, :account, :execution, :token, :receipt, :accepted)"

#: Seconds: longest wait for an answer, and between two looks whether the service is to end.
_PATIENCE = 30.0
_LOOK_EVERY = 0.05


@dataclass(frozen=True)
class Entry:
    """What one execution asked for: to begin (no receipt), or to write its receipt."""

    execution: str
    token: int
    receipt: str | None
    accepted: bool


class Downstream(Stoppable):
    """The service; it listens on `port` of 127.0.0.1."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        with _database(path) as database:
            database.executescript(_TABLES)
        one_at_a_time = threading.Lock()

        class Asked(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                line = self.rfile.readline()
                if not line.endswith(b"\n"):
                    return  # killed while it asked
                asked = json.loads(line)
                with one_at_a_time, _database(path) as database:
                    accepted = database.execute(_ADMIT, asked).rowcount == 1
                    database.execute(_NOTE, asked | {"accepted": accepted})
                self.wfile.write(b"1" if accepted else b"0")

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                """Whoever asked is gone."""

        self._server = Server(("127.0.0.1", 0), Asked)
        self.port = int(self._server.server_address[1])
        threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_EVERY,), daemon=True
        ).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def ask(port: int, account: str, execution: str, token: int, receipt: str | None = None) -> bool:
    """Begin, or write `receipt`, under `token`; whether that is accepted."""
    asked = {"account": account, "execution": execution, "token": token, "receipt": receipt}
    with socket.create_connection(("127.0.0.1", port), _PATIENCE) as connection:
        connection.sendall(json.dumps(asked).encode() + b"\n")
        answer = connection.recv(1)
    if not answer:
        raise ConnectionError("the system downstream does not answer")
    return answer == b"1"


def receipts(path: Path) -> dict[str, str | None]:
    """What each account says in the end."""
    with _database(path) as database:
        return dict(database.execute("SELECT name, receipt FROM accounts"))


def entries(path: Path) -> dict[str, list[Entry]]:
    """All that was asked for, by account, in that order."""
    asked: dict[str, list[Entry]] = {}
    query = "SELECT account, execution, token, receipt, accepted FROM entries ORDER BY number"
    with _database(path) as database:
        for account, execution, token, receipt, accepted in database.execute(query):
            entry = Entry(execution, token, receipt, bool(accepted))
            asked.setdefault(account, []).append(entry)
    return asked


def stale_accepted(asked: list[Entry]) -> int:
    """Writes to an account that were accepted after a later execution had begun."""
    newest, accepted = "", 0
    for entry in asked:
        if entry.receipt is None:
            # One that begins under a lower token was overtaken before it got here.
            newest = entry.execution if entry.accepted else newest
        elif entry.accepted and entry.execution != newest:
            accepted += 1
    return accepted


def stale_refused(asked: list[Entry]) -> int:
    """Writes to an account that were refused."""
    return sum(entry.receipt is not None and not entry.accepted for entry in asked)


@contextmanager
def _database(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA synchronous = OFF")  # its machine does not crash
        with database:
            yield database
