"""A line to Redis for one command at a time, with as little as possible around it.

redis-py's client does for every command what few need: it asks the socket whether the server has
hung up, takes locks, measures, packs piece by piece. That takes longer than Redis does, and the
gate would pay it twice an execution. This is redis-py's connection without the rest, and needs
none of it: a server that hung up is found out by the command itself, which is then sent again, and
every script answers a resend as it answered the first time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

#: Seconds before a command is sent again.
PAUSES = (0.05, 0.1)


class Line:
    """Connections as `client` would make them, the last used first; for any number of threads."""

    def __init__(self, client: Redis) -> None:
        self._make: Callable[[], Any] = client.connection_pool.make_connection
        self._free: list[Any] = []

    def send(self, command: bytes) -> Any:
        """The answer to a packed `command`, which may reach the server more than once.

        Raises:
            ResponseError: if the server answers with an error.
            RedisError, OSError: if it does not answer.
        """
        for pause in (*PAUSES, None):
            connection = self._take()
            try:
                connection.send_packed_command([command], check_health=False)
                answer = connection.read_response()
            except ResponseError:
                self._free.append(connection)
                raise
            except (RedisConnectionError, RedisTimeoutError):
                connection.disconnect()
                # Whatever cut this one off has probably cut off the others.
                self._free.clear()
                if pause is None:
                    raise
                time.sleep(pause)
            except BaseException:
                # Interrupted: the answer is on its way, and must not become another command's.
                connection.disconnect()
                raise
            else:
                self._free.append(connection)
                return answer

    def _take(self) -> Any:
        while self._free:
            try:
                connection = self._free.pop()
            except IndexError:
                break  # another thread was faster
            if connection.pid == os.getpid():  # else it is of the process that this is a fork of
                return connection
        connection = self._make()
        connection.connect()
        return connection


def bulk(value: bytes | str | int) -> bytes:
    """One argument of a command, as Redis reads it."""
    data = value if type(value) is bytes else str(value).encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)
