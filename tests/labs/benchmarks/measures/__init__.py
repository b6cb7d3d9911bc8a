"""The measures, in the table's order: counts first."""

from __future__ import annotations

from tests.labs.benchmarks.measure import Measure
from tests.labs.benchmarks.measures.burst import Burst
from tests.labs.benchmarks.measures.client import OneClient
from tests.labs.benchmarks.measures.commands import Commands
from tests.labs.benchmarks.measures.derivation import Derivation
from tests.labs.benchmarks.measures.draining import Draining
from tests.labs.benchmarks.measures.end_to_end import EndToEnd
from tests.labs.benchmarks.measures.growth import Growth
from tests.labs.benchmarks.measures.heartbeat import HeartbeatOfMany
from tests.labs.benchmarks.measures.memory import Memory
from tests.labs.benchmarks.measures.outage import OutageLogger
from tests.labs.benchmarks.measures.publishing import Publishing
from tests.labs.benchmarks.measures.round_trips import RoundTrips
from tests.labs.benchmarks.measures.server_time import ServerTime
from tests.labs.benchmarks.measures.sizing import Sizing
from tests.labs.benchmarks.measures.slots import Slots
from tests.labs.benchmarks.measures.throughput import Throughput
from tests.labs.benchmarks.measures.waiting import Waiting

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
    OutageLogger(),
    Sizing(),
    Slots(),
    Growth(),
    Throughput(),
    Draining(),
)


def measure_named(name: str) -> Measure:
    """The one of that name."""
    return next(measure for measure in MEASURES if measure.name == name)
