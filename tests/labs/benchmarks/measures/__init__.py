"""All measures, in the order of the table: exact counts first."""

from __future__ import annotations

from tests.labs.benchmarks.measure import Measure
from tests.labs.benchmarks.measures.burst import Burst
from tests.labs.benchmarks.measures.client import SingleClient
from tests.labs.benchmarks.measures.commands import Commands
from tests.labs.benchmarks.measures.derivation import KeyDerivation
from tests.labs.benchmarks.measures.draining import QueueDrain
from tests.labs.benchmarks.measures.end_to_end import EndToEnd
from tests.labs.benchmarks.measures.growth import Growth
from tests.labs.benchmarks.measures.heartbeat import ManyLeases
from tests.labs.benchmarks.measures.memory import Memory
from tests.labs.benchmarks.measures.outage import OpenBreaker
from tests.labs.benchmarks.measures.processes import Processes
from tests.labs.benchmarks.measures.profile import Profile
from tests.labs.benchmarks.measures.publishing import Publishing
from tests.labs.benchmarks.measures.round_trips import RoundTrips
from tests.labs.benchmarks.measures.server_time import ServerTime
from tests.labs.benchmarks.measures.sizing import Sizing
from tests.labs.benchmarks.measures.slots import Slots
from tests.labs.benchmarks.measures.soak import Soak
from tests.labs.benchmarks.measures.throughput import Throughput
from tests.labs.benchmarks.measures.tracing import TracedCall
from tests.labs.benchmarks.measures.transactions import Transactions
from tests.labs.benchmarks.measures.waiting import Waiting

MEASURES: tuple[Measure, ...] = (
    RoundTrips(),
    Commands(),
    Memory(),
    QueueDrain(),
    EndToEnd(),
    TracedCall(),
    Profile(),
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
)


def find_measure(name: str) -> Measure:
    """Returns the measure of that name."""
    return next(measure for measure in MEASURES if measure.name == name)
