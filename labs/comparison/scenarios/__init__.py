"""All scenarios, in the order of the table."""

from __future__ import annotations

from labs.comparison.scenario import Scenario
from labs.comparison.scenarios.canvas import ChordWithDuplicate, SecondChain
from labs.comparison.scenarios.crashes import (
    ChildKilled,
    ConnectionDropped,
    Retried,
    Stopped,
    WithoutRequeue,
)
from labs.comparison.scenarios.duplicates import (
    AfterCompletion,
    Burst,
    OtherSpelling,
    WhatDuplicatesGet,
)
from labs.comparison.scenarios.durations import (
    LongerThanTheLock,
    LongerThanTheVisibilityTimeout,
)

SCENARIOS: tuple[Scenario, ...] = (
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
)


def find_scenario(name: str) -> Scenario:
    """Returns the scenario of that name."""
    return next(scenario for scenario in SCENARIOS if scenario.name == name)
