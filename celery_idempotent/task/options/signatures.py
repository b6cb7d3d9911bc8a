"""Signatures of idempotent tasks: they reject misspelt options and invalid keys when these are set.

A canvas publishes its first tasks before a later one could raise an error.
"""

from __future__ import annotations

from typing import Any

from celery.canvas import Signature, chunks, xmap, xstarmap

from celery_idempotent.errors import KeyRuleError
from celery_idempotent.key.explicit import message_form
from celery_idempotent.settings import check_value
from celery_idempotent.task.options import call_options


class CallSignature(Signature):
    """The signature of one call."""

    def set(self, immutable: bool | None = None, **options: Any) -> Signature:
        """Sets options of the call, as Celery does.

        Raises:
            TypeError: if an option is named like one of this package and does not exist.
            KeyRuleError: if `idempotency_key` cannot be used as a key.
            SettingsError: if `idempotency_result_ttl` is not a valid number of seconds.
        """
        call_options.check("set", options)
        in_shadow = self.type.idempotency_configuration.in_shadow
        if (
            not in_shadow
            and (result_ttl := options.get(call_options.RESULT_TTL_OPTION)) is not None
        ):
            check_value(call_options.RESULT_TTL_OPTION, result_ttl, self.task)
        key = options.get(call_options.KEY_OPTION)
        if key is not None and key is not False:
            try:
                # Not every serializer of tasks writes a UUID.
                key = message_form(self.task, key)
            except KeyRuleError:
                if not in_shadow:
                    raise
                key = ""  # counted as refused in the worker
            options[call_options.KEY_OPTION] = key
        return super().set(immutable, **options)


class _ItemsSignature(Signature):
    """The signature of a message with several calls, each with the key of its own arguments."""

    def set(self, immutable: bool | None = None, **options: Any) -> Signature:
        call_options.check("set", options, known=())
        return super().set(immutable, **options)

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        call_options.check("apply_async", options, known=())
        return super().apply_async(args, kwargs, **options)


class MapSignature(_ItemsSignature, xmap):
    """The signature of ``map``."""


class StarmapSignature(_ItemsSignature, xstarmap):
    """The signature of ``starmap``."""


class ChunksSignature(_ItemsSignature, chunks):
    """The signature of ``chunks``."""
