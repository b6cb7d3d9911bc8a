"""Long conformance runs: each process has a server of each kind."""

from __future__ import annotations

import contextlib
import io
import os
import traceback
from functools import cache
from typing import NamedTuple

from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from labs.verification import table, turn_table
from labs.verification.conformance import Machine, lengths
from labs.verification.single_calls import mismatches
from tests.servers.redis_server import RedisServer
from tests.store.record_harness import RecordHarness, close_stores, store_at

#: Sequences of one job, and their length.
EXAMPLES, STEPS = 80, 50
#: Single calls of each script.
CALLS = 4_000
#: One of so many drawn restarts is executed: a restart takes as long as a hundred calls.
_DRAWS_PER_RESTART = 40


class SequenceResult(NamedTuple):
    steps: int
    restarts: int
    #: The error and the steps that lead to it, or "".
    failure: str


def server_of(kind: str) -> RedisServer:
    """Returns this process's server of a kind; its data survives a restart."""
    return _server(kind, os.getpid())


@cache
def _server(kind: str, process: int) -> RedisServer:
    # By process: after a fork the inherited entry is the parent's server.
    return RedisServer.start(kind, config={"appendonly": "yes", "appendfsync": "no"})


class Restarting(Machine):
    """The machine on a server that is restarted at times."""

    executed = restarts = 0

    def __init__(self, harness: RecordHarness, server: RedisServer) -> None:
        super().__init__(harness)
        self.server = server

    @rule(chance=st.integers(1, _DRAWS_PER_RESTART))
    def the_server_restarts(self, chance: int) -> None:
        if chance == _DRAWS_PER_RESTART:
            self.server.restart()
            Restarting.restarts += 1

    def teardown(self) -> None:
        Restarting.executed += self.steps


def table_on(kind: str, script: str) -> tuple[int, list[str]]:
    """Returns the number of calls, and the mismatches."""
    with server_of(kind).client() as client:
        client.flushall()
        found = [
            mismatch
            for module in (table, turn_table)
            if script in module.ARGUMENTS
            for mismatch in mismatches(module, client, script, CALLS)
        ]
        return CALLS, found


def sequences_on(kind: str, number: int) -> SequenceResult:
    """Executes the sequences of calls of a seed."""
    server = server_of(kind)
    Restarting.executed = Restarting.restarts = 0
    failure, output = "", io.StringIO()
    with server.client() as client:
        client.flushall()

        @seed(number)
        def machine() -> Machine:
            return Restarting(RecordHarness(store_at(server.url), client), server)

        try:
            with contextlib.redirect_stdout(output):
                run_state_machine_as_test(
                    machine,
                    settings=settings(
                        lengths(EXAMPLES, STEPS, number), phases=[Phase.generate, Phase.shrink]
                    ),
                )
        except Exception:
            failure = f"{output.getvalue()}\n{traceback.format_exc(limit=-3)}"
        finally:
            close_stores()
    return SequenceResult(Restarting.executed, Restarting.restarts, failure)
