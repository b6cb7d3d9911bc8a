"""Tasks in the middle of a migration: with the base classes that the guides print.

Empty without celery-once and celery-singleton.
"""

from __future__ import annotations

import warnings
from typing import Any

from celery import shared_task

from tests.docs.pages import ROOT, block_with
from tests.worker.ledger import Ledger
from tests.worker.tasks import handle

#: The options of a task for each library; IdempotentTask ignores them.
OPTIONS: dict[str, dict[str, Any]] = {
    "once": {"once": {"keys": ["order"], "timeout": 60}},
    "singleton": {"unique_on": ["order"]},
}


def retry_once(self: Any, order: str, countdown: float) -> str:
    """Retries in the first execution."""
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
        if len(ledger.runs(order)) == 1:
            raise self.retry(countdown=countdown)
        return "retried"


def _base_class(library: str) -> Any:
    guide = ROOT / f"docs/migrating-from-celery-{library}.md"
    names: dict[str, Any] = {"__name__": __name__}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's, of escape sequences in celery-once
            exec(block_with(guide, "class TransitionalTask"), names)
    except ModuleNotFoundError:
        return None
    return names["TransitionalTask"]


for _library, _options in OPTIONS.items():
    if _base := _base_class(_library):
        for _name, _body in (("handle", handle), ("retry", retry_once)):
            shared_task(
                _body,
                bind=True,
                base=_base,
                name=f"shop.{_library}_{_name}",
                idempotency_key=("order",),
                **_options,
            )
