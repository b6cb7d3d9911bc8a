"""Explains a call: how its key is derived, and what would happen if it were published now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from celery_idempotent.core.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.core.flow.conflict import POLICIES
from celery_idempotent.core.flow.replay import replacement_error
from celery_idempotent.core.key import Key, message_form
from celery_idempotent.core.key.parameters import Argument
from celery_idempotent.core.key.rule import TASK_ID, Explanation
from celery_idempotent.core.printable import did_you_mean
from celery_idempotent.core.record import Record, State, layout
from celery_idempotent.core.store import run_sync
from celery_idempotent.errors import KeyRuleError
from celery_idempotent.operations.calls import formatting
from celery_idempotent.operations.calls.lookup import SqlOutcome, find_outcome
from celery_idempotent.operations.records.query import read_view
from celery_idempotent.operations.records.reader import RecordView
from celery_idempotent.settings import Settings
from celery_idempotent.sql.outcomes import CLAIMED, committed_without_outcome


class Prediction(NamedTuple):
    """What would happen to a call, as a case for programs and a sentence for people."""

    #: unprotected, run, taken over, poisoned, replay, reused, conflict or corrupt.
    case: str
    sentence: str


_NOUNS = {State.COMPLETED: "result", State.FAILED: "error"}


def predict(
    key: Key, settings: Settings, view: RecordView | None, outcome: SqlOutcome | None = None
) -> Prediction:
    """Predicts the reply of lua/begin.lua to a call with `key`, and its consequence.

    Args:
        outcome: the row of the key in the user's database.
    """
    if not settings.enabled:
        return Prediction("unprotected", "runs unprotected: idempotency_enabled is False")
    prediction = _predict(key, settings, view)
    is_poisoned = view is not None and view.record is not None and layout.is_poisoned(view.record)
    if outcome is not None and (is_poisoned or prediction.case in _CLAIMS):
        prediction = _predict_by_row(key, settings, outcome) or prediction
    sentence = prediction.sentence
    for option in settings.option_classes:
        sentence = option.explain(sentence, settings)
    return prediction._replace(sentence=sentence)


#: The cases in which a call with a transaction asks for its row.
_CLAIMS = ("run", "taken over", "poisoned")


def _predict_by_row(key: Key, settings: Settings, outcome: SqlOutcome) -> Prediction | None:
    """Predicts what a call that claims the row gets; None if it runs."""
    row, where = outcome.row, f"in the database {outcome.name}"
    if row.state == CLAIMED:
        return Prediction("corrupt", f"fails with TransactionError: {committed_without_outcome()}")
    if row.expired or replacement_error(outcome.record, settings) is not None:
        return None
    if key.fingerprint and row.fingerprint and key.fingerprint.hex() != row.fingerprint:
        other = f"task {row.task_id} has the key {where}, with other arguments"
        return Prediction("reused", f"fails with KeyReusedError: {other}")
    return Prediction(
        "replay", f"replays the {_NOUNS[State(row.state)]} of task {row.task_id} {where}"
    )


def _predict(key: Key, settings: Settings, view: RecordView | None) -> Prediction:
    """Predicts the case of a call by its record alone, as lua/begin.lua would decide."""
    if view is None:
        return Prediction("run", "runs: there is no record")
    record = view.record
    if record is None:
        return Prediction(
            "corrupt", "fails with CorruptRecordError: the record cannot be read; forget the key"
        )
    task = f"task {record.task_id}"
    other_arguments = bool(
        key.fingerprint and record.fingerprint and key.fingerprint != record.fingerprint
    )
    if settings.runs_again:
        return _predict_turn(settings, record, view, other_arguments=other_arguments)
    if replacement_error(record, settings) is not None:
        return Prediction("run", f"runs: the replacement of {task} has failed")
    if other_arguments:
        return Prediction(
            "reused", f"fails with KeyReusedError: {task} has the key, with other arguments"
        )
    if record.state.finished:
        return Prediction("replay", f"replays the {_NOUNS[record.state]} of {task}")
    if not view.is_past_deadline:
        return _conflict(settings, record, collapses=settings.deduplicates)
    if record.state is State.RESERVED:
        return Prediction("run", f"runs: the reservation of {task} has expired")
    if not settings.may_run(record.attempt + 1):
        died = f"{record.attempt} executions have died"
        return Prediction("poisoned", f"fails with PoisonedTaskError: {died}")
    return Prediction("taken over", f"runs: takes over from {task}, whose lease has expired")


def _predict_turn(
    settings: Settings, record: Record, view: RecordView, *, other_arguments: bool
) -> Prediction:
    """Predicts the case of a call whose key may run again."""
    task_id = record.task_id
    if record.state.finished:
        return Prediction("run", f"runs: the call before it, task {task_id}, has ended")
    if view.is_past_deadline:
        what = "reservation" if record.state is State.RESERVED else "lease"
        return Prediction("run", f"runs: the {what} of task {task_id} has expired")
    if not settings.collapses:
        collapses = settings.deduplicates and not other_arguments
        return _conflict(settings, record, collapses=collapses)
    if record.state is State.STARTED:
        waiting = run_sync(view.store.slot(view.key.turn))
        if waiting is None and POLICIES[settings.on_conflict].replaces:
            return _conflict(settings, record, collapses=False)
        if waiting is None:
            return Prediction("conflict", f"waits for its turn, after task {task_id}")
        task_id = waiting.task_id
    elif other_arguments and not settings.takes_newest:
        waits = f"task {task_id} waits, with other arguments"
        return Prediction("reused", f"fails with KeyReusedError: {waits}")
    given = ", and gets these arguments" if settings.takes_newest else ""
    return Prediction(
        "conflict",
        f"is not published: task {task_id} is already waiting{given}, and the caller gets "
        + ("ConflictError" if settings.publish_raises else "its result"),
    )


def _conflict(settings: Settings, record: Record, *, collapses: bool) -> Prediction:
    """Predicts a conflict; with `collapses`, the publisher finds it."""
    holder = f"runs on {record.worker}" if record.worker else "has not started yet"
    consequence = POLICIES[settings.on_conflict].sentence
    if collapses:
        gets = "ConflictError" if settings.publish_raises else "that task's result"
        consequence = f"no message is published, and the caller gets {gets}"
    return Prediction(
        "conflict", f"conflicts with task {record.task_id}, which {holder}: {consequence}"
    )


class ExplainedCall(NamedTuple):
    """A call's key, its record, and the resulting prediction."""

    #: Name of the task.
    task: str
    explanation: Explanation
    #: The record's name in Redis.
    redis_name: str
    #: The record; None if there is none.
    view: RecordView | None
    #: The row of the key in the database of its task's transaction, if any.
    outcome: SqlOutcome | None
    prediction: Prediction

    @property
    def fingerprint(self) -> str:
        """The fingerprint, or why there is none."""
        if self.explanation.missing:
            return f"unknown: {', '.join(self.explanation.missing)} not given"
        return self.explanation.key.fingerprint.hex() or "none: arguments are not compared"

    def participation(self, argument: Argument) -> tuple[str, str]:
        """Returns whether the argument is in the key, and whether it is in the fingerprint."""
        in_key = {True: "yes", False: "no", None: "decided by the callable"}[argument.in_key]
        if self.explanation.key.fingerprint or self.explanation.missing:
            return in_key, "no: at its default" if argument.at_default else "yes"
        return ("no: at its default" if argument.at_default and argument.in_key else in_key), "no"

    def to_json(self) -> dict[str, Any]:
        """Returns the explanation as a JSON object."""
        explanation = self.explanation
        return {
            "task": self.task,
            "rule": explanation.rule,
            "arguments": [
                {
                    "name": argument.name,
                    "canonical": text_of(argument.canonical_bytes),
                    "at_default": argument.at_default,
                    "in_key": argument.in_key,
                }
                for argument in explanation.arguments
            ],
            "form": text_of(explanation.canonical_bytes),
            "key": str(explanation.key),
            "explicit": explanation.key.explicit,
            "fingerprint": explanation.key.fingerprint.hex(),
            "missing": list(explanation.missing),
            "redis_name": self.redis_name,
            "record": None if self.view is None else formatting.view_fields(self.view),
            "prediction": self.prediction._asdict(),
        } | ({} if self.outcome is None else {"sql_outcome": self.outcome.to_json()})


def explain_call(
    tasks: Iterable[IdempotentTaskLike],
    name: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    explicit_key: str | tuple[str, ...] | None = None,
    task_id: str | None = None,
    *,
    task_id_named: str = "the task's id",
) -> ExplainedCall:
    """Derives the key of a call, reads its record, and predicts what would happen.

    Args:
        explicit_key: the call's explicit key, if any.
        task_id: the id of the message, for the key rule TASK_ID.
        task_id_named: what the error asks for without one.

    Raises:
        KeyRuleError: if no task has this name or no key can be derived.
        StoreUnavailableError: if Redis, or the database of the task's transaction, is unavailable.
        TypeError: if the arguments do not fit the task, or TASK_ID lacks a task id.
    """
    by_name = {task.name: task for task in tasks}
    task = by_name.get(name)
    if task is None:
        hint = did_you_mean(str(name), by_name)
        raise KeyRuleError(f"{name!r} is not an idempotent task of this app{hint}")
    configuration = task.idempotency_configuration
    if configuration.rule.source is TASK_ID and not (explicit_key or task_id):
        raise TypeError(f"the key rule of {name} is TASK_ID: give {task_id_named}")
    form = None if explicit_key is None else message_form(task.name, explicit_key)
    explanation = configuration.rule.explain(args, kwargs, task_id=task_id, explicit_key=form)
    store = configuration.executor.store
    view = read_view(store, explanation.key)
    outcome = find_outcome([task], explanation.key)
    prediction = predict(explanation.key, configuration.settings, view, outcome)
    if explanation.missing and (view or outcome) and configuration.is_protected:
        unknown = f"; {', '.join(explanation.missing)} would be compared"
        prediction = prediction._replace(sentence=prediction.sentence + unknown)
    redis_name = store.name(explanation.key)
    return ExplainedCall(task.name, explanation, redis_name, view, outcome, prediction)


def text_of(canonical: bytes | None) -> str | None:
    """Returns canonical bytes as text."""
    return None if canonical is None else canonical.decode(errors="backslashreplace")
