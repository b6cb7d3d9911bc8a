"""The messages of an outbox, as they are stored."""

from __future__ import annotations

import json
from functools import partial

from celery import Celery, chain

from celery_idempotent.extensions import outbox


def test_a_canvas_is_stored_by_the_serializer_of_its_tasks() -> None:
    """That of the canvas itself is the default of the app."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.accept_content = ["json", "pickle"]

    @app.task(name="shop.charge", serializer="pickle", shared=False)
    def charge(amount: complex) -> None: ...

    canvas = chain(charge.si(1j), charge.si(2j))
    (message,) = json.loads(outbox.store("the key", app, [canvas.delay]))

    assert [sig.args for sig in outbox.load(app, message).tasks] == [(1j,), (2j,)]
    publish = partial(charge.s().apply_async, kwargs={"amount": 3j})
    (message,) = json.loads(outbox.store("the key", app, [publish]))
    loaded = outbox.load(app, message)
    assert (loaded.kwargs, loaded.app) == ({"amount": 3j}, app)
    app.close()
