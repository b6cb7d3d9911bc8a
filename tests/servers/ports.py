"""Reserves TCP ports on the loopback interface while servers start, crash and restart."""

from __future__ import annotations

import random
import socket
import sys
import weakref
from contextlib import ExitStack

from tests.servers.program import ServerError, Stoppable

__all__ = ["Ports"]

# Each port and its cluster bus port, 10,000 above, are below the range that systems use for
# outgoing connections: while a server is down, no client can be assigned its port or connect to
# itself on it.
_PORTS = range(20_000, 22_768)
_BUS_OFFSET = 10_000


class Ports(Stoppable):
    """Unused ports on 127.0.0.1 whose cluster bus ports are unused as well.

    On Linux the ports stay reserved until `stop`: no other process can be assigned them while a
    server starts or is down. On other systems they are only unused at the time of the call.

    Raises:
        ServerError: fewer than `count` ports are free.
    """

    def __init__(self, count: int) -> None:
        self.numbers: list[int] = []
        with ExitStack() as sockets:
            for port in random.sample(_PORTS, len(_PORTS)):
                try:
                    for number in (port, port + _BUS_OFFSET):
                        _reserve(sockets.enter_context(socket.socket()), number)
                except OSError:
                    continue
                self.numbers.append(port)
                if len(self.numbers) == count:
                    break
            else:
                raise ServerError(f"No free port from {_PORTS.start} to {_PORTS.stop - 1}.")
            reserved = sockets.pop_all() if sys.platform == "linux" else ExitStack()
        self._release = weakref.finalize(self, reserved.close)

    def stop(self) -> None:
        """Releases the ports. A second call has no effect."""
        self._release()


def _reserve(holder: socket.socket, port: int) -> None:
    """Binds a free port in such a way that only a server with SO_REUSEADDR can listen on it.

    On Linux two sockets can share a port if both set SO_REUSEADDR and neither listens. Servers set
    it; this socket sets it only after bind, so that the same port is not reserved twice.
    """
    holder.bind(("127.0.0.1", port))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
