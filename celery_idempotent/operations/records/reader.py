"""Reads all records and the properties of their server, for monitoring.

SCAN returns names in pages. One round trip reads the heads of a page's records, never a large
result, so the server is not blocked. A cluster's primaries are scanned one after the other. As SCAN
documents, a record that is written or deleted during the scan may be missed, and a record may be
returned twice.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from celery_idempotent.core.key import Key
from celery_idempotent.core.record import Record, State, layout, utc
from celery_idempotent.core.store import run_sync, scan
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.reference import MARK, Reference
from celery_idempotent.core.store.server_info import Primary, primaries, server_info, write_error
from celery_idempotent.core.store.transport.connection import (
    CONNECTION_ERRORS,
    aclose_client,
    connect,
    translated_errors,
)
from celery_idempotent.errors import (
    CorruptRecordError,
    ResultNotStoredError,
    StoreUnavailableError,
)

logger = logging.getLogger(__name__)

#: Names in one call of SCAN: a few tenths of a millisecond of server time.
PAGE = 500
#: The reply of PTTL for a name without a value.
NO_KEY = -2
#: Number of names to try until one is in a slot of a given node of a cluster.
NAMES_TO_TRY = 1000
#: Maximum bytes to read of a record that is shown to a person.
WHOLE = 2**24


@dataclass(frozen=True, slots=True)
class RecordView:
    """A record together with the server's time at which it was read."""

    key: Key
    #: The decoded record; None if it cannot be decoded.
    record: Record | None
    #: The server's time at which it was read.
    now: datetime
    store: RecordStore
    #: If the record was found by a duplicate's task id: the duplicate's reference.
    reference: Reference | None = None

    @property
    def state(self) -> str:
        """The state; ``CORRUPT`` if the record cannot be read."""
        return "CORRUPT" if self.record is None else self.record.state.value

    @property
    def version(self) -> tuple[str, int]:
        """State and token; while both are the same, the record has not changed."""
        return self.state, 0 if self.record is None else self.record.token

    @property
    def since(self) -> datetime:
        """When the record entered its state: when the outcome was stored, else the token's time."""
        finished_at = None if self.record is None else self.record.finished_at
        return finished_at or utc(self.version[1] / 1e6)

    @property
    def is_finished(self) -> bool:
        """Whether the record holds an outcome."""
        return self.record is not None and self.record.state.finished

    @property
    def is_past_deadline(self) -> bool:
        """Whether its lease or reservation has expired."""
        deadline = None if self.record is None else self.record.deadline
        return deadline is not None and deadline <= self.now

    @property
    def is_expired(self) -> bool:
        """Whether its lease has expired and no execution has taken over yet."""
        return self.state == State.STARTED and self.is_past_deadline


@dataclass(frozen=True, slots=True)
class RecordReader:
    """Reads the records of one store. A `with` block closes its connections.

    Every method raises StoreUnavailableError if Redis does not reply.
    """

    #: A client of redis-py that only this reader uses.
    client: Any
    store: RecordStore
    #: Whether outcomes are shown to people: then decoding executes no code, and reads only so much.
    for_people: bool = True

    @classmethod
    def open(
        cls, store: RecordStore, timeout: float = 5.0, *, for_people: bool = True
    ) -> RecordReader:
        """Returns a reader of the records of `store`, with its own client; for blocking code.

        Args:
            timeout: seconds that one of its commands may take.
            for_people: the attribute of that name.

        Raises:
            StoreUnavailableError: if a cluster's nodes do not reply.
        """
        with translated_errors():
            return cls(connect(store.config, timeout=timeout, retries=0), store, for_people)

    def __enter__(self) -> RecordReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections, unless the client is the user's."""
        if not self.store.config.borrows_client:
            run_sync(aclose_client(self.client))

    def scan(self, task: str | None = None, *, expiry: bool = True) -> Iterator[list[RecordView]]:
        """Yields the records of all tasks or of one, in pages of about `PAGE` names.

        A page may be empty, because SCAN also returns names that are not records.
        """
        prefix = self.store.config.prefix
        match = scan.pattern(prefix, task)
        with _outages() as outages:
            for node in primaries(self.client):
                with outages.of(node):
                    cursor = None
                    while cursor != 0:
                        cursor, names = node.client.scan(cursor or 0, match=match, count=PAGE)
                        yield self._scanned(node.client, map(_text, names), task, expiry=expiry)

    def get(self, keys: Iterable[Key], *, whole: bool = False) -> dict[Key, RecordView]:
        """Returns the records of `keys` that exist, in two round trips to each node.

        Args:
            whole: also read the finished steps of long records, which a scan leaves out.
        """
        size, config = WHOLE if whole else layout.HEAD_BYTES, self.store.config
        views: dict[Key, RecordView] = {}
        with _outages() as outages:
            for node, its_keys in self._by_node(keys):
                with outages.of(node):
                    names = [(config.name(key), key) for key in its_keys]
                    found = {each.key: each for each in self._views(node.client, names, size=size)}
                    slots = [
                        (config.slot_name(key), key)
                        for key in its_keys
                        if not key.message and (key not in found or found[key].is_finished)
                    ]
                    waiting = self._views(node.client, slots, are_slots=True)
                    views |= found | {each.key: each for each in waiting}
        return views

    def _scanned(
        self, node: Any, names: Iterable[str], task: str | None, *, expiry: bool
    ) -> list[RecordView]:
        """Returns the records among `names`, and the slots of keys that have no record."""
        config = self.store.config
        keys, slots = [], []
        for name in names:
            if (key := scan.key_of_name(name, config.prefix)) is not None:
                keys.append((name, key))
            elif (key := scan.key_of_slot(name, config.prefix)) is not None:
                slots.append((name, key))
        if task is not None:
            keys, slots = (
                [pair for pair in each if pair[1].task == task] for each in (keys, slots)
            )
        if slots:
            pipeline = node.pipeline(transaction=False)
            for _, key in slots:
                pipeline.exists(config.name(key))
            has_record = pipeline.execute()
            slots = [each for each, exists in zip(slots, has_record, strict=True) if not exists]
        return [
            *self._views(node, keys, expiry=expiry),
            *self._views(node, slots, expiry=expiry, are_slots=True),
        ]

    def _views(
        self,
        node: Any,
        keys: Sequence[tuple[Any, Key]],
        *,
        expiry: bool = True,
        size: int = layout.HEAD_BYTES,
        are_slots: bool = False,
    ) -> list[RecordView]:
        """Returns the records under these names; names without a record are left out.

        Args:
            expiry: also read the expiry, which is half of the work.
            size: bytes to read of each record.

        Raises:
            RedisError: if the server replies with an error that is not about one record.
        """
        if not keys:
            return []
        pipeline = node.pipeline(transaction=False)
        pipeline.time()
        for name, _ in keys:
            pipeline.getrange(name, 0, size - 1)
            if expiry:
                pipeline.pttl(name)
        time, *replies = pipeline.execute(raise_on_error=False)
        for reply in (time, *replies):
            if isinstance(reply, Exception) and "WRONGTYPE" not in str(reply):
                raise reply
        seconds, microseconds = time
        clock = seconds + microseconds / 1e6
        raws, ttls = (replies[::2], replies[1::2]) if expiry else (replies, [NO_KEY] * len(keys))
        views, holders = [], []
        for (_, key), raw, ttl_ms in zip(keys, raws, ttls, strict=True):
            # Another program's value: one that is not a string (the reply is an error), or an empty
            # string. GETRANGE also returns "" for a name without a value, which is left out.
            is_empty = raw == b"" and ttl_ms != NO_KEY
            head = b"?" if is_empty or isinstance(raw, Exception) else raw
            if (holder := layout.turn_holder(head)) is not None:
                holders.append((holder, key))
            elif head:
                expires_at = utc(clock + ttl_ms / 1e3) if ttl_ms >= 0 else None
                is_whole = len(head) < size
                decode = self._decode if is_whole else partial(self._decode_whole, key)
                record = None
                with suppress(CorruptRecordError):
                    record = (
                        layout.read_slot(head, str(key), key.task, expires_at)
                        if are_slots
                        else layout.read(head, str(key), key.task, decode, expires_at)
                    )
                views.append(RecordView(key, record, utc(clock), self.store))
        return views + self._views(node, holders, expiry=expiry, size=size)

    def _decode_whole(self, key: Key, record: Record) -> Any:
        """Returns the result of a record of which only the head was read.

        It may be called after this reader was closed.
        """
        whole: Record | None
        if self.for_people:
            raw = self.store.query("GETRANGE", self.store.name(key), 0, WHOLE - 1)
            if len(raw) == WHOLE:
                raise ResultNotStoredError(f"the value of {record.key} is too large to be shown")
            whole = self.store.record(key, raw) if raw else None
        else:
            whole = run_sync(self.store.get(key))
        if whole is None or (whole.token, whole.state) != (record.token, record.state):
            raise ResultNotStoredError(f"the record of {record.key} has changed: read it again")
        return self._decode(whole)

    @property
    def _decode(self) -> Callable[[Record], Any]:
        return self.store.view if self.for_people else self.store.decode

    def find_message(self, task_id: str) -> Key | None:
        """Returns the key of the message with this task id, if it has a record of its own.

        Only keys that may run again have such records. Scans all names, but reads no record.
        """
        match = scan.message_pattern(self.store.config.prefix, task_id)
        with _outages() as outages:
            for node in primaries(self.client):
                with outages.of(node):
                    for name in node.client.scan_iter(match=match, count=PAGE):
                        key = scan.key_of_message(_text(name), self.store.config.prefix)
                        if key is not None:
                            return key.of_message(task_id)
        return None

    def bytes_used(self, keys: Sequence[Key]) -> list[int]:
        """Returns the memory that each record of `keys` uses; deleted ones are left out."""
        replies: list[Any] = []
        with _outages() as outages:
            for node, its_keys in self._by_node(keys):
                with outages.of(node):
                    pipeline = node.client.pipeline(transaction=False)
                    for key in its_keys:
                        pipeline.memory_usage(self.store.config.name(key))
                    replies += pipeline.execute(raise_on_error=False)
        return [size for size in replies if isinstance(size, int)]

    def server_infos(self) -> Iterator[tuple[str, dict[str, Any] | StoreUnavailableError]]:
        """Yields the properties of the server, or of each primary of a cluster, with its name.

        ``write_error`` is the error if it refuses a script that writes; empty if not.
        """
        for node in primaries(self.client):
            try:
                with translated_errors():
                    error = write_error(node.client, self._name_at(node))
                    info = server_info(node.client) | {"write_error": error}
            except StoreUnavailableError as outage:
                yield node.name, outage
            else:
                yield node.name, info

    def _name_at(self, node: Primary) -> str:
        """Returns a name for the write probe in a slot of the node."""
        name = f"{self.store.config.prefix}:{MARK}write-probe"
        names = (f"{name}-{number}" for number in range(NAMES_TO_TRY if node.name else 0))
        # A primary without slots has no such name. The probe then gets an error, which is reported.
        return next((each for each, at in self._by_name(names) if at.name == node.name), name)

    def _by_name(self, names: Iterable[str]) -> Iterator[tuple[str, Primary]]:
        """Yields each name with its node."""
        for name in names:
            if not hasattr(self.client, "get_node_from_key"):
                yield name, Primary("", self.client)
                continue
            node = self.client.get_node_from_key(name)
            yield name, Primary(node.name, self.client.get_redis_connection(node))

    def _by_node(self, keys: Iterable[Key]) -> Iterable[tuple[Primary, list[Key]]]:
        """Returns `keys` in groups, each with its node."""
        nodes: dict[Primary, list[Key]] = defaultdict(list)
        by_name = {self.store.config.name(key): key for key in keys}
        for name, node in self._by_name(by_name):
            nodes[node].append(by_name[name])
        return nodes.items()


class _Outages:
    """Lets a read of all nodes of a cluster go on although some do not reply."""

    def __init__(self) -> None:
        #: Whether a node has replied.
        self._has_replied = False
        #: The errors of the nodes that have not replied, by the node's name.
        self._errors: dict[str, Exception] = {}

    @contextmanager
    def of(self, node: Primary) -> Iterator[None]:
        """Suppresses and keeps an error of `node` in the block."""
        try:
            yield
        except CONNECTION_ERRORS as error:
            self._errors[node.name] = error
        else:
            self._has_replied = True

    def report(self) -> None:
        """Logs the errors, or raises one if no node has replied."""
        for name, error in self._errors.items():
            if not self._has_replied:
                raise error
            logger.warning("The records of the Redis node %s are missing: %s", name, error)


@contextmanager
def _outages() -> Iterator[_Outages]:
    outages = _Outages()
    with translated_errors():
        yield outages
        outages.report()


def _text(name: bytes) -> str:
    return name.decode(errors="replace")
