"""What processes and servers have used so far."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from redis import Redis

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ServerUsage(NamedTuple):
    """What a server has used since its start."""

    #: Seconds.
    cpu: float
    #: Reads from clients. A command, or a pipeline of a few, takes one: a round trip.
    reads: float
    #: From and to clients.
    bytes: float

    @classmethod
    def of(cls, client: Redis) -> ServerUsage:
        """Asks the server that `client` is connected to."""
        info = client.info("all")
        return cls(
            info["used_cpu_user"] + info["used_cpu_sys"],
            info["total_reads_processed"],
            info["total_net_input_bytes"] + info["total_net_output_bytes"],
        )

    def since(self, before: ServerUsage) -> ServerUsage:
        """Returns the difference."""
        return ServerUsage(*(now - then for now, then in zip(self, before, strict=True)))


class ProcessUsage(NamedTuple):
    """What a process uses now, and its processor time so far."""

    pid: int
    #: Seconds.
    cpu: float
    #: Resident, in bytes.
    memory: int
    descriptors: int
    threads: int


def cpu_of_group(group: int) -> float:
    """Returns the processor time of all processes of a process group in seconds."""
    return sum(each.cpu for each in processes_of_group(group))


#: Positions after the name of the process, which may contain spaces: see proc(5).
_PGRP, _UTIME, _STIME, _THREADS, _RSS = 2, 11, 12, 17, 21


def processes_of_group(group: int) -> Iterator[ProcessUsage]:
    """Yields the processes of a process group, its leader first."""
    for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[_PGRP]) != group:
                continue
            descriptors = sum(1 for _ in (path / "fd").iterdir())
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield ProcessUsage(
            int(path.name),
            (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_SECOND,
            int(fields[_RSS]) * _PAGE_BYTES,
            descriptors,
            int(fields[_THREADS]),
        )
