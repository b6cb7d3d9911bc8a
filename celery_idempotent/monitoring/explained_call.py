"""Explains a call: how its key is derived, and what would happen to it if it were published now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.key.explanation import Argument, Explanation
from celery_idempotent.key.explicit import message_form
from celery_idempotent.monitoring import json_format
from celery_idempotent.monitoring.prediction import Prediction, predict
from celery_idempotent.store.inspection.record_query import RecordView, read_view


class ExplainedCall(NamedTuple):
    """A call's key, its record, and what follows from them."""

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
    task: IdempotentTaskLike,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    own_key: str | tuple[str, ...] | None = None,
    task_id: str | None = None,
) -> ExplainedCall:
    """Derives the key of a call, reads its record, and predicts what would happen.

    Args:
        own_key: the key that the call brings, if any.
        task_id: the id of the message, for the key rule TASK_ID.

    Raises:
        KeyRuleError: if no key can be derived.
        StoreUnavailableError: if Redis does not reply.
        TypeError: if the arguments do not fit the task.
    """
    configuration = task.idempotency_configuration
    explicit = None if own_key is None else message_form(task.name, own_key)
    explanation = configuration.rule.explain(args, kwargs, task_id=task_id, explicit=explicit)
    store = configuration.executor.store
    view = read_view(store, explanation.key)
    prediction = predict(explanation.key, configuration.settings, view)
    redis_name = store.name(explanation.key)
    return ExplainedCall(task.name, explanation, redis_name, view, prediction)


def text_of(canonical: bytes | None) -> str | None:
    """Returns canonical bytes as text."""
    return None if canonical is None else canonical.decode(errors="backslashreplace")
