"""Hears that a record changes: at once, and without asking again and again.

A server tells a connection under CLIENT TRACKING which of the keys that it has read have changed
since. In the protocol that every client speaks there is no place for such news between answers, so
they come on a second connection, which has subscribed to them.

News may be lost with a connection. Whoever waits looks again by himself now and then.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import redis

from celery_idempotent.store.transport.connection import CONNECTION_ERRORS

logger = logging.getLogger(__name__)

CHANNEL = "__redis__:invalidate"
#: Bytes that differ between any two states of a record: all that has a fixed place.
HEAD = 16

#: Seconds between two looks where a server does not tell.
POLL_INTERVAL = 0.2
#: Seconds before it is asked again whether it does.
RETRY_TRACKING_AFTER = 10.0

#: redis-py before 5 speaks no other.
_OLD_PROTOCOL = {"protocol": 2} if int(redis.__version__.partition(".")[0]) >= 5 else {}
#: Options of a connection that redis-py 8 refuses with it.
_OF_NEW_PROTOCOL = ("maint_notifications", "oss_cluster_maint_notifications")


def connector(server: Any) -> Callable[[], Any]:
    """Makes connections as `server`'s own are: a pool's, or a node's of a cluster."""
    options = {
        name: value
        for name, value in server.connection_kwargs.items()
        if not name.startswith(_OF_NEW_PROTOCOL)
    } | _OLD_PROTOCOL
    return lambda: server.connection_class(**options)


def is_invalidation(message: Any, name: str) -> bool:
    """Whether what was heard is about the record of this name."""
    changed = message[2]
    return changed is None or name.encode() in changed  # None: the server forgot all of them


class TrackingStatus:
    """Whether the servers tell; if not, they are asked again after a while."""

    def __init__(self) -> None:
        self._deaf_until = 0.0

    def is_unavailable(self) -> bool:
        """Whether looking is all there is, for now."""
        return time.monotonic() < self._deaf_until

    def lost(self, error: Exception) -> None:
        """A server does not tell: it is away, or its user may not ask for this."""
        logger.debug("Waiting calls look every %g s: %s", POLL_INTERVAL, error)
        self._deaf_until = time.monotonic() + RETRY_TRACKING_AFTER


class InvalidationListener:
    """For any number of threads.

    Args:
        server_of: gives the connection pool of the server that has the record of a name.
    """

    def __init__(self, pool_for: Callable[[str], Any]) -> None:
        self._server_of = pool_for
        self._free: WeakKeyDictionary[Any, list[TrackedConnection]] = WeakKeyDictionary()
        self._hearing = TrackingStatus()

    def wait_for_change(self, name: str, seen: bytes, seconds: float) -> None:
        """Return soon after the record is no longer what was `seen`, or after `seconds`."""
        if not self._hearing.is_unavailable():
            try:
                return self._hear(name, seen, seconds)
            except CONNECTION_ERRORS as error:
                self._hearing.lost(error)
        time.sleep(min(seconds, POLL_INTERVAL))
        return None

    def _hear(self, name: str, seen: bytes, seconds: float) -> None:
        server = self._server_of(name)
        free = self._free.setdefault(server, [])
        used = _take(free)
        ear = used or TrackedConnection(connector(server))
        try:
            if used is None:
                ear.open()
            ear.wait(name, seen, seconds)
        except BaseException as error:
            ear.close()
            if used is None or not isinstance(error, CONNECTION_ERRORS):
                raise
            free.clear()  # whatever cut this one off has probably cut off the others
        else:
            free.append(ear)

    def close(self) -> None:
        """Hang up; the next call connects again."""
        for free in self._free.values():
            while free:
                free.pop().close()


def _take(free: list[TrackedConnection]) -> TrackedConnection | None:
    while free:
        try:
            ear = free.pop()
        except IndexError:
            break  # another thread was faster
        if ear.pid == os.getpid():  # else it is of the process that this is a fork of
            return ear
    return None


class TrackedConnection:
    """One connection that asks, and one that hears."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self.pid = os.getpid()
        self._hears, self._asks = connect(), connect()

    def open(self) -> None:
        self._hears.connect()
        self._asks.connect()
        number = _ask(self._hears, "CLIENT", "ID")
        _ask(self._hears, "SUBSCRIBE", CHANNEL)
        _ask(self._asks, "CLIENT", "TRACKING", "ON", "REDIRECT", number)

    def wait(self, name: str, seen: bytes, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._hears.can_read(0):
            self._hears.read_response()  # about what somebody waited for before
        if _ask(self._asks, "GETRANGE", name, 0, HEAD - 1) != seen[:HEAD]:
            return
        while (left := until - time.monotonic()) > 0:
            if self._hears.can_read(left) and is_invalidation(self._hears.read_response(), name):
                return

    def close(self) -> None:
        self._hears.disconnect()
        self._asks.disconnect()


def _ask(connection: Any, *args: Any) -> Any:
    connection.send_command(*args)
    return connection.read_response()
