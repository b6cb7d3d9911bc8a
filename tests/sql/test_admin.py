"""The admin of outcomes, by Django's test client, with each kind of database and a real Redis."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sql.conftest import kinds

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.parametrize("calls", kinds("sqlite"), indirect=True),
]

CALLS = "admin_calls"
FORGOTTEN, KEPT = [False, False], [True, True]


def test_an_outcome_is_shown_beside_its_record(calls: dict[str, Any]) -> None:
    pages = calls["pages"]
    assert pages["list"]
    assert pages["both"] == 2
    assert pages["result"]
    assert pages["error"]


def test_results_need_a_permission(calls: dict[str, Any]) -> None:
    assert not calls["pages"]["viewer_sees_result"]
    assert calls["pages"]["viewer_reads_why"]


def test_hostile_texts_are_escaped(calls: dict[str, Any]) -> None:
    assert calls["pages"]["unescaped"] == []
    assert calls["pages"]["label"]
    assert calls["pages"]["task_id"] == [True, True, True]


def test_nobody_adds_changes_or_deletes(calls: dict[str, Any]) -> None:
    read_only = calls["read_only"]
    assert [read_only[name] for name in ("add", "change", "delete")] == [403, 403, 403]
    assert read_only["actions"] == ["forget_selected", "rerun_selected"]
    assert read_only["exists"] == KEPT


def test_forget_needs_permissions_a_post_and_a_token(calls: dict[str, Any]) -> None:
    rights = calls["rights"]
    # To a user who may only view outcomes, Django shows the list, which has no actions.
    assert rights["ask"] == rights["forget"] == [200, 403, 403, 302]
    assert rights["get"] == 302
    assert rights["without_token"] == 403
    assert rights["nonsense"] == [400] * 5
    assert rights["exists"] == KEPT
    assert calls["pages"]["forget_buttons"] == [1, 0]


def test_forget_deletes_the_record_and_the_row(calls: dict[str, Any]) -> None:
    forgetting = calls["forgetting"]
    assert forgetting["messages"] == ["1 outcome forgotten"] * 2
    assert forgetting["exist"] == [FORGOTTEN, FORGOTTEN]
    assert forgetting["signals"]
    assert forgetting["audit"] == [True, True]
    assert forgetting["log_entries"] == 1


def test_run_again_publishes_the_message(calls: dict[str, Any]) -> None:
    again = calls["running_again"]
    assert again["messages"] == [
        "1 call published: it runs again",
        "Outcome of KEY: kept: confirm that its effect is to be repeated",
        "1 call published: it runs again",
    ]
    assert again["published"] == 2
    assert again["exist"] == [KEPT, KEPT]
    assert again["signals"]
    assert again["log_entries"] == 1
    assert again["viewer"] == []
    assert again["arguments"] == [True, False]


def test_what_has_changed_is_kept(calls: dict[str, Any]) -> None:
    changed = calls["changed"]
    again, appeared, absent = changed["messages"]
    assert again == appeared == "Outcome of KEY: kept: it has changed since it was shown"
    assert ": already absent" in absent
    assert changed["exist"] == [KEPT, KEPT, FORGOTTEN]
    assert calls["record_expires_meanwhile"] == ["1 outcome forgotten", FORGOTTEN]


def test_what_is_running_is_kept(calls: dict[str, Any]) -> None:
    message, exists = calls["running"]
    assert message.startswith("Outcome of KEY: kept: it is running")
    assert exists == KEPT


def test_selected_outcomes_are_forgotten(calls: dict[str, Any]) -> None:
    selected = calls["selected"]
    assert (selected["asked"], selected["viewer"]) == (2, 0)
    assert selected["message"] == "2 outcomes forgotten"
    assert selected["exist"] == [FORGOTTEN, FORGOTTEN, KEPT]


def test_the_row_of_one_message_is_forgotten(calls: dict[str, Any]) -> None:
    assert calls["messages_of_a_turn"] == {"message": "1 outcome forgotten", "left": ["second"]}


def test_without_redis_the_row_is_shown_and_kept(calls: dict[str, Any]) -> None:
    away = calls["redis_away"]
    assert away == {"page": [200, True], "message": "Redis is away", "row": True}


def test_search_and_filters(calls: dict[str, Any]) -> None:
    found = calls["searching"]
    assert [found[name] for name in ("key", "name", "task id")] == [[True, False]] * 3
    assert found["task"] == found["filter"] == [True, True]
    assert found["state"] == [False, True]
    for name in ("other task", "filter other", "nothing"):
        assert found[name] == [False, False], name


def test_a_list_neither_counts_the_table_nor_reads_bodies(calls: dict[str, Any]) -> None:
    statements = calls["statements"]
    assert statements["counts"] == statements["bodies"] == []
    assert (statements["counted"], statements["more"]) == (3, True)
    assert statements["statements"] == 2
