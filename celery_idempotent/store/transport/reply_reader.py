"""What a server says on one connection, value by value: RESP 2 and 3, as far as scripts use them.

redis-py's own reader does the same with a stream, a position and a dozen calls for each value. An
answer of ours is nearly always one text that comes whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse
from redis.exceptions import TimeoutError as RedisTimeoutError

_AT_A_TIME = 65536


class ReplyReader:
    """Reads one after the other.

    Args:
        connection: one of redis-py's, connected; nobody else reads from it.
    """

    def __init__(self, connection: Any) -> None:
        self._receive: Callable[[int], bytes] = connection._sock.recv  # noqa: SLF001
        self._error: Callable[[str], Exception] = connection._parser.parse_error  # noqa: SLF001
        #: What has come and is not read yet.
        self._come = b""

    def next(self) -> Any:
        """The next value; an error of the server's is a value, too.

        Raises:
            RedisError, OSError: if none comes, or what comes is none.
        """
        transport = self._take_line()
        classes, rest = transport[:1], transport[1:]
        if classes == b"$":
            size = int(rest)
            return None if size < 0 else self._take(size)
        if classes == b"-":
            return self._error(rest.decode(errors="replace"))
        if classes == b":":
            return int(rest)
        if classes == b"+":
            return rest
        if classes == b"*":
            return [self.next() for _ in range(int(rest))]
        if classes == b"_":
            return None
        if classes == b">":  # pushed by the server, and an answer to nothing
            for _ in range(int(rest)):
                self.next()
            return self.next()
        raise InvalidResponse(f"Redis has answered something that begins with {classes!r}")

    def _take_line(self) -> bytes:
        while (end := self._come.find(b"\r\n")) < 0:
            self._come += self._more()
        transport, self._come = self._come[:end], self._come[end + 2 :]
        return transport

    def _take(self, size: int) -> bytes:
        if len(self._come) < size + 2:
            parts, left = [self._come], size + 2 - len(self._come)
            while left > 0:
                parts.append(self._more())
                left -= len(parts[-1])
            self._come = b"".join(parts)
        text, self._come = self._come[:size], self._come[size + 2 :]
        return text

    def _more(self) -> bytes:
        try:
            data = self._receive(_AT_A_TIME)
        except TimeoutError:
            raise RedisTimeoutError("Timeout reading from socket") from None
        except OSError as error:
            raise RedisConnectionError(f"Error while reading from socket: {error}") from error
        if not data:
            raise RedisConnectionError("Connection closed by server.")
        return data
