"""Debouncing: the waiting message begins once no publish has come for ``idempotency_debounce``.

The first publish of a burst reserves the key until the end of its *quiet time*, and its message has
that end as its ETA. Each later publish moves the end in the reservation, up to
``idempotency_debounce_max_wait`` after the first one. A message that is delivered before the end is
put back until then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from celery_idempotent.core.flow.extension import Option
from celery_idempotent.core.task.message.eta import delay_of
from celery_idempotent.core.task.publish.dedupe import Publication
from celery_idempotent.errors import SettingsError
from celery_idempotent.settings import Settings

#: The longest wait after the first publish, in quiet times, if no option limits it.
MAX_QUIET_TIMES = 10


class Debounce(Option):
    """The options ``idempotency_debounce`` and ``idempotency_debounce_max_wait``."""

    @classmethod
    def resolve(cls, settings: Settings, where: str, app: Any) -> Settings:
        """Checks the options; returns settings whose reservations exceed the quiet time."""
        quiet, most = settings.debounce, settings.debounce_max_wait
        if quiet is None:
            raise SettingsError(
                f"{where}: idempotency_debounce_max_wait limits idempotency_debounce: set both"
            )
        if not settings.takes_newest:
            raise SettingsError(
                f"{where}: idempotency_debounce needs a waiting call to postpone: set "
                "idempotency_until = 'started', and leave idempotency_dedupe_publish on"
            )
        if most is not None and most < quiet:
            raise SettingsError(
                f"{where}: idempotency_debounce_max_wait ({most:g} s) is shorter than "
                f"idempotency_debounce ({quiet:g} s)"
            )
        return replace(settings, reservation_ttl=settings.reservation_ttl + quiet)

    @classmethod
    def reserving(cls, settings: Settings, publication: Publication) -> dict[str, Any]:
        """Returns the quiet time and the longest wait, and gives the message its ETA."""
        # `delay`: until the ETA that the caller has set, before which the message must not run.
        quiet, delay = settings.debounce or 0.0, delay_of(publication.options)
        most = settings.debounce_max_wait or quiet * MAX_QUIET_TIMES
        if delay < quiet:
            publication.options.update(eta=None, countdown=quiet)
        quiet, most = max(delay, quiet), max(delay, most)
        return {"quiet_ms": round(quiet * 1000), "max_wait_ms": round(most * 1000)}
