"""A TCP proxy that injects faults between a client and a server.

    with Proxy(server.url) as proxy:
        store = RecordStore(proxy.url, …)
        proxy.lose_reply(to="EVALSHA")

It works with any server that has a URL: Redis, RabbitMQ. Faults that affect one reply require a
client that waits for each reply: the next data from the server is taken as the reply to everything
that the client has sent since the previous reply. Faults that affect all connections (`refuse`,
`black_hole`, `jitter`) last until `heal`.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
from dataclasses import dataclass
from urllib.parse import urlsplit

from tests.servers.program import Ports, Stoppable

_CHUNK = 1 << 20
_DEFAULT_PORTS = {"redis": 6379, "rediss": 6379, "amqp": 5672, "amqps": 5671}


@dataclass
class _Fault:
    #: "cut": close instead of forwarding the request; "lose": close instead of forwarding the
    #: reply; "swallow": drop the reply, and leave the connection open; "delay": forward the reply
    #: later.
    kind: str
    #: Bytes that identify the request.
    to: bytes
    seconds: float = 0.0
    #: The delay begins when this is set.
    after: threading.Event | None = None


class Proxy(Stoppable):
    """Forwards connections to the server at `url`; the end of a `with` block stops it.

    Attributes:
        url: the server's URL with the proxy's address.
        port: the port on which it listens.
        requests: the requests of all clients, in order; one is what a client sends between replies.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._target = (parts.hostname, parts.port or _DEFAULT_PORTS[parts.scheme])
        self._ports = Ports(1)
        (self.port,) = self._ports.numbers
        credentials, at, _ = parts.netloc.rpartition("@")
        self.url = parts._replace(netloc=f"{credentials}{at}127.0.0.1:{self.port}").geturl()
        self.requests: list[bytearray] = []
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self._connections: set[socket.socket] = set()
        self._ended = threading.Event()
        self._open = threading.Event()
        self._open.set()
        self._jitter = (0.0, 0.0)
        self._listener: socket.socket | None = None
        self._listen()

    # Faults of one request or reply

    def lose_request(self, to: str) -> None:
        """Drops the next request that contains `to`, and closes its connection."""
        self._plan(_Fault("cut", to.encode()))

    def lose_reply(self, to: str) -> None:
        """Drops the reply to the next request that contains `to`, and closes its connection."""
        self._plan(_Fault("lose", to.encode()))

    def swallow_reply(self, to: str) -> None:
        """Drops the reply to the next request that contains `to`; its connection stays open."""
        self._plan(_Fault("swallow", to.encode()))

    def delay_reply(self, to: str, seconds: float, after: threading.Event | None = None) -> None:
        """Delays the reply to the next request that contains `to`, from `after` on."""
        self._plan(_Fault("delay", to.encode(), seconds, after))

    # Faults of all connections

    def cut(self) -> int:
        """Closes every connection (FIN), and returns their number."""
        connections = self._connected()
        for connection in connections:
            _shut(connection, socket.SHUT_RDWR)
        return len(connections)

    def refuse(self) -> int:
        """Refuses new connections and closes the others; returns how many were closed."""
        if self._listener is not None:
            _shut(self._listener, socket.SHUT_RDWR)  # unblocks accept
            self._listener.close()
            self._acceptor.join()
            self._listener = None
        return self.cut()

    def black_hole(self) -> None:
        """Forwards no data, in either direction; connections are accepted and stay open."""
        self._open.clear()

    def jitter(self, shortest: float, longest: float) -> None:
        """Delays all data, in both directions, by a random time between these seconds."""
        self._jitter = (shortest, longest)

    def heal(self) -> None:
        """Ends the faults of all connections, and forwards the data that was held back."""
        self._jitter = (0.0, 0.0)
        self._open.set()
        if self._listener is None:
            self._listen()

    # Observations

    def requests_with(self, part: str) -> list[bytes]:
        """Returns the requests that contain `part`."""
        with self._lock:
            return [bytes(request) for request in self.requests if part.encode() in request]

    @property
    def pending(self) -> int:
        """The number of faults that have not happened yet."""
        with self._lock:
            return len(self._faults)

    def stop(self) -> None:
        """Closes all connections and stops listening."""
        self._ended.set()
        self.refuse()
        self._open.set()
        self._ports.stop()

    def _plan(self, fault: _Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def _due(self, request: bytearray) -> _Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.to in request:
                    self._faults.remove(fault)
                    return fault
        return None

    def _connected(self) -> list[socket.socket]:
        with self._lock:
            return list(self._connections)

    def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._acceptor = threading.Thread(target=self._accept, args=(self._listener,), daemon=True)
        self._acceptor.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # closed
                return
            with self._lock:
                self._connections.add(client)
            threading.Thread(target=self._run, args=(client,), daemon=True).start()

    def _run(self, client: socket.socket) -> None:
        # The end of either connection closes the other.
        try:
            self._open.wait()
            with contextlib.suppress(OSError), socket.create_connection(self._target) as server:
                self._forward(client, server)
        finally:
            with self._lock:
                self._connections.discard(client)
            client.close()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        request: bytearray | None = None
        fault: _Fault | None = None
        while True:
            ready, _, _ = select.select([client, server], [], [])
            if client in ready:
                data = client.recv(_CHUNK)
                if not data:
                    return
                request = self._record(request, data)
                fault = fault or self._due(request)
                if fault and fault.kind == "cut":
                    return
                self._delay()
                server.sendall(data)
            if server in ready:
                data = server.recv(_CHUNK)
                if not data or (fault and fault.kind == "lose"):
                    return
                request = None
                if fault and fault.kind == "swallow":
                    continue
                if fault:
                    if fault.after is not None:
                        fault.after.wait()
                    self._ended.wait(fault.seconds)
                    fault = None
                self._delay()
                client.sendall(data)

    def _delay(self) -> None:
        """Waits for as long as a fault of all connections holds data back."""
        if any(self._jitter):
            self._ended.wait(random.uniform(*self._jitter))
        self._open.wait()

    def _record(self, request: bytearray | None, data: bytes) -> bytearray:
        with self._lock:
            if request is None:
                request = bytearray()
                self.requests.append(request)
            request += data
            return request


def _shut(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(how)
