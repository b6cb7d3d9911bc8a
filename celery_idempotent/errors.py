"""The errors of this library.

Each has one complete sentence as its first argument, and no attribute that its arguments lack:
Celery rebuilds an exception from its type and its arguments. The first paragraph of a docstring is
the cause of the error, the second the remedy.
"""

from __future__ import annotations


class IdempotencyError(Exception):
    """Base of all errors that this library raises on purpose.

    Catch it to handle all of them alike; each message says what to do.
    """


class SettingsError(IdempotencyError, ValueError):
    """An option has a wrong name, type or range, or no setting names a Redis server.

    Correct what the message names. It is raised when the app is finalized or the worker starts,
    else by the first call that shows the mistake.
    """


class KeyRuleError(IdempotencyError):
    """The key rule cannot derive a key from these arguments, or the key of a call is invalid.

    Correct the rule or the publisher, and publish the call again: it has not run. The rule's own
    error, whose message may quote arguments, is its ``__cause__``.
    ``celery -A shop idempotency explain`` derives the key step by step.
    """


class ConflictError(IdempotencyError):
    """Another call has the key (``on_conflict="raise"``, an eager call, or the end of a wait).

    Try again when that execution has ended, or choose ``retry`` or ``wait``. After
    ``idempotency_dedupe_publish="raise"``, ``AsyncResult(error.task_id)`` is the result of the
    other call.
    """

    def __init__(self, message: str = "", task_id: str | None = None) -> None:
        super().__init__(message, *([] if task_id is None else [task_id]))

    @property
    def task_id(self) -> str | None:
        """The task id of the other call; None if it is not known."""
        return self.args[1] if len(self.args) > 1 else None

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class KeyReusedError(IdempotencyError):
    """The key belongs to a call with other arguments; the first outcome is untouched.

    Give a new request a new key. If the calls are duplicates, publish them with equal arguments:
    arguments that the key rule leaves out are also compared.
    """


class LeaseLostError(IdempotencyError):
    """The lease is lost, or was not renewed in time: another execution may run.

    Let the execution end. If it was frozen for longer than its lease, check the effects of both
    executions; fencing tokens keep the stale one from writing.
    """

    def __init__(
        self, message: str = "the lease is lost: another execution may run", *args: str
    ) -> None:
        super().__init__(message, *args)


class ReplacedError(ConflictError, LeaseLostError):
    """A newer call has taken over the key by the policy ``replace``.

    Let the execution end: its outcome is refused. ``AsyncResult(error.task_id)`` is the result of
    the newer call.
    """


class PoisonedTaskError(IdempotencyError):
    """The executions of this key died without an outcome, ``max_attempts`` times in a row.

    Correct what kills the worker process (memory, native code, time limits), and run the call
    again: ``celery -A shop idempotency rerun``.
    """


class StoreUnavailableError(IdempotencyError):
    """Redis, the database of a transaction or the storage of a large result is unavailable.

    Restore the server; workers need no restart. By default, messages are retried. ``doctor`` names
    the reason.
    """


class TransactionError(IdempotencyError):
    """The transaction of a call cannot begin or cannot be committed.

    The message names the cause. Leave COMMIT and ROLLBACK to the library, and use savepoints for
    parts that may be rolled back; make calls with a key outside other transactions; to publish on
    commit, use ``delay_on_commit``.
    """


class CorruptRecordError(IdempotencyError):
    """The record is damaged or forged, or a newer version or another configuration has written it.

    Deploy that version or restore that configuration. Otherwise check whether the effect has
    happened, then ``forget`` the record by its key.
    """


class NotReadyError(IdempotencyError):
    """The task was replaced by another one, which has not finished.

    Ask again later: the outcome of the key is that of the replacement.
    """


class ResultNotStoredError(IdempotencyError):
    """The key has completed, but its result was not stored; the task does not run again.

    The message names the cause: return a smaller value, or one that the serializer supports, or
    restore the storage of large values. To run the call again, ``forget`` its key.
    """


class ResultDiscardedError(ResultNotStoredError):
    """The result was discarded: the task stores none, or ``ignore_result`` is on.

    Nothing was lost. If duplicates need the result, change the option that the message names.
    """
