"""The options of one call, and the places where callers put them by mistake.

Celery accepts an option of any name and passes it to the broker as a property of the message, which
some brokers keep and others drop. The call would then run under the key of the task's rule, so a
name that begins with ``idempotency`` in a wrong place is an error: at publish if the task is known
there, otherwise in the worker, where the error names the place.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from celery.signals import before_task_publish

from celery_idempotent.core.events.report import log_extra
from celery_idempotent.core.task.message.message_headers import (
    DERIVED_KEY_HEADER,
    EXPLICIT_KEY_HEADER,
    RESULT_TTL_HEADER,
)
from celery_idempotent.settings import OPTIONS, PREFIX, SIMILAR_PREFIX

logger = logging.getLogger(__name__)

#: The options of one call, which have the names of the headers that carry them.
CALL_OPTIONS = (EXPLICIT_KEY_HEADER, RESULT_TTL_HEADER)
#: The header that names the misplaced options of a publisher, for the worker.
MISPLACED_HEADER = "idempotency_misplaced"

#: The options as functions spell them, which would have no effect here.
_UNPREFIXED = {option.removeprefix(PREFIX) for option in CALL_OPTIONS}

#: A name with at least this similarity to an option (1 is equality) counts as a misspelling.
SIMILAR = 0.88


def check(function: str, options: Mapping[str, Any], known: tuple[str, ...] = CALL_OPTIONS) -> None:
    """Rejects options of a call that are named like options of this package but do not exist.

    Args:
        function: its name, for the error message.

    Raises:
        TypeError: suggesting the right name.
    """
    for name in (*named_like_options(options), *_UNPREFIXED.intersection(options)):
        if name in known:
            continue
        hint = ": a retry keeps the key of its call"
        if name in OPTIONS and name not in CALL_OPTIONS:
            hint = "; it is an option of tasks, set it on the task"
        elif known:
            hint = f"; did you mean {nearest(name)!r}?"
        raise TypeError(f"{function}() takes no option {name!r}{hint}")


@lru_cache(1024)
def names_any(names: tuple[str, ...]) -> bool:
    """Returns whether any of `names`, of headers, properties or arguments, may mean an option."""
    return bool(named_like_options(names))


@before_task_publish.connect(weak=False)
def _mark_misplaced(
    sender: Any, headers: dict[str, Any], properties: Mapping[str, Any], **_: Any
) -> None:
    """Marks a message with a misplaced option, which its worker refuses.

    Celery sends the option as a property, and catches errors that this function raises.
    """
    if names_any(tuple(properties)) and (misplaced := named_like_options(properties)):
        names = ", ".join(misplaced)
        headers[MISPLACED_HEADER] = names
        logger.error(
            "%s is published with the option %s, which is not read: an idempotent task refuses it "
            "(pass headers={%r: …}), and a plain task runs unprotected (base=IdempotentTask)",
            sender, names, nearest(misplaced[0]),
            extra=log_extra(None, task_id=headers.get("id")),
        )  # fmt: skip


def named_like_options(names: Iterable[str]) -> list[str]:
    """Returns the `names` that resemble an option or begin with ``idempotency``, in any case.

    The header that only this package writes is left out.
    """
    return [
        name for name in map(str, names) if _is_like_option(name) and name != DERIVED_KEY_HEADER
    ]


def _is_like_option(name: str) -> bool:
    word = name.lower()
    return word.startswith("idempotency") or (
        word.startswith(SIMILAR_PREFIX) and bool(nearest(word, SIMILAR))
    )


def nearest(name: str, least: float = 0.0) -> str:
    """Returns the option of a call that is most similar to `name`; empty below `least`."""
    return "".join(difflib.get_close_matches(name[:64].lower(), CALL_OPTIONS, 1, least))
