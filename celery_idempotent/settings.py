"""The options: one frozen value a task, checked once, each fault told in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from celery_idempotent.errors import SettingsError

PREFIX = "idempotency_"

ON_CONFLICT = ("retry", "wait", "raise", "ignore", "reject")
ON_STORE_ERROR = ("retry", "run", "raise")
ON_LEASE_LOST = ("finish", "abort")
ON_STORE_UNAVAILABLE_AT_START = ("wait", "stop", "go")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a task goes by. Times are in seconds, sizes in bytes."""

    #: False lets every call through ungated.
    enabled: bool = True
    #: None: all arguments. Else a template, argument names, a callable or TASK_ID.
    key: Any = None
    #: Right to run without a heartbeat; extended every third of it.
    lease: float = 60.0
    #: How long a result is kept.
    result_ttl: float = 86400.0
    #: How long an error that ended the key is kept.
    error_ttl: float = 86400.0
    #: Exceptions that end the key; every other one gives it back.
    replay_errors: tuple[type[BaseException], ...] = ()
    #: What a duplicate does while the first one runs.
    on_conflict: str = "retry"
    #: How long ``on_conflict="wait"`` stays in the worker.
    wait_timeout: float = 10.0
    #: Executions that may die in a row before the key is FAILED as poisoned.
    max_attempts: int = 5
    #: What a task does when Redis cannot be asked.
    on_store_error: str = "retry"
    #: What an execution does that has lost its lease.
    on_lease_lost: str = "finish"
    #: Whether publishing reserves the key.
    dedupe_publish: bool = False
    #: False keeps the fact that the key completed, not the value.
    store_result: bool = True
    #: kombu serializer; None: the app's result_serializer.
    serializer: str | None = None
    #: kombu compression.
    compression: str | None = None
    #: Smaller values stay as they are.
    compression_threshold: int = 1024
    #: Fernet keys, the newest first; or a function, or the dotted path of one, that gives them.
    encryption_keys: Any = field(default=None, repr=False)
    #: Above it the value is not kept in Redis.
    max_result_size: int = 1024 * 1024
    #: URL of a Celery key-value backend for values above `max_result_size`.
    offload_backend: str | None = field(default=None, repr=False)
    #: None: the result backend, else the broker, if that is Redis.
    redis_url: str | None = field(default=None, repr=False)
    #: First part of every name in Redis.
    key_prefix: str = "idem"
    #: For the client: master_name, sentinel_kwargs, ssl_ca_certs and whatever redis-py takes; None:
    #: those of the result backend, or the broker, whose Redis it is.
    redis_options: Mapping[str, Any] | None = field(default=None, repr=False)
    #: A redis-py client of the user's own, what makes one, or the path to either.
    redis_client: Any = field(default=None, repr=False)
    #: What one command may take, resends included.
    redis_timeout: float = 5.0
    #: What connecting may take.
    redis_connect_timeout: float = 2.0
    #: Replicas that must have a begin or an outcome before it counts.
    wait_replicas: int = 0
    #: How long that may take.
    wait_replicas_timeout: float = 1.0
    #: Whether it must have reached the disks, too (WAITAOF).
    wait_aof: bool = False
    #: Commands that may fail in a row before Redis is left alone for a while.
    breaker_threshold: int = 2
    #: The longest while.
    breaker_max_delay: float = 30.0
    #: What a worker does at its start when Redis is away; None: ``go`` where `on_store_error` is
    #: ``run``, else ``wait``.
    on_store_unavailable_at_start: str | None = None

    @cached_property
    def lease_ms(self) -> int:
        """The lease in milliseconds."""
        return round(self.lease * 1000)

    @cached_property
    def result_ms(self) -> int:
        """Retention of a result in milliseconds."""
        return round(self.result_ttl * 1000)

    @cached_property
    def error_ms(self) -> int:
        """Retention of an error in milliseconds."""
        return round(self.error_ttl * 1000)


OPTIONS: tuple[str, ...] = tuple(PREFIX + option.name for option in fields(Settings))

#: Their values appear in no error, not even short ones.
_SECRET = frozenset(PREFIX + option.name for option in fields(Settings) if not option.repr)

#: What an app, not a task, can be told.
APP_OPTIONS: tuple[str, ...] = ("idempotency_metrics",)


def build(values: Mapping[str, Any], where: str) -> Settings:
    """The settings that `values` (option name to value) make; the rest is at its default.

    Args:
        where: the task, for the error's sentence.

    Raises:
        SettingsError: naming the first option whose value is of a wrong type or range.
    """
    for option, value in values.items():
        wanted = _fault(option, value)
        if wanted:
            shown = type(value).__name__ if option in _SECRET else _shown(value)
            raise SettingsError(f"{where}: {option} must be {wanted}, not {shown}")
    given = {option.removeprefix(PREFIX): value for option, value in values.items()}
    _check_wait(given, where)
    for name in ("replay_errors", "encryption_keys"):
        if isinstance(given.get(name), list):
            given[name] = tuple(given[name])
    return Settings(**given)


def _check_wait(given: Mapping[str, Any], where: str) -> None:
    """A connection must not give up while Redis still waits for its replicas."""
    settings = Settings(**{name: given[name] for name in _WAIT if name in given})
    waits = settings.wait_replicas or settings.wait_aof
    if waits and settings.wait_replicas_timeout > settings.redis_timeout / 2:
        raise SettingsError(
            f"{where}: idempotency_wait_replicas_timeout must be at most half of "
            f"idempotency_redis_timeout ({settings.redis_timeout:g} s)"
        )


_WAIT = ("wait_replicas", "wait_aof", "wait_replicas_timeout", "redis_timeout")


def check_names(names: Iterable[str], where: str, known: Collection[str] = OPTIONS) -> None:
    """Refuse any of `names` that looks like an option and is not among the `known` ones.

    Raises:
        SettingsError: naming it, and the option that was probably meant.
    """
    for name in names:
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise SettingsError(f"{where}: there is no option {name}{hint}")


_Check = tuple[Callable[[Any], bool], str]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _seconds(least: float) -> _Check:
    # A year, because a typing error of a few zeros must not outlive everybody.
    return (
        lambda value: _is_number(value) and least <= value <= 366 * 86400,
        f"a number of seconds, at least {least:g}, at most a year",
    )


def _whole(least: int, most: int) -> _Check:
    return (
        lambda value: _is_number(value) and isinstance(value, int) and least <= value <= most,
        f"a whole number from {least} to {most}",
    )


def _one_of(*choices: str) -> _Check:
    return lambda value: value in choices, "one of " + ", ".join(repr(c) for c in choices)


def _text(what: str, *, optional: bool = True) -> _Check:
    return (
        lambda value: (optional and value is None) or (isinstance(value, str) and value != ""),
        what,
    )


def _are_errors(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(
        isinstance(item, type) and issubclass(item, BaseException) for item in value
    )


def _are_keys(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and all(isinstance(key, (str, bytes)) and key for key in value)
    return value is None or callable(value) or _is_path(value)


def _is_client(value: Any) -> bool:
    return callable(value) or hasattr(value, "evalsha") or _is_path(value)


def _is_path(value: Any) -> bool:
    """``shop.redis:client``; a URL is none."""
    return isinstance(value, str) and re.fullmatch(r"\w+([.:]\w+)+", value) is not None


def _is_prefix(value: Any) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable() and " " not in value


_FLAG: _Check = (lambda value: isinstance(value, bool), "True or False")

_CHECKS: Mapping[str, _Check] = {
    "enabled": _FLAG,
    "lease": _seconds(0.5),
    "result_ttl": _seconds(1),
    "error_ttl": _seconds(1),
    "replay_errors": (_are_errors, "a tuple of exception classes"),
    "on_conflict": _one_of(*ON_CONFLICT),
    "wait_timeout": _seconds(0),
    "max_attempts": _whole(1, 255),
    "on_store_error": _one_of(*ON_STORE_ERROR),
    "on_lease_lost": _one_of(*ON_LEASE_LOST),
    "dedupe_publish": _FLAG,
    "store_result": _FLAG,
    "serializer": _text("the name of a kombu serializer"),
    "compression": _text("the name of a kombu compression"),
    "compression_threshold": _whole(0, 512 * 1024 * 1024),
    "encryption_keys": (
        _are_keys,
        "a tuple of Fernet keys, the newest first, or a function that gives it, or its path",
    ),
    "max_result_size": _whole(0, 512 * 1024 * 1024),
    "offload_backend": _text("the URL of a Celery key-value backend"),
    "redis_url": _text("the URL of a Redis"),
    "key_prefix": (_is_prefix, "printable text without spaces"),
    "redis_options": (lambda value: isinstance(value, Mapping), "a mapping of option to value"),
    "redis_client": (_is_client, "a redis-py client, what makes one, or the path to either"),
    "redis_timeout": _seconds(0.01),
    "redis_connect_timeout": _seconds(0.01),
    "wait_replicas": _whole(0, 100),
    "wait_replicas_timeout": _seconds(0.001),
    "wait_aof": _FLAG,
    "breaker_threshold": _whole(1, 1_000_000),
    "breaker_max_delay": _seconds(0.01),
    "on_store_unavailable_at_start": _one_of(*ON_STORE_UNAVAILABLE_AT_START),
}


def _fault(option: str, value: Any) -> str | None:
    """What `option` must be, if `value` is not that. A key rule is judged with its signature."""
    check = _CHECKS.get(option.removeprefix(PREFIX))
    return None if check is None or check[0](value) else check[1]


def _shown(value: Any) -> str:
    """A value fit for an error: never a URL, which may hold a password."""
    if isinstance(value, (bool, int, float)) or value is None:
        return repr(value)
    if isinstance(value, str) and "://" not in value and len(value) <= 40:
        return repr(value)
    return type(value).__name__
