"""The measures, in the table's order: counts first."""

from __future__ import annotations

from tests.benchmarks.measure import Measure
from tests.benchmarks.measures.burst import Burst
from tests.benchmarks.measures.client import OneClient
from tests.benchmarks.measures.commands import Commands
from tests.benchmarks.measures.derivation import Derivation
from tests.benchmarks.measures.draining import Draining
from tests.benchmarks.measures.end_to_end import EndToEnd
from tests.benchmarks.measures.growth import Growth
from tests.benchmarks.measures.heartbeat import HeartbeatOfMany
from tests.benchmarks.measures.memory import Memory
from tests.benchmarks.measures.outage import Outage
from tests.benchmarks.measures.publishing import Publishing
from tests.benchmarks.measures.round_trips import RoundTrips
from tests.benchmarks.measures.server_time import ServerTime
from tests.benchmarks.measures.sizing import Sizing
from tests.benchmarks.measures.slots import Slots
from tests.benchmarks.measures.throughput import Throughput
from tests.benchmarks.measures.waiting import Waiting

MEASURES: tuple[Measure, ...] = (
    RoundTrips(),
    Commands(),
    Memory(),
    ServerTime(),
    OneClient(),
    Derivation(),
    Publishing(),
    EndToEnd(),
    HeartbeatOfMany(),
    Waiting(),
    Burst(),
    Outage(),
    Sizing(),
    Slots(),
    Growth(),
    Throughput(),
    Draining(),
)


def measure_named(name: str) -> Measure:
    """The one of that name."""
    return next(measure for measure in MEASURES if measure.name == name)
