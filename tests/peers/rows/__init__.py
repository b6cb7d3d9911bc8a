"""The rows, in the table's order."""

from __future__ import annotations

from tests.peers.row import Row
from tests.peers.rows.canvas import ChordWithDuplicate, SecondChain
from tests.peers.rows.crashes import (
    ChildKilled,
    ConnectionDropped,
    Retried,
    Stopped,
    WithoutRequeue,
)
from tests.peers.rows.duplicates import AfterCompletion, Burst, OtherSpelling, WhatDuplicatesGet
from tests.peers.rows.durations import LongerThanTheLock, LongerThanTheVisibilityTimeout
from tests.peers.rows.speed import EndToEnd, Publishing

ROWS: tuple[Row, ...] = (
    Burst(),
    OtherSpelling(),
    WhatDuplicatesGet(),
    AfterCompletion(),
    ChildKilled(),
    WithoutRequeue(),
    LongerThanTheLock(),
    LongerThanTheVisibilityTimeout(),
    ConnectionDropped(),
    Retried(),
    Stopped(),
    ChordWithDuplicate(),
    SecondChain(),
    Publishing(),
    EndToEnd(),
)


def row_named(name: str) -> Row:
    """The one of that name."""
    return next(row for row in ROWS if row.name == name)
