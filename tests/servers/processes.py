"""Inspects processes that are not children of this one."""

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
    # A dead orphan is a zombie until init reaps it.
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):  # it has just ended, or the system has no /proc
        return not Path("/proc/self").exists()
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def with_variable(name: str, value: str) -> list[int]:
    """Returns the ids of processes with this environment variable, without zombies. Linux only."""
    wanted = f"{name}={value}".encode()
    pids: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:  # ended, or owned by another user
            continue
        if wanted in variables:
            pids.append(int(process.name))
    return pids


def listening_addresses(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Returns the addresses on which these processes accept TCP connections. Linux only."""
    sockets: set[str] = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed in the meantime
                sockets.add(str(descriptor.readlink()))
    addresses: set[tuple[str, int]] = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                host, port = local.split(":")
                addresses.add((_host(family, bytes.fromhex(host)), int(port, 16)))
    return addresses


def _host(family: socket.AddressFamily, packed: bytes) -> str:
    """Converts an address, which the kernel prints as 32-bit words in native byte order."""
    count = len(packed) // 4
    return socket.inet_ntop(family, struct.pack(f"={count}I", *struct.unpack(f">{count}I", packed)))
