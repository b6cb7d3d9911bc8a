"""The memory and the start of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from labs.benchmarks.bench import private_server
from labs.benchmarks.environments import CONTROL
from labs.benchmarks.figure import Figure, Goal, MeasureResult, Spread
from labs.benchmarks.interleaving import Rounds, round_order
from labs.benchmarks.measure import Measure, ProgressCallback
from labs.benchmarks.process_worker import (
    CONTESTANT_VARIABLE,
    OURS,
    PLAIN,
    URL_VARIABLE,
    make_app,
)
from labs.benchmarks.usage import processes_of_group
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON, eventually

REPOSITORY = Path(__file__).parents[3]

#: What a process imports to publish tasks and to read their results through Redis.
_IMPORT_CELERY = (
    "import celery.app.amqp, celery.app.log, celery.app.task, celery.canvas, celery.result, "
    "celery.backends.redis, kombu.transport.redis"
)
_PROGRAMS = {
    PLAIN: _IMPORT_CELERY,
    CONTROL: _IMPORT_CELERY,
    OURS: f"{_IMPORT_CELERY}, celery_idempotent",
}
_CONTESTANTS = {PLAIN: PLAIN, CONTROL: PLAIN, OURS: OURS}


class Processes(Measure):
    """The processor time to import the library, and the resident memory of a worker's processes.

    Imports are compared with those of a program that publishes tasks and reads results through
    Redis. A worker of each kind has run some tasks when its memory is read; plain Celery's does
    not load the commands that celery-idempotent adds to ``celery``.
    """

    name = "process"
    title = "memory and start of a process"

    IMPORTS, WORKERS, TASKS = 15, 3, 200

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        imports: Rounds = {name: [] for name in _PROGRAMS}
        for number in range(-1, self.IMPORTS):  # round -1 compiles
            for name in round_order(_PROGRAMS, max(number, 0)):
                seconds = _processor_seconds(_PROGRAMS[name])
                if number >= 0:
                    imports[name].append(1000 * seconds)
            progress(0.5 * (number + 1) / self.IMPORTS)
        main: Rounds = {name: [] for name in _CONTESTANTS}
        pool: Rounds = {name: [] for name in _CONTESTANTS}
        with private_server(databases="3") as server:
            for number in range(self.WORKERS):
                for name, megabytes in _memory_of_workers(server, self.TASKS).items():
                    main[name].append(megabytes[0])
                    pool[name].append(megabytes[1])
                progress(0.5 + 0.5 * (number + 1) / self.WORKERS)
        return MeasureResult(
            [
                _ratio("import", imports, OURS, Goal(1.15)),
                _ratio("import", imports, CONTROL),
                *_more("process of the pool", pool, Goal(6)),
                *_more("main process", main, Goal(6)),
                *(
                    Figure.from_spread(f"import, {name}", Spread.from_values(each), "ms")
                    for name, each in imports.items()
                    if name != CONTROL
                ),
                *(
                    Figure.from_spread(f"{process}, {name}", Spread.from_values(each), "MB")
                    for process, values in (("process of the pool", pool), ("main process", main))
                    for name, each in values.items()
                    if name != CONTROL
                ),
            ],
            raw={"import, ms": imports, "pool, MB": pool, "main process, MB": main},
        )


def _processor_seconds(program: str) -> float:
    process = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, env=_environ())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def _environ() -> dict[str, str]:
    """Returns variables with which the imported modules stay compiled."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _memory_of_workers(server: RedisServer, tasks: int) -> dict[str, tuple[float, float]]:
    """Returns the resident megabytes of a main process and of a process of its pool, by name."""
    memory = {}
    with server.client() as client:
        client.flushall()
    url = server.url.rpartition("/")[0]
    with ExitStack() as stack:
        workers = {}
        for number, (name, contestant) in enumerate(_CONTESTANTS.items()):
            variables = {CONTESTANT_VARIABLE: contestant, URL_VARIABLE: f"{url}/{number}"}
            worker = subprocess.Popen(
                [
                    *(sys.executable, "-m", "labs.benchmarks.process_worker"),
                    *("--concurrency", "1", "--loglevel", "WARNING"),
                    *("--without-gossip", "--without-mingle", "--without-heartbeat"),
                ],
                cwd=REPOSITORY,
                env={**_environ(), **variables},
                start_new_session=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(worker.wait, SOON)
            stack.callback(os.killpg, worker.pid, 9)
            workers[name] = worker, make_app(contestant, f"{url}/{number}")
        for name, (worker, app) in workers.items():
            stack.callback(app.close)
            results = [app.tasks["shop.no_op"].delay(f"order {n}") for n in range(tasks)]
            for result in results:
                result.get(timeout=SOON)
            processes = eventually(
                lambda worker=worker: _two(worker.pid), "the worker has a main process and a child"
            )
            memory[name] = (processes[0] / 1e6, processes[1] / 1e6)
    return memory


def _two(group: int) -> list[int]:
    memory = [each.memory for each in processes_of_group(group)]
    return memory if len(memory) == 2 else []


def _ratio(label: str, rounds: Rounds, name: str, goal: Goal | None = None) -> Figure:
    spread = Spread.from_ratios(rounds[name], rounds[PLAIN])
    return Figure.from_spread(f"{label}, {name} / {PLAIN}", spread, "×", goal)


def _more(label: str, rounds: Rounds, goal: Goal) -> list[Figure]:
    return [
        Figure.from_spread(
            f"{label}, {name} − {PLAIN}",
            Spread.from_values(
                [more - less for more, less in zip(rounds[name], rounds[PLAIN], strict=True)]
            ),
            "MB",
            goal if name == OURS else None,
        )
        for name in (OURS, CONTROL)
    ]
