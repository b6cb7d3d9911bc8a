"""The error for an option that does not exist, with the one that is meant, and for a value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from celery_idempotent.errors import SettingsError

_ANY_PREFIX = re.compile(r"^idem(\w*?(cy|nt))?_?")


def unknown_option(
    name: str, where: str, known: Collection[str], of_app: Collection[str] = ()
) -> SettingsError:
    """Returns the error for an option that is not among the `known` ones.

    It suggests the option of that meaning, else the most similar one.

    Args:
        of_app: the options that only an app has.
    """
    if name in of_app:
        return SettingsError(
            f"{where}: {name} is an option of the app, not of a task; set it in the app's "
            "configuration"
        )
    word = _ANY_PREFIX.sub("", name)
    options = {option.removeprefix("idempotency_"): option for option in known}
    if word == "wait_timeout" and word not in options:
        return SettingsError(
            f"{where}: {name} applies outside tasks only, since a duplicate message does not wait "
            "in a process: remove it"
        )
    meant = _MEANT.get(word, word)
    close = [meant] if meant in options else difflib.get_close_matches(word, options, 1)
    hint = f"; did you mean {options[close[0]]}?" if close else ""
    return SettingsError(f"{where}: there is no option {name}{hint}")


def wrong_value(
    option: str, value: Any, is_valid: Callable[[Any], bool], expected: str, *, is_secret: bool
) -> SettingsError:
    """Returns the error for a value that an option cannot have."""
    shown = type(value).__name__ if is_secret else _describe(value)
    if not is_secret and is_valid(()):  # the option is a tuple of classes
        is_tuple = isinstance(value, (tuple, list))
        wrong = next(each for each in value if not is_valid((each,))) if is_tuple else value
        shown = wrong.__name__ if isinstance(wrong, type) else _describe(wrong)
        if is_tuple:
            shown = f"one with {shown}"
        elif is_valid((value,)):
            shown += f"; write ({shown},)"
    return SettingsError(f"{option} must be {expected}, not {shown}")


def _describe(value: Any) -> str:
    """Returns a value for an error message; never a URL, which may hold a password."""
    is_short_text = isinstance(value, str) and "://" not in value and len(value) <= 40
    is_shown = value is None or isinstance(value, (int, float)) or is_short_text
    return repr(value) if is_shown else type(value).__name__


#: Names that other libraries have for an option.
_MEANT: Mapping[str, str] = {
    other: option
    for option, others in {
        "enabled": "active disabled enable",
        "shadow": "dry_run observe",
        "key": "id name template unique_key unique_on",
        "until": "mode scope",
        "lease": "heartbeat lock lock_expiry lock_timeout lock_ttl timeout visibility_timeout",
        "result_ttl": "cache_ttl expiration expires expiry retention ttl window",
        "error_ttl": "failure_ttl",
        "replay_errors": "cache_errors errors store_errors",
        "on_conflict": "duplicates on_duplicate policy raise_on_duplicate",
        "wait_timeout": "acquire_timeout blocking_timeout wait",
        "max_attempts": "attempts max_retries retries",
        "on_store_error": "fail_open on_outage on_redis_error",
        "dedupe_publish": "dedup dedupe deduplicate unique",
        "reservation_ttl": "queue_ttl",
        "store_result": "cache_result ignore_result",
        "encryption_keys": "encrypt encryption secret secret_key",
        "transaction": "database db engine",
        "redis_url": "backend backend_url broker redis storage store url",
        "key_prefix": "namespace prefix",
        "label": "description title",
        "debounce": "delay throttle",
    }.items()
    for other in others.split()
}
