"""All measures, in the order of the table: exact counts first."""

from __future__ import annotations

from labs.benchmarks.measure import Measure
from labs.benchmarks.measures.burst import Burst
from labs.benchmarks.measures.client import SingleClient
from labs.benchmarks.measures.commands import Commands
from labs.benchmarks.measures.derivation import KeyDerivation
from labs.benchmarks.measures.draining import QueueDrain
from labs.benchmarks.measures.end_to_end import EndToEnd
from labs.benchmarks.measures.growth import Growth
from labs.benchmarks.measures.heartbeat import ManyLeases
from labs.benchmarks.measures.memory import Memory
from labs.benchmarks.measures.outage import OpenBreaker
from labs.benchmarks.measures.processes import Processes
from labs.benchmarks.measures.publishing import Publishing
from labs.benchmarks.measures.round_trips import RoundTrips
from labs.benchmarks.measures.server_time import ServerTime
from labs.benchmarks.measures.sizing import Sizing
from labs.benchmarks.measures.slots import Slots
from labs.benchmarks.measures.soak import Soak
from labs.benchmarks.measures.throughput import Throughput
from labs.benchmarks.measures.tracing import TracedCall
from labs.benchmarks.measures.transactions import Transactions
from labs.benchmarks.measures.waiting import Waiting
from labs.benchmarks.measures.waking import Waking

MEASURES: tuple[Measure, ...] = (
    RoundTrips(),
    Commands(),
    Memory(),
    QueueDrain(),
    EndToEnd(),
    TracedCall(),
    Publishing(),
    Processes(),
    Transactions(),
    ServerTime(),
    SingleClient(),
    KeyDerivation(),
    ManyLeases(),
    Waiting(),
    Burst(),
    OpenBreaker(),
    Sizing(),
    Slots(),
    Growth(),
    Throughput(),
    Soak(),
    Waking(),
)


def find_measure(name: str) -> Measure:
    """Returns the measure of that name."""
    return next(measure for measure in MEASURES if measure.name == name)
