"""What a server says, whole and in pieces."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from redis.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_idempotent.store.transport.reply_reader import ReplyReader

LONG = b"x" * 200_000
#: As a server writes them, and the values.
SAID: dict[bytes, Any] = {
    b"$5\r\na\r\nbc\r\n": b"a\r\nbc",
    b"$0\r\n\r\n": b"",
    b"$200000\r\n" + LONG + b"\r\n": LONG,
    b"$-1\r\n": None,
    b"_\r\n": None,
    b":-17\r\n": -17,
    b"+PONG\r\n": b"PONG",
    b"*2\r\n:1\r\n$1\r\n2\r\n": [1, b"2"],
    b">2\r\n+MOVING\r\n*1\r\n:1\r\n:5\r\n": 5,
}


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, ReplyReader]]:
    """The server's end, and what is read at the other."""
    server, client = socket.socketpair()
    client.settimeout(5)
    with server, client:
        parser = Connection()._parser
        yield server, ReplyReader(SimpleNamespace(_sock=client, _parser=parser))


class Slow:
    """A connection on which everything comes in small pieces."""

    def __init__(self, said: bytes, size: int) -> None:
        self._left, self._size = said, size
        self._sock, self._parser = self, Connection()._parser

    def recv(self, most: int) -> bytes:
        piece, self._left = self._left[: self._size], self._left[self._size :]
        return piece


@pytest.mark.parametrize("size", [1, 2, 3, 7, 65536])
def test_every_value_is_read_whatever_the_pieces(size: int) -> None:
    answers = ReplyReader(Slow(b"".join(SAID), size))

    assert [answers.next() for _ in SAID] == list(SAID.values())


def test_an_error_is_a_value_of_its_kind() -> None:
    answers = ReplyReader(Slow(b"-NOSCRIPT No matching script.\r\n-ERR unknown command\r\n", 65536))

    known, other = answers.next(), answers.next()

    assert isinstance(known, NoScriptError)
    assert type(other) is ResponseError
    assert str(other) == "unknown command"


def test_what_is_no_answer_is_refused() -> None:
    with pytest.raises(InvalidResponse, match="begins with b'H'"):
        ReplyReader(Slow(b"HTTP/1.1 400 Bad Request\r\n", 65536)).next()


def test_a_server_that_hangs_up_is_told(pair: tuple[socket.socket, ReplyReader]) -> None:
    server, answers = pair
    server.sendall(b"$10\r\nhalf")
    server.close()

    with pytest.raises(RedisConnectionError, match="closed by server"):
        answers.next()


def test_so_is_one_that_says_nothing() -> None:
    server, client = socket.socketpair()
    client.settimeout(0.01)
    with server, client, pytest.raises(RedisTimeoutError):
        ReplyReader(SimpleNamespace(_sock=client, _parser=Connection()._parser)).next()


def test_and_a_connection_that_breaks(pair: tuple[socket.socket, ReplyReader]) -> None:
    _, answers = pair
    answers._receive.__self__.close()  # type: ignore[attr-defined]

    with pytest.raises(RedisConnectionError, match="reading from socket"):
        answers.next()
