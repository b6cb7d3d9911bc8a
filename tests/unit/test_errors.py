"""Errors survive the result backend, which stores their type and arguments."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import errors
from celery_idempotent.core.payload.result_codec import ResultCodec

CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type)]
ERRORS = [*(cls("It is so; do this") for cls in CLASSES), errors.ConflictError("It is held", "id")]


@pytest.fixture(params=["json", "pickle", "record", "pickled"])
def through(request: pytest.FixtureRequest) -> Any:
    """Stores an error and returns it as another process reads it."""
    serializer = "pickle" if request.param == "pickle" else "json"
    app = Celery(backend="cache+memory://", result_serializer=serializer, set_as_current=False)
    if request.param == "pickled":
        return lambda error: pickle.loads(pickle.dumps(error))
    if request.param == "record":
        codec = ResultCodec(app)
        return lambda error: codec.restore_error(json.loads(json.dumps(codec.prepare_error(error))))
    backend = app.backend
    return lambda error: backend.exception_to_python(backend.prepare_exception(error))


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_text_and_attributes_survive(error: errors.IdempotencyError, through: Any) -> None:
    stored = through(error)

    assert type(stored) is type(error)
    assert (str(stored), stored.args) == (str(error), error.args)
    assert str(error).startswith("It is ")
    names = [name for name in dir(error) if not name.startswith("_") and name != "with_traceback"]
    for name in names:
        value = getattr(stored, name)
        assert callable(value) or value == getattr(error, name)


def test_the_task_id_of_a_conflict_is_an_argument() -> None:
    assert errors.ConflictError("It is held", "the-first").task_id == "the-first"
    assert errors.ConflictError("It is held").task_id is None
