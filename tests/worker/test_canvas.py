"""Chains, groups, chords and links with duplicates.

A duplicate with another task id is a separate call: its replay continues its own canvas.
"""

from __future__ import annotations

import json

import pytest
from celery import chain, chord

from tests.waiting import SOON, eventually
from tests.worker.canvas_tasks import follow_up, report
from tests.worker.ledger import Ledger
from tests.worker.tasks import OutOfStockError, final, pack


def test_two_chains_with_the_same_running_head_both_complete(ledger: Ledger, order: str) -> None:
    ledger.hold(order)
    first = chain(pack.s(order), follow_up.s(f"first {order}")).delay()
    ledger.wait_for_run(order)
    second = chain(pack.s(order), follow_up.s(f"second {order}")).delay()
    ledger.wait_for_signal(second.parent.id, "conflicted")
    ledger.release(order)

    assert first.get(timeout=SOON)[0] == second.get(timeout=SOON)[0]
    assert ledger.notes(f"first {order}") == ledger.notes(f"second {order}") == ["followed up"]
    assert len(ledger.runs(order)) == 1


def test_chord_with_duplicates_in_its_header_runs_its_body_once(ledger: Ledger, order: str) -> None:
    header = [pack.s(order), pack.s(f"another {order}"), pack.s(order), pack.s(order)]

    receipts = chord(header)(report.s(order)).get(timeout=SOON)

    assert receipts[0] == receipts[2] == receipts[3] != receipts[1]
    assert [json.loads(note) for note in ledger.notes(order)] == [receipts]
    assert len(ledger.runs(order)) == 1


def test_replayed_error_stops_the_chain_of_a_duplicate(ledger: Ledger, order: str) -> None:
    for _ in range(2):
        with pytest.raises(OutOfStockError):
            chain(final.s(order), follow_up.s(order)).delay().parent.get(timeout=SOON)

    assert len(ledger.runs(order)) == 1
    assert ledger.notes(order) == []


def test_errbacks_of_both_callers_run(ledger: Ledger, order: str) -> None:
    for caller in ("first", "second"):
        errback = report.si(caller, f"{caller} {order}")
        final.apply_async((order,), link_error=errback).get(timeout=SOON, propagate=False)

    for caller in ("first", "second"):
        eventually(lambda name=caller: ledger.notes(f"{name} {order}"), f"{caller} errback")
    assert len(ledger.runs(order)) == 1
