"""Keys with ``idempotency_until="started"``: one message runs, and one waits for the next turn."""

from __future__ import annotations

import pytest

from celery_idempotent.record.record import State
from tests.store.record_harness import (
    FIRST,
    HOLD_MS,
    LEASE_MS,
    OTHER_ARGUMENTS,
    SECOND,
    SHORT_MS,
    RecordHarness,
)
from tests.store.turns import THIRD, Turn
from tests.waiting import eventually


@pytest.fixture
def collapsing(harness: RecordHarness) -> Turn:
    """Messages with ``idempotency_until="started"``."""
    return Turn(harness, waits=True)


class TestCollapsing:
    @pytest.mark.core
    def test_one_runs_one_waits_and_the_others_get_the_waiting_one(self, collapsing: Turn) -> None:
        collapsing.first.publish()
        assert collapsing.third.publish().stored.task_id == FIRST
        token = collapsing.first.started().token

        assert collapsing.second.publish().case == "reserved"
        reply = collapsing.third.publish()

        assert (reply.case, reply.stored.task_id) == ("held", SECOND)
        assert reply.stored.state is State.RESERVED
        collapsing.first.complete(token)
        assert (collapsing.state, collapsing.holder) == (State.RESERVED, SECOND)
        assert collapsing.third.begin().case == "busy"
        assert collapsing.second.begin().case == "begun"
        assert not collapsing.waits

    @pytest.mark.parametrize("end", ["complete", "fail", "release", "end_with_error"])
    def test_whatever_the_end_the_next_turn_is_reserved(self, collapsing: Turn, end: str) -> None:
        token = collapsing.first.started().token
        collapsing.second.publish()

        assert getattr(collapsing.first, end)(token).case == "ok"

        assert (collapsing.state, collapsing.holder) == (State.RESERVED, SECOND)
        assert HOLD_MS - 5000 < collapsing.harness.left_ms() <= HOLD_MS

    def test_the_reservation_is_kept_over_a_retry_a_crash_and_a_heartbeat(
        self, collapsing: Turn
    ) -> None:
        token = collapsing.first.started().token
        collapsing.second.publish()
        collapsing.first.extend(token)
        collapsing.first.save_step(token)
        collapsing.first.release(token, HOLD_MS, generation=1)
        assert collapsing.third.publish().stored.task_id == SECOND
        assert collapsing.second.begin().case == "later"
        collapsing.first.started(generation=1)
        collapsing.first.abandon()
        token = collapsing.first.started(generation=1).token

        assert collapsing.third.publish().stored.task_id == SECOND
        collapsing.first.complete(token)
        assert collapsing.holder == SECOND

    def test_a_waiting_message_that_meets_a_run_renews_its_reservation(
        self, collapsing: Turn
    ) -> None:
        token = collapsing.first.started().token
        collapsing.second.publish(hold_ms=LEASE_MS)

        assert collapsing.second.begin().case == "later"

        collapsing.first.complete(token)
        assert collapsing.harness.left_ms() > LEASE_MS

    def test_a_message_without_a_reservation_waits_if_no_other_does(self, collapsing: Turn) -> None:
        collapsing.first.started()

        assert collapsing.second.begin().case == "later"
        assert collapsing.third.begin().case == "busy"
        assert collapsing.third.publish().stored.task_id == SECOND

    def test_a_waiting_reservation_that_has_expired_is_free(self, collapsing: Turn) -> None:
        token = collapsing.first.started().token
        collapsing.second.publish(hold_ms=SHORT_MS)

        eventually(lambda: collapsing.third.publish().case == "reserved")

        collapsing.first.complete(token)
        assert collapsing.holder == THIRD

    def test_a_waiting_reservation_that_is_given_back_is_free(self, collapsing: Turn) -> None:
        collapsing.first.started()
        collapsing.second.publish()
        collapsing.second.give_back()

        assert not collapsing.waits
        assert collapsing.third.publish().case == "reserved"

    def test_a_retry_that_is_discarded_makes_room_for_the_waiting_one(
        self, collapsing: Turn
    ) -> None:
        token = collapsing.first.started().token
        collapsing.second.publish()
        collapsing.first.release(token, HOLD_MS, generation=1)

        collapsing.first.give_back()

        assert collapsing.holder == SECOND

    def test_after_a_crash_one_message_waits(self, collapsing: Turn) -> None:
        collapsing.first.expired()

        assert collapsing.second.publish().case == "reserved"
        assert collapsing.third.publish().stored.task_id == SECOND
        assert collapsing.second.begin().case == "begun"

    def test_other_arguments_than_the_waiting_ones_are_refused(self, collapsing: Turn) -> None:
        others = OTHER_ARGUMENTS.of_message(SECOND)
        collapsing.first.started()
        assert collapsing.second.publish(key=others).case == "reserved"

        assert collapsing.third.publish().case == "reused"

    def test_a_waiting_message_is_not_taken_for_an_error_or_a_step(self, collapsing: Turn) -> None:
        collapsing.first.started()
        collapsing.second.publish()

        assert collapsing.waits
        assert collapsing.steps() == []
