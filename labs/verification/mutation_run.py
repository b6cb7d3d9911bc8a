"""Checks whether the tests detect a mutant of a Lua file.

First the table of single calls, up to the first mismatch, which detects most mutants at once. Then
tests/store in a process of its own, up to the first failure; then the conformance machine. All on
one kind of server.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import redis
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from celery_idempotent.store import commands, scripts
from labs.verification import table, turn_table
from labs.verification.conformance import Machine, lengths
from labs.verification.conformance_run import server_of
from labs.verification.equivalent_mutants import EQUIVALENT_MUTANTS
from labs.verification.lua_mutants import Mutant
from tests.store.deployments import KINDS
from tests.store.record_harness import KEY, RecordHarness, close_stores, store_at

#: Files that several scripts share.
_SHARED = ("layout", "prelude", "epilogue")
#: Seconds that tests/store may take; a mutant that makes them take longer is detected, too.
SUITE_TIMEOUT = 300.0
#: Failures are not shrunk: one failure suffices.
_QUICK = settings(
    lengths(examples=80, steps=30), phases=[Phase.generate], print_blob=False,
    report_multiple_bugs=False,
)  # fmt: skip

#: The modules of tests/store that test the scripts alone; the others take most of the time.
_TESTS = [
    f"tests/store/test_{name}.py"
    for name in (
        "begin", "outcome", "fused_complete", "release", "reserve", "extend", "step", "abandon",
        "forget", "get", "met", "every_transition", "lost_replies", "label", "turns",
        "collapsing",
    )
]  # fmt: skip

TABLE, SUITE, MACHINE, SURVIVED = "table", "tests/store", "machine", ""


class MutationResult(NamedTuple):
    mutant: Mutant
    #: TABLE, SUITE, MACHINE or SURVIVED.
    killed_by: str
    seconds: float


@contextlib.contextmanager
def installed(mutant: Mutant) -> Iterator[None]:
    """Makes the store run the mutant."""
    read_source = scripts.read_source
    scripts.read_source = lambda name: mutant.source if name == mutant.script else read_source(name)
    scripts.load.cache_clear()
    # A store that kept the scripts it loaded before would not run the mutant.
    assert commands.get(KEY).script is scripts.load("get")
    try:
        yield
    finally:
        scripts.read_source = read_source
        scripts.load.cache_clear()


def run(mutant: Mutant, kind: str = "") -> MutationResult:
    """Tests one mutant on one kind of server: by default the first that is installed."""
    kind = kind or next(iter(KINDS))
    started_at = time.monotonic()
    with installed(mutant):
        if _table_detects(mutant.script, kind):
            killed_by = TABLE
        elif mutant.name in EQUIVALENT_MUTANTS:
            killed_by = SURVIVED  # as expected; the other tests take a minute
        elif _suite_detects(kind):
            killed_by = SUITE
        elif _machine_detects(kind):
            killed_by = MACHINE
        else:
            killed_by = SURVIVED
    return MutationResult(mutant, killed_by, time.monotonic() - started_at)


def _table_detects(script: str, kind: str) -> bool:
    """Executes the cases of the script; of all scripts for a shared file."""
    tables = [
        (module.mismatches, name, cases)
        for cases in (60, table.CASES)
        for module in (table, turn_table)
        for name in module.ARGUMENTS
        if script in (name, *_SHARED)
    ]
    with server_of(kind).client() as client:
        client.flushall()
        try:
            # First a few of each script.
            return any(
                next(mismatches(client, name, cases), None) for mismatches, name, cases in tables
            )
        except (redis.ConnectionError, redis.TimeoutError):
            raise  # a fault of the environment, not of the mutant
        except Exception:
            return True


def _machine_detects(kind: str) -> bool:
    with server_of(kind).client() as client:
        client.flushall()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                harness = RecordHarness(store_at(server_of(kind).url), client)
                run_state_machine_as_test(lambda: Machine(harness), settings=_QUICK)  # type: ignore[arg-type]
        except (redis.ConnectionError, redis.TimeoutError):
            raise
        except Exception:
            return True
        finally:
            close_stores()
    return False


def _suite_detects(kind: str) -> bool:
    child = multiprocessing.get_context("fork").Process(target=_run_suite, args=(kind,))
    child.start()
    child.join(SUITE_TIMEOUT)
    if child.is_alive():
        child.kill()
        child.join()
    return child.exitcode != 0


def _run_suite(kind: str) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    options = ["-x", "-p", "no:cacheprovider", "-W", "default"]
    selected = ["-k", kind]
    os._exit(int(pytest.main([*options, *selected, *_TESTS])))
