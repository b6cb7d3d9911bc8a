"""The long runs against real servers: one server of each kind in each process."""

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

from celery_idempotent.testing.server import RedisServer
from tests.labs.verification import table
from tests.labs.verification.conformance import Machine, lengths
from tests.store.record_harness import RecordHarness, close_stores, store_at

#: Of one piece of work.
EXAMPLES, STEPS = 80, 50
#: Calls of each script.
CALLS = 4_000
#: Of so many times that a restart is drawn, one is done: it takes as long as a hundred calls.
_SELDOM = 40


class Hunted(NamedTuple):
    steps: int
    restarts: int
    #: What went wrong, with the steps that lead there; "" if nothing did.
    wrong: str


def pool_for(kind: str) -> RedisServer:
    """Of this process; what it holds outlives a restart."""
    return _server(kind, os.getpid())


@cache
def _server(kind: str, process: int) -> RedisServer:
    # By process: what a fork inherits is its parent's.
    return RedisServer.start(kind, config={"appendonly": "yes", "appendfsync": "no"})


class Restarting(Machine):
    """The machine, on a server that is restarted now and then."""

    made = restarts = 0

    def __init__(self, scene: RecordHarness, server: RedisServer) -> None:
        super().__init__(scene)
        self.server = server

    @rule(chance=st.integers(1, _SELDOM))
    def the_server_restarts(self, chance: int) -> None:
        if chance == _SELDOM:
            self.server.restart()
            Restarting.restarts += 1

    def teardown(self) -> None:
        Restarting.made += self.steps


def table_on(kind: str, script: str) -> tuple[int, list[str]]:
    """How many calls were made, and what was wrong."""
    with pool_for(kind).client() as client:
        client.flushall()
        return CALLS, list(table.mismatches(client, script, CALLS))


def sequences_on(kind: str, number: int) -> Hunted:
    """Sequences of calls that the seed `number` draws."""
    server = pool_for(kind)
    Restarting.made = Restarting.restarts = 0
    wrong, story = "", io.StringIO()
    with server.client() as client:
        client.flushall()

        @seed(number)
        def machine() -> Machine:
            return Restarting(RecordHarness(store_at(server.url), client), server)

        try:
            with contextlib.redirect_stdout(story):
                run_state_machine_as_test(
                    machine,
                    settings=settings(
                        lengths(EXAMPLES, STEPS, number), phases=[Phase.generate, Phase.shrink]
                    ),
                )
        except Exception:
            wrong = f"{story.getvalue()}\n{traceback.format_exc(limit=-3)}"
        finally:
            close_stores()
    return Hunted(Restarting.made, Restarting.restarts, wrong)
