"""A TCP proxy before a server that loses, swallows, delays or refuses what it is told to.

    with Proxy(server.url) as proxy:
        store = RecordStore(proxy.url, …)
        proxy.lose_reply(to="EVALSHA")

It stands before any server that has a URL: Redis, RabbitMQ. Faults of one reply rely on a client
that waits for its replies: what arrives from the server next is the reply to what the client has
sent since the last one. What happens to the whole way (`refuse`, `black_hole`) lasts until `heal`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from dataclasses import dataclass
from urllib.parse import urlsplit

from celery_idempotent.testing.ports import Ports
from celery_idempotent.testing.process import Stoppable

_CHUNK = 1 << 20
_DEFAULT_PORTS = {"redis": 6379, "rediss": 6379, "amqp": 5672, "amqps": 5671}

#: On, and no time to linger: closing resets the connection.
_RESET = struct.pack("ii", 1, 0)


@dataclass
class _Fault:
    #: "cut": close before the request gets through; "lose": close instead of passing the reply on;
    #: "swallow": pass nothing on, and leave the connection open; "delay": pass it on later.
    kind: str
    #: Part of the request that it waits for.
    to: bytes
    seconds: float = 0.0


class Proxy(Stoppable):
    """Listens on a port of its own for the server at `url`; leaving the `with` block ends it.

    Attributes:
        url: of the same database or virtual host through the proxy.
        port: that it listens on.
        requests: what a client sent before it waited for a reply, all clients', in order.
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
        self._listener: socket.socket | None = None
        self._listen()

    # To one request or reply

    def lose_request(self, to: str) -> None:
        """The next request with `to` in it never reaches the server; the connection ends."""
        self._plan(_Fault("cut", to.encode()))

    def lose_reply(self, to: str) -> None:
        """The server acts on the next request with `to` in it; then the connection ends."""
        self._plan(_Fault("lose", to.encode()))

    def swallow_reply(self, to: str) -> None:
        """The server acts on the next request with `to` in it, and nothing comes back."""
        self._plan(_Fault("swallow", to.encode()))

    def delay_reply(self, to: str, seconds: float) -> None:
        """The reply to the next request with `to` in it comes `seconds` later."""
        self._plan(_Fault("delay", to.encode(), seconds))

    # To all connections

    def cut(self) -> int:
        """End every connection now, in order (FIN); how many there were."""
        connections = self._connected()
        for connection in connections:
            _shut(connection, socket.SHUT_RDWR)
        return len(connections)

    def reset(self) -> int:
        """End every connection now, as a crash would (RST); how many there were."""
        connections = self._connected()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            # Its thread reads the end of what comes in, and closes it.
            _shut(connection, socket.SHUT_RD)
        return len(connections)

    def refuse(self) -> int:
        """Take no more connections and end those that there are, as if the server were gone."""
        if self._listener is not None:
            _shut(self._listener, socket.SHUT_RDWR)  # wakes up who waits in accept
            self._listener.close()
            self._acceptor.join()
            self._listener = None
        return self.cut()

    def black_hole(self) -> None:
        """Hold back whatever either side says; connections are taken and stay open."""
        self._open.clear()

    def heal(self) -> None:
        """Be a mere wire again; what a black hole held back arrives now."""
        self._open.set()
        if self._listener is None:
            self._listen()

    # What was there

    def requests_with(self, part: str) -> list[bytes]:
        """The requests that have `part` in them."""
        with self._lock:
            return [bytes(request) for request in self.requests if part.encode() in request]

    @property
    def pending(self) -> int:
        """How many faults have yet to happen."""
        with self._lock:
            return len(self._faults)

    def stop(self) -> None:
        """End all connections, and take no more."""
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
        # Whichever side goes, the other goes with it.
        try:
            self._open.wait()
            with contextlib.suppress(OSError), socket.create_connection(self._target) as server:
                self._pass_on(client, server)
        finally:
            with self._lock:
                self._connections.discard(client)
            client.close()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        request: bytearray | None = None
        fault: _Fault | None = None
        while True:
            ready, _, _ = select.select([client, server], [], [])
            if client in ready:
                data = client.recv(_CHUNK)
                if not data:
                    return
                request = self._noted(request, data)
                fault = fault or self._due(request)
                if fault and fault.kind == "cut":
                    return
                self._open.wait()
                server.sendall(data)
            if server in ready:
                data = server.recv(_CHUNK)
                if not data or (fault and fault.kind == "lose"):
                    return
                request = None
                if fault and fault.kind == "swallow":
                    continue
                if fault:
                    self._ended.wait(fault.seconds)
                    fault = None
                self._open.wait()
                client.sendall(data)

    def _noted(self, request: bytearray | None, data: bytes) -> bytearray:
        with self._lock:
            if request is None:
                request = bytearray()
                self.requests.append(request)
            request += data
            return request


def _shut(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(how)
