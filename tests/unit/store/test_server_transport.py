"""What ServerTransport sends and how it reads replies, with a scripted server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from redis import Connection
from redis._parsers import _HiredisParser, _RESP2Parser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.utils import HIREDIS_AVAILABLE

from celery_idempotent.core.store import run_sync, scripts
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.transport.server import ServerTransport, pack

PARSERS = {"python": _RESP2Parser, **({"hiredis": _HiredisParser} if HIREDIS_AVAILABLE else {})}

LONG = b"x" * 200_000
PUSH = b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\na\r\n"
#: Replies on the wire, and the values that they are read as.
REPLIES: dict[bytes, Any] = {
    b"$5\r\na\r\nbc\r\n": b"a\r\nbc",
    b"$0\r\n\r\n": b"",
    b"$200000\r\n" + LONG + b"\r\n": LONG,
    b":-17\r\n": -17,
    b"+PONG\r\n": b"PONG",
    b"*2\r\n:1\r\n$1\r\n2\r\n": [1, b"2"],
    b"*0\r\n": [],
}
RESP2_REPLIES = {**REPLIES, b"$-1\r\n": None}
RESP3_REPLIES = {**REPLIES, b"_\r\n": None, PUSH + b":5\r\n": 5, PUSH + PUSH + b"+OK\r\n": b"OK"}


class ScriptedServer:
    """Accepts connections and handshakes, and sends `replies` to all other commands in turn.

    Args:
        replies: bytes; None closes the connection.
        size: of the pieces in which replies are sent.
    """

    def __init__(self, *replies: bytes | None, size: int = 65536) -> None:
        self.commands: list[list[bytes]] = []
        self._replies = list(replies)
        self._size = size
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with connection, suppress(OSError, ValueError):
                    self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        reader = connection.makefile("rb")
        while header := reader.readline():
            command = []
            for _ in range(int(header[1:])):
                size = int(reader.readline()[1:])
                command.append(reader.read(size + 2)[:-2])
            if command[0] == b"HELLO":
                connection.sendall(b"%1\r\n+proto\r\n:3\r\n")
            elif command[0] in (b"CLIENT", b"SELECT"):
                connection.sendall(b"+OK\r\n")
            elif command[0] == b"TIME":
                connection.sendall(b"*2\r\n$10\r\n1763726400\r\n$6\r\n123456\r\n")
            else:
                self.commands.append(command)
                reply = self._replies.pop(0) if self._replies else b""
                if reply is None:
                    return
                for start in range(0, len(reply), self._size):
                    connection.sendall(reply[start : start + self._size])

    def close(self) -> None:
        self._listener.close()


Connect = Callable[..., tuple[ScriptedServer, ServerTransport]]


@pytest.fixture(params=PARSERS)
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Start a server with these replies and connect to it, with each of redis-py's parsers."""
    servers = []

    def start(
        *replies: bytes | None, size: int = 65536, protocol: int = 2, timeout: float = 5.0
    ) -> tuple[ScriptedServer, ServerTransport]:
        server = ScriptedServer(*replies, size=size)
        servers.append(server)
        options = {"parser_class": PARSERS[request.param], "protocol": protocol}
        config = StoreConfig(url=f"redis://127.0.0.1:{server.port}", options=options)
        return server, ServerTransport(config, timeout)

    yield start
    for server in servers:
        server.close()


@pytest.mark.parametrize("size", [3, 7, 65536])
@pytest.mark.parametrize(("protocol", "replies"), [(2, RESP2_REPLIES), (3, RESP3_REPLIES)])
def test_replies_are_read_in_pieces_of_any_size(
    connect: Connect, size: int, protocol: int, replies: dict[bytes, Any]
) -> None:
    _, transport = connect(*replies, size=size, protocol=protocol)

    commands = [("ECHO", n) for n in range(len(replies))]
    assert run_sync(transport.send(*commands)) == list(replies.values())


def test_an_error_reply_is_a_value_of_its_class(connect: Connect) -> None:
    _, transport = connect(b"-NOSCRIPT No matching script.\r\n", b"-ERR unknown command\r\n")

    unknown_script, other = run_sync(transport.send(("ECHO", 1), ("ECHO", 2)))

    assert isinstance(unknown_script, NoScriptError)
    assert type(other) is ResponseError
    assert str(other) == "unknown command"


def test_a_reply_that_is_cut_off_is_requested_again(connect: Connect) -> None:
    server, transport = connect(None, b"+PONG\r\n")

    assert run_sync(transport.send(("PING",))) == [b"PONG"]
    assert server.commands == [[b"PING"]] * 2


@pytest.mark.parametrize(
    ("replies", "error"),
    [
        ([b"HTTP/1.1 400 Bad Request\r\n"], InvalidResponse),
        ([None] * 3, RedisConnectionError),
        ([], RedisTimeoutError),
    ],
    ids=["another protocol", "always closed", "no reply"],
)
def test_an_error(connect: Connect, replies: list[bytes | None], error: type[Exception]) -> None:
    _, transport = connect(*replies, timeout=5.0 if replies else 0.02)

    with pytest.raises(error):
        run_sync(transport.send(("PING",)))


def test_arguments_are_sent_as_redis_py_encodes_them(connect: Connect) -> None:
    server, transport = connect(b"+OK\r\n")
    command = ("WAIT", 2, b"\xff\r\n", "ä", "", b"x" * 255, b"x" * 256, LONG)

    run_sync(transport.send(command))

    assert b"".join(Connection().pack_command(*command)) == pack(command)
    assert server.commands[0][:5] == [b"WAIT", b"2", b"\xff\r\n", "ä".encode(), b""]
    assert server.commands[0][5:] == [b"x" * 255, b"x" * 256, LONG]


def test_an_unknown_script_of_a_batch_is_sent_once(connect: Connect) -> None:
    missing = b"-NOSCRIPT No matching script.\r\n"
    replies = (b"$1\r\n%d\r\n" % n for n in range(3))
    server, transport = connect(missing, b"$1\r\n1\r\n", missing, *replies)
    script = scripts.load("forget")

    replies = run_sync(transport.send(*(("EVALSHA", script.sha, 1, "idem:ä", n) for n in range(3))))

    assert replies == [b"0", b"1", b"2"]
    arguments = [[b"1", "idem:ä".encode(), b"%d" % n] for n in range(3)]
    by_digest = [[b"EVALSHA", script.sha.encode(), *each] for each in arguments]
    by_source = [b"EVAL", script.source.encode(), *arguments[0]]
    assert server.commands == [*by_digest, by_source, *by_digest[1:]]
