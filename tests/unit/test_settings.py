"""The options: defaults, valid values, and the errors of invalid ones."""

from __future__ import annotations

from dataclasses import asdict, fields
from datetime import timedelta
from typing import Any

import pytest

from celery_idempotent import TASK_ID
from celery_idempotent.errors import SettingsError
from celery_idempotent.settings import OPTIONS, Settings, TaskOptions, build, check_names, in_scope
from celery_idempotent.unknown_option import _MEANT

YEAR = 366 * 86400

#: Option, valid values, invalid values; the snapshot of the public interface has the defaults.
TABLE: list[tuple[str, list[Any], list[Any]]] = [
    ("enabled", [True, False], [None, 1, 0, "yes"]),
    ("shadow", [True, False], [None, 1, "yes"]),
    ("key", [None, "order:{order_id}", ("order_id",), len, TASK_ID], []),
    ("until", ["expired", "finished", "started"], ["end", "", None, True]),
    ("lease", [0.5, 1, 60, YEAR], [0.49, 0, -1, YEAR + 1, "60", None, True, float("nan")]),
    ("result_ttl", [1, 3600.5, YEAR], [0.9, -1, float("inf"), "1", None, False]),
    ("error_ttl", [1, 3600.5, YEAR], [0.9, -1, float("inf"), "1", None, False]),
    (
        "replay_errors",
        [(), (ValueError,), [KeyError, OSError]],
        [ValueError, (ValueError, "KeyError"), "ValueError", (1,), None, (int,), (SystemExit,)],
    ),
    ("on_conflict", ["retry", "wait", "raise", "ignore", "reject", "replace"], ["Retry", ""]),
    ("wait_timeout", [0, 0.1, 10, YEAR], [-0.1, "10", None, True]),
    ("max_attempts", [1, 254], [0, 255, 1.0, "5", None, True, 10**100, float("inf"), "x\ny"]),
    ("on_store_error", ["retry", "run", "raise"], ["wait", None, True, ["run"]]),
    ("dedupe_publish", [True, False, "raise"], [1, "no"]),
    ("reservation_ttl", [1, 60, YEAR], [0.9, -1, YEAR + 1, "60", None, True]),
    ("debounce", [None, 0.01, 60, YEAR], [0, -1, YEAR + 1, "60", True]),
    ("debounce_max_wait", [None, 0.01, 60, YEAR], [0, -1, YEAR + 1, "60", True]),
    ("store_result", [True, False], [None, 1, "no"]),
    ("fused_completion", [True, False], [None, 1, "no"]),
    ("serializer", [None, "json", "pickle"], ["", 5, b"json"]),
    ("compression", [None, "gzip"], ["", 5, True]),
    (
        "encryption_keys",
        [None, (b"a key",), ["a key", "another"], "shop.secrets.keys", "shop.secrets:keys", len],
        ["", (), [], "no-path", "a key without a dot=", (1,), ("",), 5, True, {"key": 1}],
    ),
    ("max_result_size", [0, 1, 2**29], [-1, 2**29 + 1, 1.5, "1M", None, True]),
    ("offload_backend", [None, "file:///tmp/results"], ["", 5]),
    (
        "transaction",
        [None, False, "default", "shop.db:engine"],
        ["", "no path", "mysql://s", 0, len],
    ),
    ("redis_url", [None, "redis://localhost"], ["", 5, b"redis://"]),
    ("key_prefix", ["i", "shop:idem"], ["", "a b", "a\n", "{shop}", "a{b", None, 5]),
    ("redis_options", [{}, {"master_name": "shop"}], ["master_name", 5, []]),
    ("redis_client", ["shop.redis:client", dict], [5, None, "redis://localhost"]),
    ("redis_timeout", [0.01, 5, YEAR], [0, -1, "5", None, True]),
    ("wait_replicas", [0, 1, 100], [-1, 101, 1.0, "1", None, True]),
    ("label", [None, "order {order_id}"], ["", 5, b"order", True]),
]

VALID = [(f"idempotency_{name}", value) for name, valid, _ in TABLE for value in valid]
INVALID = [(f"idempotency_{name}", value) for name, _, invalid in TABLE for value in invalid]


def test_the_table_has_every_option() -> None:
    assert {name for name, *_ in TABLE} == set(asdict(Settings()))


def test_every_option_of_a_task_is_an_attribute_that_type_checkers_know() -> None:
    names = {f"idempotency_{name}" for name in in_scope("function")}

    assert set(OPTIONS) - names == set(TaskOptions.__annotations__)


SECRETS = [
    ("redis_url", "redis://:secret@localhost"),
    ("redis_options", {"password": "secret"}),
    ("redis_client", type("Client", (), {"__repr__": lambda self: "secret", "evalsha": 1})()),
    ("offload_backend", "s3://id:secret@bucket"),
    ("encryption_keys", ("secret",)),
]


@pytest.mark.parametrize(("name", "value"), SECRETS)
def test_the_repr_of_settings_shows_no_secret(name: str, value: Any) -> None:
    settings = build({f"idempotency_{name}": value}, "shop.charge")

    assert "secret" not in repr(settings)


def test_an_option_that_may_be_any_text_is_secret_or_named_here() -> None:
    """Others are part of errors, and of the line that a worker logs at its start."""
    shown = set()
    for option in fields(Settings):
        is_valid, _ = option.metadata["validator"]
        if option.repr and is_valid("redis://:secret@localhost"):
            shown.add(option.name)

    assert shown == {"key", "key_prefix", "serializer", "compression", "label"}


@pytest.mark.parametrize("name", ["redis_options", "redis_client", "encryption_keys"])
def test_errors_of_secret_options_never_quote_the_value(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        build({f"idempotency_{name}": "secret"}, "shop.charge")

    assert str(caught.value).endswith(", not str")


@pytest.mark.parametrize(("option", "value"), VALID, ids=lambda part: repr(part)[:40])
def test_a_valid_value_is_used_unchanged(option: str, value: Any) -> None:
    settings = build({option: value}, "shop.charge")

    used = getattr(settings, option.removeprefix("idempotency_"))
    assert used == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(("option", "value"), INVALID, ids=lambda part: repr(part)[:40])
def test_the_error_of_a_value_is_one_line_that_names_the_option(option: str, value: Any) -> None:
    with pytest.raises(SettingsError) as caught:
        build({option: value}, "shop.charge")

    sentence = str(caught.value)
    assert sentence.startswith(f"shop.charge: {option} must be ")
    assert "\n" not in sentence
    assert len(sentence) < 300
    assert "not " in sentence


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ((ValueError, KeyboardInterrupt), "one with KeyboardInterrupt"),
        ((ValueError, "KeyError"), "one with 'KeyError'"),
        (ValueError, "ValueError; write (ValueError,)"),
        (SystemExit, "SystemExit"),
    ],
)
def test_the_error_of_replay_errors_names_the_class(value: Any, shown: str) -> None:
    with pytest.raises(SettingsError) as caught:
        build({"idempotency_replay_errors": value}, "shop.charge")

    expected = "a tuple of subclasses of Exception"
    prefix = f"shop.charge: idempotency_replay_errors must be {expected}, not "
    assert str(caught.value) == prefix + shown


def test_publishes_of_a_burst_are_deduplicated_by_default() -> None:
    assert build({"idempotency_until": "started"}, "t").deduplicates
    assert not build({"idempotency_until": "finished"}, "t").deduplicates
    switched_off = {"idempotency_until": "started", "idempotency_dedupe_publish": False}
    assert not build(switched_off, "t").deduplicates


@pytest.mark.parametrize(
    "value",
    [
        "redis://:secret@localhost",
        "secret" * 20,
        ["secret"],
        {"url": "secret"},
        b"secret",
        type("Secret", (), {"__repr__": lambda self: "secret"})(),
    ],
    ids=["url", "long", "list", "dict", "bytes", "object"],
)
def test_values_that_may_hold_a_secret_are_not_quoted(value: Any) -> None:
    for option in ("idempotency_lease", "idempotency_key_prefix", "idempotency_enabled"):
        if option == "idempotency_key_prefix" and isinstance(value, str):
            continue
        with pytest.raises(SettingsError) as caught:
            build({option: value}, "shop.charge")
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("idempotency_leese", "idempotency_lease"),
        ("idempotency_on_confict", "idempotency_on_conflict"),
        ("idempotency_errorttl", "idempotency_error_ttl"),
        ("idempotency_redis_uri", "idempotency_redis_url"),
        ("idempotancy_lease", "idempotency_lease"),
        ("idempotent_key", "idempotency_key"),
        ("idempotency_ttl", "idempotency_result_ttl"),
        ("idempotency_lock_timeout", "idempotency_lease"),
        ("idempotency_deduplicate", "idempotency_dedupe_publish"),
        ("idempotency_id", "idempotency_key"),
        ("idempotency_like_no_other", ""),
    ],
)
def test_the_error_of_an_unknown_option_suggests_the_one_meant(name: str, suggestion: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_names(["task_always_eager", name], "the Celery configuration")

    meant = suggestion and f"; did you mean {suggestion}?"
    assert str(caught.value) == f"the Celery configuration: there is no option {name}{meant}"


def test_the_error_of_a_task_with_an_option_of_the_app_says_so() -> None:
    with pytest.raises(SettingsError) as caught:
        check_names(["idempotency_redeliver_after"], "shop.charge")

    assert str(caught.value) == (
        "shop.charge: idempotency_redeliver_after is an option of the app, not of a task; set it "
        "in the app's configuration"
    )


def test_every_meaning_is_an_option() -> None:
    names = {name.removeprefix("idempotency_") for name in OPTIONS}

    assert set(_MEANT.values()) <= names
    assert not names & set(_MEANT)


def test_other_names_are_ignored() -> None:
    check_names([*OPTIONS, "idem", "idempotent", "idempotency", "lease"], "shop.charge")


def test_times_are_also_in_milliseconds() -> None:
    times = {"lease": 0.5, "result_ttl": 1.2345, "error_ttl": 2}
    settings = build({f"idempotency_{name}": times[name] for name in times}, "shop.charge")

    assert (settings.lease_ms, settings.result_ms, settings.error_ms) == (500, 1234, 2000)


def test_times_may_be_timedeltas() -> None:
    durations = [name for name, value in asdict(Settings()).items() if isinstance(value, float)]
    minute = {f"idempotency_{name}": timedelta(minutes=1) for name in durations}

    assert [getattr(build(minute, "shop.charge"), name) for name in durations] == [60.0] * 6
    for option, value in [("lease", timedelta(0)), ("max_attempts", timedelta(seconds=5))]:
        with pytest.raises(SettingsError, match=f"^shop.charge: idempotency_{option} must be"):
            build({f"idempotency_{option}": value}, "shop.charge")
