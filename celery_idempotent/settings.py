"""The options of a task, validated once; each error names the option in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

from kombu.utils.imports import symbol_by_name

from celery_idempotent.core.record import OFFLOADED
from celery_idempotent.errors import SettingsError

PREFIX = "idempotency_"
#: A name that begins with it is compared with those of the options, so that misspelt ones such as
#: ``idempotent_key`` are reported.
SIMILAR_PREFIX = "idem"


#: A function that returns whether a value is valid, and the words of an error for what it must be.
_Validator = tuple[Callable[[Any], bool], str]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _seconds(least: float) -> _Validator:
    # The maximum catches typos: with a few zeros too many, records would be kept for centuries.
    return (
        lambda value: _is_number(value) and least <= value <= 366 * 86400,
        f"seconds or a timedelta, at least {least:g}, at most a year",
    )


def _seconds_or_none(least: float) -> _Validator:
    is_valid, expected = _seconds(least)
    return lambda value: value is None or is_valid(value), f"{expected}, or None"


def _whole(least: int, most: int, of: str = "") -> _Validator:
    return (
        lambda value: _is_number(value) and isinstance(value, int) and least <= value <= most,
        f"a whole number {of}from {least} to {most}",
    )


def _one_of(*choices: str) -> _Validator:
    return lambda value: value in choices, "one of " + ", ".join(repr(c) for c in choices)


def _text(description: str) -> _Validator:
    return lambda value: value is None or (isinstance(value, str) and value != ""), description


def _are_errors(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(
        isinstance(item, type) and issubclass(item, Exception) for item in value
    )


def _are_keys(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and all(
            key is None or (isinstance(key, (str, bytes)) and key) for key in value
        )
    return value is None or callable(value) or _is_path(value)


def _is_client(value: Any) -> bool:
    return callable(value) or hasattr(value, "evalsha") or _is_path(value)


def _is_database(value: Any) -> bool:
    """Whether `value` is a path, an alias, a blocking SQLAlchemy engine, or False for none."""
    if isinstance(value, str):
        return re.fullmatch(r"[\w-]+([.:]\w+)*", value) is not None
    is_engine = hasattr(value, "dialect") and not hasattr(value, "sync_engine")
    return is_engine or value is None or value is False


def _is_path(value: Any) -> bool:
    """Whether `value` is a path such as ``shop.redis:client``."""
    return isinstance(value, str) and re.fullmatch(r"\w+([.:]\w+)+", value) is not None


def imported(option: str, path: str) -> Any:
    """Returns the object that the value of an option names.

    Raises:
        SettingsError: if it cannot be imported.
    """
    try:
        return symbol_by_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"{option} {path!r} cannot be imported: {type(error).__name__}"
        ) from None


def _is_prefix(value: Any) -> bool:
    # Redis Cluster hashes only the part of a name between braces. `StoreConfig` sets the braces
    # itself, so that all names of a key have one slot.
    is_text = isinstance(value, str) and value != "" and value.isprintable()
    return is_text and not set(value) & set(" {}")


_FLAG: _Validator = (lambda value: isinstance(value, bool), "True or False")


def _option(
    default: Any,
    is_valid: Callable[[Any], bool],
    expected: str,
    *,
    secret: bool = False,
    extension: str | Mapping[str | None, str] | None = None,
    **properties: str,
) -> Any:
    """Returns a field.

    Args:
        secret: its value is never part of an error message or of the log.
        extension: ``module:Class`` of the extension that carries it out, or a mapping with one for
            each value that has one.
        properties: ``scope``: ``task`` for tasks only, ``function`` for functions only, ``engine``
            if no single function can set it. ``since``: the first version that has it. ``mark``:
            the prefix of the format name of payloads that the option changes.
    """
    paths = {None: extension} if isinstance(extension, str) else extension or {}
    metadata = {"validator": (is_valid, expected), "extensions": paths, **properties}
    return field(default=default, repr=not secret, metadata=metadata)


_secret = partial(_option, None, secret=True)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a task. Times are in seconds (given as numbers or timedelta), sizes in bytes.

    The comment of an option, under that of its group, is its text in the reference.
    """

    # Group: Switching on and off, and monitoring
    # (the first, since `shadow` switches other options off)

    #: Whether calls are protected; False runs every call as a plain task.
    enabled: bool = _option(True, *_FLAG)
    #: Whether every call runs as a plain task while the decisions about it are only counted.
    shadow: bool = _option(False, *_FLAG, extension="shadow:Shadow", scope="task")

    # Group: The five that most people set

    #: The key rule: a template such as ``"order:{order_id}"``, a tuple of argument names, a
    #: function of the arguments, or ``TASK_ID`` (only copies of one message are duplicates). By
    #: default all arguments. As an option of a call: its key, or False for no protection.
    key: Any = _option(None, lambda _: True, "", scope="task")  # noqa: RUF009 - its rule checks it
    #: When a key may run again. ``expired``: once its outcome has expired. ``finished``: once its
    #: run has ended, so its calls run one at a time. ``started``: like ``finished``, but at most
    #: one call waits while another runs, and runs with the newest arguments: it collapses bursts.
    until: str = _option(
        "expired",
        *_one_of("expired", "finished", "started"),
        extension={"started": "newest:Newest"},
    )
    #: The time for which a result is kept. With ``until`` other than ``expired``: the time for
    #: which copies of a message are recognized after its end.
    result_ttl: float = _option(86400.0, *_seconds(1))
    #: Exceptions that end the key and are raised again for duplicates; any other exception releases
    #: the key.
    replay_errors: tuple[type[Exception], ...] = _option(
        (), _are_errors, "a tuple of subclasses of Exception"
    )
    #: Decides what happens to a duplicate while another execution runs. ``retry``, or
    #: ``wait``: it is put back, and woken when the other one ends. ``raise``: ConflictError.
    #: ``ignore``: it ends. ``reject``: it goes to the broker's dead-letter queue. ``replace``, with
    #: ``until`` other than ``expired``: it takes the key from the other one, whose outcome is
    #: refused and whose caller gets ReplacedError.
    on_conflict: str = _option(
        "retry",
        *_one_of("retry", "wait", "raise", "ignore", "reject", "replace"),
        extension={"replace": "replace:Replace"},
    )

    # Group: After a crash

    #: The time after the last renewal before another execution can take over. A heartbeat renews
    #: the lease three times in that time.
    lease: float = _option(60.0, *_seconds(0.5))
    #: Executions that may die in a row before the key becomes FAILED with PoisonedTaskError.
    max_attempts: int = _option(5, *_whole(1, 254))

    # Group: Duplicates before they run

    #: Whether publishing reserves the key: ``delay`` of a key that is in progress or has an outcome
    #: publishes nothing, and returns the first call's result; with ``raise`` it raises
    #: ConflictError, which has the first call's ``task_id``. A duplicate whose caller sets the
    #: task id is still published, because others may wait for its result. On by default if
    #: ``until`` is ``started``.
    dedupe_publish: bool | str | None = _option(
        None,
        lambda value: isinstance(value, bool) or value == "raise",
        "True, False or 'raise'",
        scope="task",
    )
    #: With ``dedupe_publish``: the time after its ETA for which a published message may wait in its
    #: queue before another one is published; never longer than its expiry.
    reservation_ttl: float = _option(3600.0, *_seconds(1), scope="task")
    #: Outside tasks: the longest wait of a duplicate.
    wait_timeout: float = _option(10.0, *_seconds(0), scope="function")
    #: With ``until="started"``: the waiting call begins when no publish of its key came for that
    #: time.
    debounce: float | None = _option(
        None, *_seconds_or_none(0.01), extension="debounce:Debounce", scope="task"
    )
    #: The longest time that ``debounce`` postpones a call after its first publish; by default ten
    #: times ``debounce``.
    debounce_max_wait: float | None = _option(
        None, *_seconds_or_none(0.01), extension="debounce:Debounce", scope="task"
    )

    # Group: What is stored, and for how long

    #: The time for which an error is kept: for all duplicates if it ended the key, otherwise for
    #: copies of its own message.
    error_ttl: float = _option(86400.0, *_seconds(1))
    #: Whether the result is stored, or only the fact that the key is completed.
    store_result: bool = _option(True, *_FLAG)
    #: Maximum bytes as stored; a larger result goes to the offload backend or, without one, is not
    #: stored.
    max_result_size: int = _option(1024 * 1024, *_whole(0, 512 * 1024 * 1024, "of bytes "))
    #: URL of a Celery key-value backend for values above ``max_result_size``.
    offload_backend: str | None = _secret(
        *_text("the URL of a Celery key-value backend"),
        extension="offload:Offload",
        scope="engine",
        mark=OFFLOADED,
    )
    #: kombu serializer of stored results; by default the app's ``result_serializer``.
    serializer: str | None = _option(None, *_text("the name of a kombu serializer"))
    #: kombu compression of stored results, such as ``gzip`` or ``bzip2``.
    compression: str | None = _option(None, *_text("the name of a kombu compression"))
    #: Fernet keys, the newest first, or a function (or its path) that returns them: results, errors
    #: and steps are encrypted. None among them stands for plain text.
    encryption_keys: Any = _secret(  # noqa: RUF009
        _are_keys,
        "a tuple of Fernet keys, the newest first, or a function that returns it, or its path",
        extension="encryption:Encryption",
        scope="engine",
        mark="!",
    )
    #: Whether the script that stores the result also writes it for Celery's result backend, if both
    #: are in one Redis; this saves two round trips.
    fused_completion: bool = _option(True, *_FLAG)
    #: Template of a readable name, such as ``"order {order_id}"``, which is stored in plain text
    #: and shown beside the key.
    label: str | None = _option(
        None, *_text("a template such as 'order {order_id}'"), extension="label:Label", scope="task"
    )

    # Group: Effects in a database

    #: The database whose transactions contain the body and its outcome: a SQLAlchemy engine, the
    #: path of one, or a Django alias; False for none.
    transaction: Any = _secret(  # noqa: RUF009
        _is_database,
        "a blocking SQLAlchemy engine, the path of one, or the alias of a Django database",
        extension="transaction:RowTransaction",
    )

    # Group: The Redis of the records

    #: The server that holds the records; by default the result backend, else the broker, if it is
    #: Redis.
    redis_url: str | None = _secret(*_text("the URL of a Redis server"), scope="engine")
    #: Options of the client, such as master_name, sentinel_kwargs or ssl_ca_certs, in addition to
    #: those of the result backend or the broker if that has the records.
    redis_options: Mapping[str, Any] | None = _secret(
        lambda value: isinstance(value, Mapping), "a mapping of option to value", scope="engine"
    )
    #: A redis-py client, a function that returns one, or the dotted path of either.
    redis_client: Any = _secret(  # noqa: RUF009
        _is_client,
        "a redis-py client, a function that returns one, or the path of either",
        scope="engine",
    )
    #: Time limit of one command, its retries included.
    redis_timeout: float = _option(5.0, *_seconds(0.01), scope="engine")
    #: First part of every name in Redis.
    key_prefix: str = _option(
        "idem", _is_prefix, "printable text without spaces and braces", scope="engine"
    )
    #: Decides what happens to calls while Redis is unavailable. ``retry``: the message is retried
    #: later. ``run``: the call runs without protection. ``raise``: StoreUnavailableError.
    on_store_error: str = _option("retry", *_one_of("retry", "run", "raise"))
    #: Replicas that must acknowledge each begin, step and outcome, within a second.
    wait_replicas: int = _option(0, *_whole(0, 100), scope="engine")

    @cached_property
    def lease_ms(self) -> int:
        """Returns the lease in milliseconds."""
        return round(self.lease * 1000)

    @cached_property
    def result_ms(self) -> int:
        """Returns the retention of a result in milliseconds."""
        return round(self.result_ttl * 1000)

    @cached_property
    def runs_again(self) -> bool:
        """Returns whether a key may run again after its end."""
        return self.until != "expired"

    @cached_property
    def collapses(self) -> bool:
        """Returns whether a publish is deduplicated while another call waits for its turn."""
        return self.until == "started" and self.deduplicates

    @cached_property
    def deduplicates(self) -> bool:
        """Returns whether publishing reserves the key."""
        by_mode = self.until == "started"
        return by_mode if self.dedupe_publish is None else bool(self.dedupe_publish)

    @cached_property
    def takes_newest(self) -> bool:
        """Returns whether a message that waits runs with the arguments of later publishes."""
        return self.collapses and not self.publish_raises

    @cached_property
    def publish_raises(self) -> bool:
        """Returns whether the publish of a duplicate raises ConflictError."""
        return self.dedupe_publish == "raise"

    @cached_property
    def hold_ms(self) -> int:
        """Returns for how many milliseconds a message keeps its reservation; 0 without one."""
        # At least a lease: a message that is put back returns within a lease, and must still have
        # its reservation then.
        return round(max(self.reservation_ttl, self.lease) * 1000) if self.deduplicates else 0

    @cached_property
    def option_classes(self) -> tuple[Any, ...]:
        """Returns the :class:`.extension.Option` of each option that is set, where it has one."""
        chosen = [
            f"celery_idempotent.extensions.{path}"
            for (option, value), path in EXTENSIONS.items()
            if (set_to := getattr(self, option)) and value in (None, set_to)
        ]
        return tuple(map(symbol_by_name, dict.fromkeys(chosen)))

    @cached_property
    def extensions(self) -> tuple[Any, ...]:
        """Returns those of `option_classes` that take part in the flow of a call."""
        return tuple(option for option in self.option_classes if option.in_flow)

    @cached_property
    def error_ms(self) -> int:
        """Returns the retention of an error in milliseconds."""
        return round(self.error_ttl * 1000)

    def may_run(self, attempt: int) -> bool:
        """Returns whether the execution with this number runs; otherwise the key is poisoned."""
        return attempt <= self.max_attempts

    def replays(self, error: BaseException | None) -> bool:
        """Returns whether `error` ends the key, so that duplicates get it."""
        return isinstance(error, self.replay_errors)

    def fits(self, body: bytes) -> bool:
        """Returns whether a record may hold a result, as stored."""
        return len(body) <= self.max_result_size


class TaskOptions:
    """The options as attributes of a task, whose None stands for the setting of that name."""

    idempotency_enabled: bool | None = None
    idempotency_shadow: bool | None = None
    idempotency_key: Any = None
    idempotency_until: str | None = None
    idempotency_result_ttl: float | timedelta | None = None
    idempotency_replay_errors: tuple[type[Exception], ...] | None = None
    idempotency_on_conflict: str | None = None
    idempotency_lease: float | timedelta | None = None
    idempotency_max_attempts: int | None = None
    idempotency_dedupe_publish: bool | str | None = None
    idempotency_reservation_ttl: float | timedelta | None = None
    idempotency_debounce: float | timedelta | None = None
    idempotency_debounce_max_wait: float | timedelta | None = None
    idempotency_error_ttl: float | timedelta | None = None
    idempotency_store_result: bool | None = None
    idempotency_max_result_size: int | None = None
    idempotency_offload_backend: str | None = None
    idempotency_serializer: str | None = None
    idempotency_compression: str | None = None
    idempotency_encryption_keys: Any = None
    idempotency_fused_completion: bool | None = None
    idempotency_label: str | None = None
    idempotency_transaction: Any = None
    idempotency_redis_url: str | None = None
    idempotency_redis_options: Mapping[str, Any] | None = None
    idempotency_redis_client: Any = None
    idempotency_redis_timeout: float | timedelta | None = None
    idempotency_key_prefix: str | None = None
    idempotency_on_store_error: str | None = None
    idempotency_wait_replicas: int | None = None


OPTIONS: tuple[str, ...] = tuple(PREFIX + option.name for option in fields(Settings))


def in_scope(scope: str) -> frozenset[str]:
    """Returns the names of the options that have this ``scope``."""
    return frozenset(o.name for o in fields(Settings) if o.metadata.get("scope") == scope)


#: By option and value: ``module:Class`` of the extension, which is imported once a task sets the
#: option to the value; None as the value stands for any.
EXTENSIONS: Mapping[tuple[str, str | None], str] = {
    (option.name, value): path
    for option in fields(Settings)
    for value, path in option.metadata.get("extensions", {}).items()
}

#: By option: the prefix that marks the format names of the payloads that the option has changed.
MARKS: Mapping[str, str] = {
    option.name: mark for option in fields(Settings) if (mark := option.metadata.get("mark"))
}

_VALIDATORS: Mapping[str, _Validator] = {
    option.name: option.metadata["validator"] for option in fields(Settings)
} | {"redeliver_after": _seconds_or_none(1)}
#: Options whose values are never part of an error message.
_SECRET = frozenset(option.name for option in fields(Settings) if not option.repr)

#: Options of an app, not of a task.
APP_OPTIONS: tuple[str, ...] = (
    "idempotency_doctor_ignore",
    "idempotency_metrics",
    "idempotency_redeliver_after",
)
#: In seconds; the setting ``idempotency_redeliver_after`` replaces it.
DEFAULT_REDELIVER_AFTER = 60.0


def build(values: Mapping[str, Any], where: str) -> Settings:
    """Returns the settings of `values` (option name to value); other options get their default.

    Args:
        values: by the name that an error shows, with or without ``idempotency_``.
        where: begins the message of an error, usually the name of the task.

    Raises:
        SettingsError: naming the first option whose value is of a wrong type or range.
    """
    given = {
        option.removeprefix(PREFIX): check_value(option, value, where)
        for option, value in values.items()
    }
    return Settings(**given)


def check_value(option: str, value: Any, where: str) -> Any:
    """Returns a value of the right type and range; a timedelta in seconds, a list as a tuple.

    Raises:
        SettingsError: naming the option and its valid values.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    validator = _VALIDATORS.get(option.removeprefix(PREFIX), (lambda _: True, ""))
    if not validator[0](value):
        from celery_idempotent.unknown_option import wrong_value

        is_secret = option.removeprefix(PREFIX) in _SECRET
        raise wrong_value(f"{where}: {option}", value, *validator, is_secret=is_secret)
    return tuple(value) if isinstance(value, list) else value


def check_names(names: Iterable[str], where: str, known: Collection[str] = OPTIONS) -> None:
    """Rejects names that look like options but are not `known`.

    Such names begin with ``idempotency_`` or resemble an option.

    Raises:
        SettingsError: suggesting the option that is meant.
    """
    for name in names:
        if name in known:
            continue
        if name.startswith(PREFIX) or (
            name.startswith(SIMILAR_PREFIX) and difflib.get_close_matches(name, known, 1, 0.85)
        ):
            from celery_idempotent.unknown_option import unknown_option

            raise unknown_option(name, where, known, APP_OPTIONS)
