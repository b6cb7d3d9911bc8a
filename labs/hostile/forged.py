"""Forges what Redis and the broker hold, against the worker, the dashboard and the command line.

The forger can write to Redis, and so can replace records and kept messages by anything. A rerun
must still publish nothing but the call itself, nothing may execute code or end in an error other
than those of this library, and no input may cost much memory or time.
"""

from __future__ import annotations

import bz2
import json
import lzma
import pickle
import random
import resource
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
from click.testing import CliRunner
from redis import Redis

from celery_idempotent.core.key.key import Key
from celery_idempotent.dashboard import asgi
from celery_idempotent.dashboard.protection import local_user
from celery_idempotent.operations.cli import idempotency
from labs.hostile.damage import EXPECTED
from labs.hostile.messages import FAILS, NAME, Worker, worker
from tests.dashboard.conftest import serving

#: Maximum seconds of processor time of one request, command or delivery, and megabytes of growth.
MAX_SECONDS, MAX_MEGABYTES = 10.0, 500
#: Repetitions of three bytes that compression makes a thousand times shorter.
BOMB = 20_000_000
TASK_ID = "5e1d0000-0000-4000-8000-000000000000"

#: How often code from Redis was executed.
executed: list[None] = []


def execute() -> None:
    """Is called by a pickle."""
    executed.append(None)


class _Executes:
    def __reduce__(self) -> Any:
        return execute, ()


class Verdict:
    def __init__(self) -> None:
        self.inputs = 0
        #: How commands, requests and deliveries ended.
        self.met: Counter[str] = Counter()
        self.seconds = 0.0
        self.megabytes = 0
        self.failures: list[str] = []


class Forger:
    """Draws hostile values, messages and payloads."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        texts = (b"[" * 10**6, b"9" * 10**6, b"\xff", b"", b"[" + b"[]," * 10**5 + b"[]]")
        self._payloads = [
            *(_bomb("gzip", zlib.compressobj(), part) for part in (b"xxx", b"[],")),
            _bomb("bzip2", bz2.BZ2Compressor(), b"[],"),
            _bomb("lzma", lzma.LZMACompressor(), b"xxx"),
            b"json+lzma\n" + lzma.compress(b'"x"', preset=9 | lzma.PRESET_EXTREME),
            *(b"json\n" + text for text in texts),
            *(form + b"\n" + pickle.dumps(_Executes()) for form in _PICKLES),
            b"yaml\n!!python/object/apply:labs.hostile.forged.execute []",
            b"yaml\na: &a [x]\nb: &b [*a,*a]",
            b"@json\n../../etc/passwd",
            b"!json\n" + bytes(100),
            b"=task\n" + bytes(9),
            b"=ignored\n",
            b"+\n",
            b"\n",
            b"",
            b"x" * 10**7,
        ]

    def value(self) -> Any:
        """Returns a hostile value of JSON."""
        deep: list[Any] = []
        for _ in range(400):
            deep = [deep]
        return self._random.choice(
            (
                *(None, True, -1, 0, 1.5, 2**70, float("inf"), float("nan"), "", "x", "\ud800"),
                *("x" * 10_000, "\x1b[31m\r\n\0", "<script>", "celery", "root", NAME, TASK_ID),
                *([], {}, [5], {"task": "evil"}, [{"task": NAME, "options": 5}], {"\n": {}}, deep),
                *({"__type__": each, "__value__": "1e999999"} for each in ("decimal", "uuid", "x")),
                {"idempotency": "x", "idempotency_key": ["a", 5], "idempotency_result_ttl": -1},
                {"headers": {"task": "evil"}, "queue": "root", "link": [{"task": "evil"}]},
            )
        )

    def changed(self, document: Any) -> Any:
        """Returns a copy of `document` with one to three parts replaced, added or removed."""
        document = deepcopy(document)
        for _ in range(self._random.randrange(1, 4)):
            parts = [each for each in _containers(document) if each]
            if not parts:
                return document
            part = self._random.choice(parts)
            name = self._random.choice([*part] if isinstance(part, dict) else range(len(part)))
            kind = self._random.random()
            if kind < 0.2:
                del part[name]
            elif kind < 0.4 and isinstance(part, dict):
                part[self._random.choice(_NAMES)] = self.value()
            else:
                part[name] = self.value()
        return document

    def message(self, document: Any) -> bytes:
        """Returns a forged kept message."""
        if self._random.random() < 0.2:
            return self._random.choice(self._payloads)
        return b"json\n" + json.dumps(self.changed(document)).encode()

    def record(self, raw: bytes, form: bytes) -> bytes:
        """Returns a forged record, whose payload has the format `form` in `raw`."""
        start = raw.rindex(bytes([len(form)]) + form)
        other, _, body = self._random.choice(self._payloads).partition(b"\n")
        if self._random.random() < 0.3:
            position = self._random.randrange(start)
            return raw[:position] + self._random.randbytes(3) + raw[position + 3 :]
        return raw[:start] + bytes([len(other[:255])]) + other[:255] + body


def _bomb(name: str, compressor: Any, part: bytes) -> bytes:
    """Returns a payload of many megabytes of `part`, a little at a time."""
    chunks = [compressor.compress(b"[" if part == b"[]," else b'"')]
    chunks += [compressor.compress(part * 10**6) for _ in range(BOMB // 10**6)]
    return b"".join([f"json+{name}\n".encode(), *chunks, compressor.flush()])


_PICKLES = (b"pickle", b"json", b"!pickle", b"@pickle", b"application/x-python-serialize")
#: Options of messages, and names that are not.
_NAMES = (
    *("link", "chain", "link_error", "headers", "queue", "exchange", "routing_key", "task_id"),
    *("priority", "stamps", "stamped_headers", "chord", "expires", "producer", "serializer"),
    *("task", "id", "group_id", "args", "kwargs", "options", "subtask_type", "retry_policy"),
)


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, dict)):
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from _containers(each)


class Stage:
    """A call that has failed and one that has completed, and all that shows or reruns them."""

    def __init__(self, url: str, seed: int, stack: ExitStack) -> None:
        broker = url.rpartition("/")[0] + "/1"
        self.receiver: Worker = worker(url, broker=broker, result_extended=True)
        self.receiver.app.conf.accept_content = ["json", "pickle"]
        self.client, self.queues = Redis.from_url(url), Redis.from_url(broker)
        self.forger, self.verdict = Forger(seed), Verdict()
        self.failed: Key = self._end(FAILS)
        self.completed: Key = self._end("order")
        dashboard = serving(asgi(self.receiver.app, authorize=local_user))
        address = stack.enter_context(dashboard)
        self.web = stack.enter_context(httpx.Client(base_url=address, timeout=60))
        self._show(self.failed)  # imports, connections, caches
        self._megabytes = _megabytes()

    def _end(self, first: str) -> Key:
        self.receiver.receive([first, 1], {}, task_id=TASK_ID)
        key: Key = self.receiver.task.idempotency_key_of(first, 1)
        return key

    def run(self, inputs: int) -> Verdict:
        """Forges kept messages, records and headers, in turn."""
        (name,) = self.client.keys("idem:{*}:message:*")
        kept = self.client.get(name)
        document = json.loads(kept.partition(b"\n")[2])
        records = {key: self.client.get(f"idem:{key}") for key in (self.failed, self.completed)}
        headers = document["options"]["headers"]
        self.client.setrange(name, 200_000_000, b"x")
        self._check(partial(self._show, self.failed), "a kept message of 200 MB")
        self.client.delete(name)
        self.client.lpush(name, b"x")
        self._check(partial(self._show, self.failed), "a kept message that is a list")
        self.client.delete(name)
        for _ in range(inputs):
            self.verdict.inputs += 3
            message = self.forger.message(document)
            self.client.set(name, message)
            self._check(partial(self._show, self.failed), message)
            self.client.set(name, kept)
            for key, raw in records.items():
                forged = self.forger.record(raw, b"json")
                self.client.set(f"idem:{key}", forged)
                first = FAILS if key == self.failed else "order"
                self._check(partial(self._show, key), forged)
                self._check(partial(self._receive, [first, 1], {}), forged)
                self.client.set(f"idem:{key}", raw)
            carried = self.forger.changed(headers)
            self._check(partial(self._receive, ["order", 1], carried), carried)
        return self.verdict

    def _check(self, act: Callable[[], None], given: Any) -> None:
        verdict, shown = self.verdict, repr(given)[:200]
        try:
            act()
        except Exception as error:
            verdict.failures.append(f"{type(error).__name__}: {str(error)[:200]}: {shown}")
        megabytes = _megabytes() - self._megabytes
        if megabytes > MAX_MEGABYTES:
            verdict.failures.append(f"grows by {megabytes} MB: {shown}")
        verdict.megabytes = max(verdict.megabytes, megabytes)
        if executed:
            verdict.failures.append(f"executes code: {shown}")
        self._check_messages(shown)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Raises an error if the block takes too much processor time."""
        started_at = time.process_time()
        yield
        seconds = time.process_time() - started_at
        self.verdict.seconds = max(self.verdict.seconds, seconds)
        if seconds > MAX_SECONDS:
            raise TimeoutError(f"it takes {seconds:.1f} s")

    def _check_messages(self, shown: str) -> None:
        """Checks what was published: only the calls themselves, in their queue."""
        for queue in self.queues.scan_iter():
            if self.queues.type(queue) != b"list":
                continue
            for text in self.queues.lrange(queue, 0, -1):
                headers = json.loads(text)["headers"]
                if headers["task"] != NAME or not queue.startswith(b"celery"):
                    self.verdict.failures.append(f"publishes {headers['task']}, {queue!r}: {shown}")
                self.verdict.met["published"] += 1
        self.queues.flushdb()
        executed.clear()

    def _show(self, key: Key) -> None:
        """Sees a record on all pages and in all commands, and reruns it."""
        for path in (f"/records/{key}", "/records", "/", f"/search?q={TASK_ID}"):
            self._get(path)
            self._get(f"/api{path}")
        self._get(f"/forget?key={key}")
        self._get(f"/rerun?key={key}")
        shown = self._get(f"/api/records/{key}/rerun")
        if shown.status_code == 200:
            headers = {
                "if-match": shown.headers["etag"],
                "x-csrf-token": shown.headers["x-csrf-token"],
            }
            path = f"/api/records/{key}/rerun?repeat=true"
            self._count(self.web.post(path, headers=headers).status_code)
        self._command("show", key)
        self._command("show", key, "--json")
        self._command("list")
        self._command("stats", "--timeout", "0")
        self._command("rerun", key, "--yes", "--completed")

    def _get(self, path: str) -> Any:
        with self._timed():
            response = self.web.get(path)
        self._count(response.status_code)
        return response

    def _count(self, status: int) -> None:
        self.verdict.met[f"HTTP {status}"] += 1
        if status >= 500:
            raise RuntimeError(f"HTTP {status}")

    def _command(self, *arguments: str) -> None:
        obj = SimpleNamespace(app=self.receiver.app)
        with self._timed():
            result = CliRunner().invoke(idempotency, [*map(str, arguments)], obj=obj)
        self.verdict.met[f"exit code {result.exit_code}"] += 1
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception

    def _receive(self, args: list[Any], headers: dict[str, Any]) -> None:
        """Delivers a duplicate, or a message with these headers."""
        with self._timed():
            status, value = self.receiver.receive(args, {}, headers=headers)
        self.verdict.met[type(value).__name__ if isinstance(value, Exception) else status] += 1
        if isinstance(value, Exception) and not isinstance(value, EXPECTED):
            raise value


def _megabytes() -> int:
    """Returns the highest memory of this process so far."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit


def run(url: str, inputs: int, seed: int) -> Verdict:
    """Forges `inputs` kept messages, records and headers each."""
    with ExitStack() as stack:
        return Stage(url, seed, stack).run(inputs)
