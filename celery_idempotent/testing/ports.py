"""Ports of one's own, while the servers on them come and go."""

from __future__ import annotations

import random
import socket
import sys
import weakref
from contextlib import ExitStack

from celery_idempotent.testing.process import ServerError, Stoppable

__all__ = ["Ports"]

# Each port and the one of its cluster bus, 10,000 above, lie below the range that systems hand out
# for outgoing connections: while a server is down, no client can be given its port, nor meet
# itself on it.
_PORTS = range(20_000, 22_768)
_BUS = 10_000


class Ports(Stoppable):
    """Ports on 127.0.0.1 that nobody listens on, nor on the port of a cluster bus above.

    On Linux no other process is given them until they are given back: a server can take its time
    to start, and find its port again after a crash. Elsewhere they are but free at the moment.

    Raises:
        ServerError: there are not so many.
    """

    def __init__(self, count: int) -> None:
        self.numbers: list[int] = []
        with ExitStack() as probes:
            for port in random.sample(_PORTS, len(_PORTS)):
                try:
                    for taken in (port, port + _BUS):
                        _hold(probes.enter_context(socket.socket()), taken)
                except OSError:
                    continue
                self.numbers.append(port)
                if len(self.numbers) == count:
                    break
            else:
                raise ServerError(f"No free port from {_PORTS.start} to {_PORTS.stop - 1}.")
            held = probes.pop_all() if sys.platform == "linux" else ExitStack()
        self._give_back = weakref.finalize(self, held.close)

    def stop(self) -> None:
        """Give them back. Twice is once."""
        self._give_back()


def _hold(probe: socket.socket, port: int) -> None:
    """Bind a port that nobody else has bound, so that only who insists can listen there.

    On Linux two sockets can share a port if both would reuse it and neither listens. Servers would;
    this one does not until it has the port, or it could be had twice.
    """
    probe.bind(("127.0.0.1", port))
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
