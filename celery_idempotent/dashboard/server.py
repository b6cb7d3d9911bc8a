"""Serves the dashboard by uvicorn, adding limits of connections and of the time of a request."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from celery_idempotent.core.events.report import Repeats, like_it

logger = logging.getLogger(__name__)

#: Maximum open connections. A browser opens six; a process may have 256 files open on some systems.
MAX_CONNECTIONS = 100
#: Maximum seconds from a connection, or from a response, to the end of the next request.
REQUEST_SECONDS = 10.0
#: Maximum seconds for open requests to end.
SHUTDOWN_SECONDS = 2

_closed = Repeats()


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol of one connection, which closes it if the request does not arrive.

    If there are too many connections, it closes the one that has waited longest for a request, or
    for its client to read a response.
    """

    #: Closes the connection unless a whole request has arrived.
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts a connection; closes another one, or this one, if there are too many."""
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > MAX_CONNECTIONS:
            others = [each for each in self.connections if isinstance(each, LimitedProtocol)]
            idle = [each for each in others if each.is_waiting or each.flow.write_paused]
            idle = [each for each in idle if each is not self]
            min(idle, key=LimitedProtocol.closes_at, default=self).close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timer."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        super().on_response_complete()
        self._await_request()

    @property
    def is_waiting(self) -> bool:
        """Whether the next request has not arrived as a whole."""
        cycle: Any = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def closes_at(self) -> float:
        """Returns the time of the event loop by which the request must have arrived."""
        return self._timer.when() if self._timer else 0.0

    def close(self) -> None:
        """Closes the connection without a response."""
        self.connections.discard(self)
        self.transport.abort()
        if (others := _closed.left_out(None)) is not None:
            logger.warning("Closed a connection without a complete request%s", like_it(others))

    def _await_request(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(REQUEST_SECONDS, self._close_if_waiting)

    def _close_if_waiting(self) -> None:
        if self.is_waiting:
            self.close()


def config(application: ASGIApp) -> uvicorn.Config:
    """Returns the configuration of a server with these limits."""
    return uvicorn.Config(
        application,
        http=LimitedProtocol,
        ws="none",
        # At a lower level, each malformed request would be a warning.
        log_level="error",
        # If the process has no more file descriptors, asyncio logs an error for each connection in
        # the backlog.
        backlog=MAX_CONNECTIONS,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )


def serve(application: ASGIApp, listener: socket.socket) -> None:
    """Serves until a signal ends the process."""
    uvicorn.Server(config(application)).run(sockets=[listener])
