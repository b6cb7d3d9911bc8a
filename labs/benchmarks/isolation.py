"""Runs a measure in its own process, so that measures do not influence one another.

A measure that fails or times out is reported in the table; the others still run.
"""

from __future__ import annotations

import logging
import multiprocessing
import traceback
from multiprocessing.connection import Connection

from labs.benchmarks.figure import MeasureResult
from labs.benchmarks.measure import Measure


def run_in_process(measure: Measure, seconds_left: float) -> MeasureResult:
    """Returns the result of `measure`, which may take its timeout or `seconds_left`."""
    if seconds_left <= 0:
        return MeasureResult(failure="no time was left")
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(measure.name, sender))
    process.start()
    sender.close()
    timeout = min(measure.timeout, seconds_left)
    try:
        if receiver.poll(timeout):
            return receiver.recv()
        return MeasureResult(failure=f"took {timeout:.3g} s")
    except EOFError:
        return MeasureResult(failure="its process ended")
    finally:
        process.kill()  # on Linux, the servers that it has started end with it
        process.join()


def _measure(name: str, sender: Connection) -> None:
    from labs.benchmarks.measures import find_measure

    # Log records are created, since they are part of the cost, but written nowhere.
    log = logging.getLogger("celery_idempotent")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    try:
        result = find_measure(name).measure()
    except Exception:
        result = MeasureResult(failure=traceback.format_exc())
    sender.send(result)
