"""Runs a measure in a process of its own: what one leaves behind does not slow down the next.

A measure that breaks, or takes too long, is told of in the table; the others go on.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
import traceback
from multiprocessing.connection import Connection

from tests.labs.benchmarks.figure import Finding
from tests.labs.benchmarks.measure import Measure, Missing, Show


def measured(measure: Measure, left: float, show: Show) -> Finding:
    """What `measure` brings in its own time, and in the `left` seconds."""
    if left <= 0:
        return _broken("there was no time left")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(measure.name, theirs))
    process.start()
    theirs.close()
    try:
        return _told(ours, min(measure.timeout, left), show)
    finally:
        process.kill()  # whatever it has started on Linux ends with it
        process.join()


def _told(told: Connection, timeout: float, show: Show) -> Finding:
    deadline = time.monotonic() + timeout
    while told.poll(max(0.0, deadline - time.monotonic())):
        try:
            what = told.recv()
        except EOFError:
            return _broken("its process ended")
        if isinstance(what, Finding):
            return what
        show(what)
    return _broken(f"given up after {timeout:.3g} s")


def _broken(why: str) -> Finding:
    return Finding(why_not=why, broken=why)


def _measure(name: str, tell: Connection) -> None:
    from tests.labs.benchmarks.measures import measure_named

    # Records are made, and written nowhere.
    log = logging.getLogger("celery_idempotent")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    try:
        finding = measure_named(name).measure(tell.send)
    except Missing as missing:
        finding = Finding(why_not=str(missing))
    except Exception as error:
        why = f"broken: {type(error).__name__}: {error}".splitlines()[0]
        finding = Finding(why_not=why, broken=traceback.format_exc())
    tell.send(finding)
