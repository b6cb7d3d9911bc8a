"""Celery signals for everything that happens to a call of an idempotent task.

Connect to them as to Celery's own: ``sender`` is the task, the function, or the engine of a block
or batch; every other argument is passed by keyword. Each signal has ``task_id`` (str), ``key``
(str, as :attr:`Record.key`) and ``label`` (str, empty without a template); the comment on each
signal lists its other arguments. Receivers run in the sending process, usually the task's; their
errors are logged, never raised.
"""

from __future__ import annotations

from celery_idempotent.core.events import table
from celery_idempotent.core.events.table import DECISIONS, OUTCOMES, PREFIX, REASONS, SHADOW

__all__ = ["DECISIONS", "OUTCOMES", "PREFIX", "REASONS", "SHADOW"]

#: An execution begins. ``token`` (int), ``attempt`` (int, 1 for the first).
begun = table.BEGUN.signal

#: An execution takes over an expired lease; sent after ``begun``. ``token``, ``attempt``,
#: ``orphaned_seconds`` (float, from the end of that lease to this begin).
taken_over = table.TAKEN_OVER.signal

#: A key is completed, even if no result is kept. ``token``, ``attempt``.
completed = table.COMPLETED.signal

#: An error ends the key (option ``replay_errors``). ``token``, ``attempt``, ``error`` (the
#: exception).
failed = table.FAILED.signal

#: A key is released, or reserved for a retry. ``token``, ``attempt``, ``error`` (what the task
#: raised; None if it has returned), ``reserved_seconds`` (of the reservation, or None).
released = table.RELEASED.signal

#: A duplicate gets the recorded outcome. ``record`` (:class:`Record`).
replayed = table.REPLAYED.signal

#: A duplicate finds its key held by another execution, or reserved for another message.
#: ``record``, ``policy`` (what happens to the duplicate).
conflicted = table.CONFLICTED.signal

#: An execution has lost its lease: another one may be running. ``token``, ``attempt``.
lease_lost = table.LEASE_LOST.signal

#: The task has run and its outcome could not be stored: a duplicate may run again.
#: ``token``, ``attempt``, ``error``.
outcome_unsaved = table.OUTCOME_UNSAVED.signal

#: A call cannot run and has no outcome either: its rule, its task or its record must be fixed.
#: ``reason`` (str, one of `REASONS`), ``error`` (the exception that the call raises), ``at``
#: (``"begin"``, or ``"publish"`` if `apply_async` raises it). ``key`` is empty if there is none.
refused = table.REFUSED.signal

#: A call is not published, because another one has its key (``idempotency_dedupe_publish``).
#: ``record``: of that call. Sent by the publisher; ``task_id`` is the one that is not used.
deduplicated = table.DEDUPLICATED.signal

#: The task has completed, or failed for good, and its outcome has no value: duplicates will get
#: ResultNotStoredError. ``token``, ``attempt``, ``reason`` (str).
not_stored = table.NOT_STORED.signal

#: Redis was unavailable at a begin. ``error``, ``policy`` (what happens to the message).
store_unavailable = table.BEGIN_FAILED.signal

#: Redis has replied to a begin. ``case`` (str, as in lua/begin.lua), ``seconds`` (float, of the
#: round trip).
begin_replied = table.BEGIN_REPLIED.signal

#: A person has forgotten a record, with the command line or the dashboard; sent in that process.
#: ``user`` (str). ``sender`` is None if the app has no such task; ``task_id`` is empty if the
#: record could not be read.
forgotten = table.FORGOTTEN.signal

#: A person has run an ended call again, with the command line or the dashboard: its message is
#: published; sent in that process. ``user`` (str).
rerun = table.RERUN.signal

#: A call in shadow begins, or gets no key and still runs. ``decision`` (str, one of `SHADOW`). The
#: others are None except: ``record`` (without a result) with ``would_replay``, ``would_wait`` and
#: ``would_conflict``; ``policy`` with ``would_conflict``; ``reason`` and ``error``, as of
#: `refused`, with ``would_refuse``. Not sent while Redis is unavailable.
shadowed = table.WOULD_RUN.signal
