"""Where the time inside the pool goes."""

from __future__ import annotations

from collections import Counter

from labs.benchmarks.call_path import CallPath
from labs.benchmarks.environments import CELERY_AND_OURS, CONTROL
from labs.benchmarks.figure import Figure, MeasureResult
from labs.benchmarks.measure import Measure, ProgressCallback
from labs.benchmarks.sampler import sample_functions
from labs.benchmarks.traced_calls import TracedCalls, start_traced_calls
from labs.comparison.contestants import OURS, PLAIN

WITHOUT_CONTROL = {name: entry for name, entry in CELERY_AND_OURS.items() if name != CONTROL}


class Profile(Measure):
    """The functions with the largest own time in a no-op task of celery-idempotent, as sampled.

    The own time of a function includes the functions in C that it calls, such as waiting for
    Redis. The number of Python functions that a call enters is exact.
    """

    name = "profile"
    title = "functions of a no-op task inside the pool"

    TOP, ROUNDS, EACH = 10, 40, 50

    entries = WITHOUT_CONTROL

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        samples: Counter[str] = Counter()
        with start_traced_calls(self.entries, replay=OURS.name) as calls:
            entered = {name: _count(each) for name, each in calls.items()}
            ours = calls[OURS.name]
            for number in range(self.ROUNDS):
                ours.publish(self.EACH)
                with sample_functions() as sampled:
                    for _ in range(self.EACH):
                        ours.call()
                samples += sampled
                progress((number + 1) / self.ROUNDS)
        total = sum(samples.values())
        package = sum(
            number for name, number in samples.items() if name.startswith("celery_idempotent/")
        )
        return MeasureResult(
            [
                *(
                    Figure(f"functions entered, {name}", path.entered)
                    for name, path in entered.items()
                ),
                Figure("of these of celery_idempotent", len(entered[OURS.name].functions)),
                Figure("samples in celery_idempotent", 100 * package / total, "%"),
                *(
                    Figure(f"{rank}. `{name}`", 100 * number / total, "%")
                    for rank, (name, number) in enumerate(samples.most_common(self.TOP), start=1)
                ),
            ],
            raw={"samples": dict(samples.most_common(100)), "celery": PLAIN.version},
        )


def _count(calls: TracedCalls) -> CallPath:
    calls.publish(3)
    calls.call()  # connects, or stores what is replayed
    calls.call()
    with CallPath() as path:
        calls.call()
    return path
