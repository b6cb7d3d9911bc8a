"""Whether the suite notices a Lua file that is not as it should be.

First the table of calls, up to the first that is not as the model has it: most fall there at once.
Then tests/store in a process of its own, up to the first failure; then the conformance machine. All
on one kind of server.
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

from celery_idempotent.store import scripts
from tests.labs.verification import table
from tests.labs.verification.conformance import Machine, lengths
from tests.labs.verification.conformance_run import pool_for
from tests.labs.verification.equivalent_mutants import SURVIVORS
from tests.labs.verification.lua_mutants import Mutant
from tests.store.deployments import KINDS
from tests.store.record_harness import RecordHarness, close_stores, store_at

#: Seconds that tests/store may take; a mutant for which they take longer is noticed, too.
PATIENCE = 300.0
#: No failure is shrunk: that there is one is enough.
_QUICK = settings(
    lengths(examples=80, steps=30), phases=[Phase.generate], print_blob=False,
    report_multiple_bugs=False,
)  # fmt: skip

#: Of tests/store, what looks at the scripts alone; the rest takes most of the time.
_TESTS = [
    f"tests/store/test_{name}.py"
    for name in (
        "begin", "outcome", "release", "reserve", "extend", "step", "abandon", "forget", "get",
        "every_transition", "lost_replies",
    )
]  # fmt: skip

TABLE, SUITE, MACHINE, NOBODY = "table", "tests/store", "machine", ""


class Disposition(NamedTuple):
    mutant: Mutant
    #: TABLE, SUITE, MACHINE or NOBODY.
    killed_by: str
    seconds: float


@contextlib.contextmanager
def in_place(mutant: Mutant) -> Iterator[None]:
    """The store runs the mutant."""
    read_source = scripts.read_source
    scripts.read_source = lambda name: mutant.source if name == mutant.script else read_source(name)
    scripts.load.cache_clear()
    try:
        yield
    finally:
        scripts.read_source = read_source
        scripts.load.cache_clear()


def judge(mutant: Mutant, kind: str = "") -> Disposition:
    """Try to kill one mutant, on one kind of server: the first that is here."""
    kind = kind or next(iter(KINDS))
    began_at = time.monotonic()
    with in_place(mutant):
        if _table_notices(mutant.script, kind):
            killed_by = TABLE
        elif mutant.name in SURVIVORS:
            killed_by = NOBODY  # as is known; the rest takes a minute
        elif _suite_notices(kind):
            killed_by = SUITE
        elif _machine_notices(kind):
            killed_by = MACHINE
        else:
            killed_by = NOBODY
    return Disposition(mutant, killed_by, time.monotonic() - began_at)


def _table_notices(script: str, kind: str) -> bool:
    """The script's own cases; for what they share, everybody's."""
    names = [script] if script in table.ARGUMENTS else [*table.ARGUMENTS]
    with pool_for(kind).client() as client:
        client.flushall()
        try:
            # A few of each script first.
            return any(
                next(table.mismatches(client, name, cases), None)
                for cases in (60, table.CASES)
                for name in names
            )
        except (redis.ConnectionError, redis.TimeoutError):
            raise  # the machine's trouble, not the mutant's
        except Exception:
            return True


def _machine_notices(kind: str) -> bool:
    with pool_for(kind).client() as client:
        client.flushall()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                scene = RecordHarness(store_at(pool_for(kind).url), client)
                run_state_machine_as_test(lambda: Machine(scene), settings=_QUICK)  # type: ignore[arg-type]
        except (redis.ConnectionError, redis.TimeoutError):
            raise
        except Exception:
            return True
        finally:
            close_stores()
    return False


def _suite_notices(kind: str) -> bool:
    child = multiprocessing.get_context("fork").Process(target=_run_suite, args=(kind,))
    child.start()
    child.join(PATIENCE)
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
