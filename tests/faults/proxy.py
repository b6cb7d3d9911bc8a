"""A TCP proxy before a Redis that loses, swallows or delays what it is told to.

    with Proxy(server.url) as proxy:
        store = RecordStore(proxy.url, …)
        proxy.lose_reply(to="EVALSHA")

It relies on a client that waits for its replies: what arrives from the server next is the reply to
what the client has sent since the last one.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

_CHUNK = 1 << 20


@dataclass
class _Fault:
    #: "cut": close before the request gets through; "lose": close instead of passing the reply on;
    #: "swallow": pass nothing on, and leave the connection open; "delay": pass it on later.
    kind: str
    #: Part of the request that it waits for.
    to: bytes
    seconds: float = 0.0


class Proxy:
    """Listens on a port of its own for the Redis at `url`; leaving the `with` block ends it.

    Attributes:
        url: of the same database through the proxy.
        requests: what a client sent before it waited for a reply, all clients', in order.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._target = (parts.hostname, parts.port or 6379)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}{parts.path}"
        self.requests: list[bytearray] = []
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self._connections: set[socket.socket] = set()
        self._ended = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

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

    def cut(self) -> int:
        """End every connection now; how many there were."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            _shut(connection)
        return len(connections)

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
        _shut(self._listener)
        self._listener.close()
        self.cut()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

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

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                continue
            threading.Thread(target=self._run, args=(client,), daemon=True).start()

    def _run(self, client: socket.socket) -> None:
        # Whichever side goes, the other goes with it.
        with client, contextlib.suppress(OSError), socket.create_connection(self._target) as server:
            with self._lock:
                self._connections.add(client)
            try:
                self._pass_on(client, server)
            finally:
                with self._lock:
                    self._connections.discard(client)

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
                client.sendall(data)

    def _noted(self, request: bytearray | None, data: bytes) -> bytearray:
        with self._lock:
            if request is None:
                request = bytearray()
                self.requests.append(request)
            request += data
            return request


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
