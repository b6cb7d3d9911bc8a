"""What is to be known of processes that are not one's own children."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # An orphan that died is a zombie for as long as init takes to reap it.
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):  # died this very moment, or no /proc here
        return not Path("/proc/self").exists()
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def with_variable(name: str, value: str) -> list[int]:
    """The processes that have this in their environment; a zombie has none. Linux only."""
    wanted = f"{name}={value}".encode()
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or not ours
            continue
        if wanted in variables:
            found.append(int(process.name))
    return found


def listening_addresses(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Where these processes accept TCP connections. Linux only."""
    sockets: set[str] = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                sockets.add(str(descriptor.readlink()))
    found: set[tuple[str, int]] = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                host, port = local.split(":")
                found.add((_host(family, bytes.fromhex(host)), int(port, 16)))
    return found


def _host(family: socket.AddressFamily, words: bytes) -> str:
    """The kernel prints an address as 32-bit words of this machine's byte order."""
    count = len(words) // 4
    return socket.inet_ntop(family, struct.pack(f"={count}I", *struct.unpack(f">{count}I", words)))
