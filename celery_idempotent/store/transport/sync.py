"""A line to one server, with as little as possible around each command.

redis-py's client does for every command what few need: it asks the socket whether the server has
hung up, takes locks, measures, packs and reads piece by piece. That takes longer than Redis does,
and the gate would pay it twice an execution. This is redis-py's connection without the rest, and
needs none of it: a server that hung up is found out by the command itself, which is then sent
again, and every script answers a resend as it answered the first time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ReadOnlyError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_idempotent.store.scripts import Script
from celery_idempotent.store.transport.connection import close_client
from celery_idempotent.store.transport.reply_reader import ReplyReader

#: Seconds before a command is sent again: first at once, since a connection may have gone stale.
PAUSES = (0.0, 0.1)


class ScriptCall(NamedTuple):
    """One script on one record."""

    script: Script
    #: The record's in Redis.
    name: str
    arguments: Sequence[Any]


class SyncTransport:
    """Connections as `client` would make them, the last used first; for any number of threads.

    Args:
        client: whose connections do not try again by themselves.
        timeout: seconds after which a command is not sent again any more.
    """

    def __init__(self, client: Redis, timeout: float) -> None:
        # A pool's own make_connection counts, never hears of a connection that is gone, and refuses
        # at its limit: after a hundred of them (redis-py 8) a process could connect no more.
        self._client = client
        self._pool = pool = client.connection_pool
        self._make: Callable[[], Any] = lambda: pool.connection_class(**pool.connection_kwargs)
        self._timeout = timeout
        self._free: list[tuple[Any, ReplyReader]] = []

    def call(self, call: ScriptCall, *, followup: Sequence[Any] = ()) -> list[Any]:
        """The answer to `call`, and to the command `then` behind it on the same connection.

        One round trip; two when the server has yet to learn the script.

        Raises:
            ResponseError: if the server answers with an error.
            RedisError, OSError: if it does not answer.
        """
        behind = [packed(followup)] if followup else []
        answers = self.send([by_sha(call), *behind])
        if isinstance(answers[0], NoScriptError):
            # Flushed, restarted or failed over. EVAL runs it and makes it known.
            answers = self.send([by_source(call), *behind])
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def call_all(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """The answer to each of `calls`, or the error that is its answer, in one round trip.

        Raises:
            RedisError, OSError: if the server does not answer.
        """
        answers = self.send([*map(by_sha, calls)])
        unknown = [n for n, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            # The first of each script makes it known to the others behind it.
            first = {calls[n].script.sha: n for n in reversed(unknown)}
            again = self.send(
                [by_source(calls[n]) if n in first.values() else by_sha(calls[n]) for n in unknown]
            )
            for n, answer in zip(unknown, again, strict=True):
                answers[n] = answer
        return answers

    def pool_for(self, name: str) -> Any:
        """The connection pool of the server that has the record of this name."""
        return self._pool

    def ping(self) -> None:
        """Make sure that the server answers; raise what it, or the way to it, did wrong."""
        (answer,) = self.send([packed(("PING",))])
        if isinstance(answer, Exception):
            raise answer

    def send(self, requests: Sequence[bytes]) -> list[Any]:
        """The answers to packed `requests`, errors as values; they may reach the server repeatedly.

        Raises:
            RedisError, OSError: if there is one without an answer.
        """
        started = time.monotonic()
        for pause in (*PAUSES, None):
            try:
                return self._send_once(requests)
            except (RedisConnectionError, RedisTimeoutError, ReadOnlyError):
                # Whatever cut this connection off has probably cut off the others.
                self._free.clear()
                spent = time.monotonic() - started
                if pause is None or spent > 0.6 * self._timeout:
                    raise
                time.sleep(pause)
        raise AssertionError("unreachable")

    def _send_once(self, requests: Sequence[bytes]) -> list[Any]:
        taken = self._take()
        connection, said = taken
        try:
            connection.send_packed_command(requests, check_health=False)
            answers = [said.next() for _ in requests]
            for answer in answers:
                if isinstance(answer, (RedisConnectionError, ReadOnlyError)):
                    raise answer
        except BaseException:
            # Interrupted, perhaps: an answer is on its way, and must not become another command's.
            connection.disconnect()
            raise
        self._free.append(taken)
        return answers

    def _take(self) -> tuple[Any, ReplyReader]:
        while self._free:
            try:
                taken = self._free.pop()
            except IndexError:
                break  # another thread was faster
            if taken[0].pid == os.getpid():  # else it is of the process that this is a fork of
                return taken
        connection = self._make()
        connection.connect()
        return connection, ReplyReader(connection)

    def close(self) -> None:
        """Hang up; the next command connects again."""
        while self._free:
            self._free.pop()[0].disconnect()
        close_client(self._client)


def packed(args: Sequence[Any]) -> bytes:
    """A command, as Redis reads it."""
    return b"*%d%b\r\n" % (len(args), _bulks(args))


def by_sha(call: ScriptCall) -> bytes:
    """The command that calls a script which the server knows."""
    return _head("EVALSHA", call.script.sha, len(call.arguments)) + _rest(call)


def by_source(call: ScriptCall) -> bytes:
    """The command that calls any script."""
    return _head("EVAL", call.script.source, len(call.arguments)) + _rest(call)


@cache
def _head(command: str, script: str, arguments: int) -> bytes:
    return b"*%d%b" % (4 + arguments, _bulks((command, script, 1)))


def _rest(call: ScriptCall) -> bytes:
    return _bulks((call.name, *call.arguments)) + b"\r\n"


#: What stands before a word of so many bytes; the line that it ends is that of the word before it.
_SIZES = [b"\r\n$%d\r\n" % size for size in range(256)]


def _bulks(args: Sequence[Any]) -> bytes:
    parts: list[bytes] = []
    for word in args:
        data = word if type(word) is bytes else str(word).encode()
        size = len(data)
        parts += _SIZES[size] if size < 256 else b"\r\n$%d\r\n" % size, data
    return b"".join(parts)
