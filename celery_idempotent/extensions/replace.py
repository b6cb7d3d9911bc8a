"""Replacement: a newer call takes the key from the running one (``on_conflict="replace"``).

The begin of the newer call spends the older one's token and makes its record name the newer call.
The next heartbeat of the older one is refused: then ``self.idempotency.check()`` and its next step
raise ReplacedError. Its outcome is refused. Its caller gets that error, and so do its copies and
its retry.
"""

from __future__ import annotations

from typing import Any

from celery_idempotent.core.flow.call import Call
from celery_idempotent.core.flow.extension import Extension
from celery_idempotent.core.store import commands
from celery_idempotent.errors import SettingsError
from celery_idempotent.settings import Settings


class Replace(Extension):
    """Makes the begin of a call take the key from a running one."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        call.replaces = commands.REPLACES

    @classmethod
    def resolve(cls, settings: Settings, where: str, app: Any) -> Settings:
        """Checks that a newer call can take the key, and is published."""
        option = "idempotency_on_conflict = 'replace'"
        if not settings.runs_again:
            raise SettingsError(
                f"{where}: {option} needs a key that may run again: set idempotency_until to "
                "'finished' or 'started'"
            )
        if settings.deduplicates and not settings.collapses:
            raise SettingsError(
                f"{where}: idempotency_dedupe_publish keeps the newer call of {option} from being "
                "published: remove it, or set idempotency_until = 'started'"
            )
        if settings.transaction:
            raise SettingsError(
                f"{where}: {option} cannot end a call with idempotency_transaction, whose commit "
                "decides: choose one of them"
            )
        return settings
