"""Late packets: Redis executes a command after its sender was answered or has died.

In each process of an app, :func:`intercept` hands the packets that are planned to :class:`Late`
instead of sending them. Their sender gets no reply, and sends the command again. `Late` sends the
first copy to the same server later, on a connection of its own, whatever became of its sender.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from redis.connection import AbstractConnection

from celery_idempotent.core.store.scripts import load
from celery_idempotent.core.store.transport.server import pack
from labs.rig.processes import send_signal, with_children
from tests.servers.program import Stoppable

SCRIPTS = ("begin", "extend", "settle", "abandon", "queue", "forget")
#: Any command on a record that is not the call of a script.
PLAIN = "plain"
#: Longest wait for the reply to a late packet, in seconds.
REPLY_TIMEOUT = 2.0
#: Between the name of a packet and the number of its plan.
_SEPARATOR = "~"
_PREFIX = b"idem:"


@dataclass(frozen=True)
class Packet:
    """A packet that was held back and delivered.

    Attributes:
        name: of its script, or as it was planned.
        killed: the processes that ended while they waited for the reply: its sender and the
            sender's children, or none.
        at: when it was held back; `until`: when it was delivered. Seconds since the epoch.
        reply: of the server; empty if there was none.
    """

    name: str
    killed: list[int]
    at: float
    until: float
    reply: str


def intercept(folder: Path) -> None:
    """Hands the packets that are planned in `folder` to :class:`Late`, in this process."""
    needles = {load(name).sha.encode(): name for name in SCRIPTS}
    needles |= {f"-- {name}: ".encode(): name for name in SCRIPTS}  # with its source
    send = AbstractConnection.send_packed_command

    def send_packed_command(
        self: AbstractConnection, command: Any, check_health: bool = True
    ) -> None:
        plans = os.listdir(folder)  # noqa: PTH208 (before each command)
        if plans:
            data = b"".join([command] if isinstance(command, bytes) else command)
            for plan in plans:
                if _matches(plan, data, needles) and _hand_over(folder / plan, self, data):
                    return
        send(self, command, check_health)

    AbstractConnection.send_packed_command = send_packed_command  # type: ignore[method-assign]


def _matches(plan: str, data: bytes, needles: dict[bytes, str]) -> bool:
    name, _, number = plan.partition(_SEPARATOR)
    if not number:
        return False  # being written
    called = {script for needle, script in needles.items() if needle in data}
    if name in SCRIPTS:
        return name in called
    return (_PREFIX in data and not called) if name == PLAIN else name.encode() in data


def _hand_over(plan: Path, connection: Any, data: bytes) -> bool:
    """Returns whether no other process has handed over a packet for this plan."""
    try:
        content = plan.read_bytes()
        plan.unlink()
    except FileNotFoundError:
        return False
    port, _, rest = content.partition(b"\n")
    header = {"to": [connection.host, connection.port], "pid": os.getpid(), **json.loads(rest)}
    with socket.create_connection(("127.0.0.1", int(port))) as late:
        late.sendall(json.dumps(header).encode() + b"\n" + data)
    return True


class Late(Stoppable):
    """Plans late packets, holds them back and delivers them.

    Args:
        folder: an empty folder for the plans.
        delivered: is called after each delivery.
    """

    def __init__(self, folder: Path, delivered: Callable[[Packet], None]) -> None:
        self._folder, self._delivered = folder, delivered
        self._numbers = count()
        self._held: list[str] = []
        self._ended = threading.Event()
        late = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                header = json.loads(self.rfile.readline())
                late._deliver(header, self.rfile.read())

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def plan(self, name: str, seconds: float, *, kill: bool = False) -> None:
        """Holds back the next packet of that name for `seconds`.

        Args:
            name: a script, `PLAIN`, or a text that the packet contains.
            kill: whether to kill its sender, unless that is this process.
        """
        content = json.dumps({"name": name, "seconds": seconds, "kill": kill})
        draft = self._folder / f"{next(self._numbers)}"
        draft.write_text(f"{self._server.server_address[1]}\n{content}")
        draft.rename(self._folder / f"{name}{_SEPARATOR}{draft.name}")

    def cancel(self) -> None:
        """Drops the plans that no packet has met."""
        for plan in self._folder.iterdir():
            plan.unlink(missing_ok=True)

    def holds(self, name: str = "") -> bool:
        """Returns whether a packet of that name, or any, is held back."""
        return name in self._held if name else bool(self._held)

    def _deliver(self, header: dict[str, Any], data: bytes) -> None:
        name, pid, at = header["name"], header["pid"], time.time()
        self._held.append(name)
        try:
            killed = with_children(pid) if header["kill"] and pid != os.getpid() else []
            send_signal(killed[:1], signal.SIGKILL)
            self._ended.wait(header["seconds"])
            reply = b""
            # The server may be down: then the packet is lost.
            with suppress(OSError), socket.create_connection(header["to"], REPLY_TIMEOUT) as server:
                if name in SCRIPTS:  # another client may have flushed it
                    server.sendall(pack(("SCRIPT", "LOAD", load(name).source)))
                    server.recv(1 << 16)
                server.sendall(data)
                reply = server.recv(1 << 16)
        finally:
            self._held.remove(name)
        text = reply.decode("latin-1")
        self._delivered(Packet(name, killed, at, time.time(), text[:200]))

    def stop(self) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
