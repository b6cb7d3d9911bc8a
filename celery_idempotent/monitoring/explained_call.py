"""Explains a call: how its key is derived, and what would happen if it were published now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.errors import KeyRuleError
from celery_idempotent.key.explicit import message_form
from celery_idempotent.key.parameters import Argument
from celery_idempotent.key.rule import TASK_ID, Explanation
from celery_idempotent.monitoring import json_format
from celery_idempotent.monitoring.prediction import Prediction, predict
from celery_idempotent.printable import did_you_mean
from celery_idempotent.store.inspection.record_query import read_view
from celery_idempotent.store.inspection.record_reader import RecordView


class ExplainedCall(NamedTuple):
    """A call's key, its record, and the resulting prediction."""

    #: Name of the task.
    task: str
    explanation: Explanation
    #: The record's name in Redis.
    redis_name: str
    #: None if there is no record.
    view: RecordView | None
    prediction: Prediction

    def participation(self, argument: Argument) -> tuple[str, str]:
        """Returns whether the argument is in the key, and whether it is in the fingerprint."""
        in_key = {True: "yes", False: "no", None: "decided by the callable"}[argument.in_key]
        if self.explanation.key.fingerprint:
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
            "redis_name": self.redis_name,
            "record": None if self.view is None else json_format.view_fields(self.view),
            "prediction": self.prediction._asdict(),
        }


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
        StoreUnavailableError: if Redis does not reply.
        TypeError: if the arguments do not fit the task, or a TASK_ID is missing.
    """
    by_name = {task.name: task for task in tasks}
    task = by_name.get(name)
    if task is None:
        hint = did_you_mean(str(name), by_name)
        raise KeyRuleError(f"{name!r} is not an idempotent task of this app{hint}")
    configuration = task.idempotency_configuration
    if configuration.settings.key is TASK_ID and not (explicit_key or task_id):
        raise TypeError(f"the key rule of {name} is TASK_ID: give {task_id_named}")
    explicit = None if explicit_key is None else message_form(task.name, explicit_key)
    try:
        explanation = configuration.rule.explain(args, kwargs, task_id=task_id, explicit=explicit)
    except TypeError as error:
        raise TypeError(f"the arguments do not fit {name}: {error}") from None
    store = configuration.executor.store
    view = read_view(store, explanation.key)
    prediction = predict(explanation.key, configuration.settings, view)
    redis_name = store.name(explanation.key)
    return ExplainedCall(task.name, explanation, redis_name, view, prediction)


def text_of(canonical: bytes | None) -> str | None:
    """Returns canonical bytes as text."""
    return None if canonical is None else canonical.decode(errors="backslashreplace")
