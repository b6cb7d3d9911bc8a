"""Commands that name what they were shown."""

from __future__ import annotations

from celery_idempotent.core.key import Key
from celery_idempotent.core.record import Record, State
from celery_idempotent.core.store import commands

KEY = Key("shop.charge", "PN0MlSPt3FmEwTzQ5dHvBQ", b"8 bytes!")


def test_a_shown_record_is_named_by_its_state_and_token() -> None:
    record = Record(State.STARTED, str(KEY), KEY.task, "t", "w", token=17, attempt=1)

    assert commands.forget(KEY, record).arguments[1:3] == [17, "BAba"]
