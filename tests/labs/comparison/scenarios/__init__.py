"""The rows, in the table's order."""

from __future__ import annotations

from tests.labs.comparison.scenario import Row
from tests.labs.comparison.scenarios.canvas import ChordWithDuplicate, SecondChain
from tests.labs.comparison.scenarios.crashes import (
    ChildKilled,
    ConnectionDropped,
    Retried,
    Stopped,
    WithoutRequeue,
)
from tests.labs.comparison.scenarios.duplicates import (
    AfterCompletion,
    Burst,
    OtherSpelling,
    WhatDuplicatesGet,
)
from tests.labs.comparison.scenarios.durations import (
    LongerThanTheLock,
    LongerThanTheVisibilityTimeout,
)
from tests.labs.comparison.scenarios.speed import EndToEnd, Publishing

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
