"""Reads all records and the properties of their server, for monitoring."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from celery_idempotent.errors import CorruptRecordError, ResultNotStoredError
from celery_idempotent.key.key import Key
from celery_idempotent.record import layout
from celery_idempotent.record.record import Record
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.inspection import scan, server_info
from celery_idempotent.store.inspection.scan import PAGE, ScannedRecord
from celery_idempotent.store.inspection.server_info import ServerInfo
from celery_idempotent.store.run_sync import run_sync
from celery_idempotent.store.transport.connection import (
    CONNECTION_ERRORS,
    aclose_client,
    translate_error,
)

#: Where a scan stands: the number of the primary, and its cursor.
Position = tuple[int, int]
START: Position = (0, 0)


class RecordReader:
    """Reads the records under one prefix. A `with` block closes its connections.

    Every method raises StoreUnavailableError if Redis does not reply.

    Args:
        client: used by this reader alone.
        decode: returns the result that a finished record's body encodes.
        fetch: returns the bytes of a whole record, even after this reader was closed.
    """

    def __init__(
        self,
        client: Any,
        config: StoreConfig,
        decode: Callable[[Record], Any],
        fetch: Callable[[Key], bytes],
    ) -> None:
        self._client = client
        self._config = config
        self._prefix = config.prefix
        self._owns_client = not config.borrows_client
        self._decode = decode
        self._fetch = fetch

    def __enter__(self) -> RecordReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes its connections."""
        if self._owns_client:
            run_sync(aclose_client(self._client))

    def name(self, key: Key) -> str:
        """Returns the name of the record in Redis."""
        return self._config.name(key)

    def key_of(self, text: str) -> Key | None:
        """Returns the key of a name in Redis, or of a `Record.key`; None if it is neither."""
        return scan.key_of(text, self._prefix)

    def scan(
        self, task: str | None = None, *, expiry: bool = True
    ) -> Iterator[list[ScannedRecord]]:
        """Returns all records, or those of one task, in pages.

        A page may be empty, because SCAN also passes names that are not records.
        """
        for _, page in self.scan_from(START, task, expiry=expiry):
            yield page

    def scan_from(
        self,
        start: Position,
        task: str | None = None,
        *,
        expiry: bool = True,
        count: int = PAGE,
    ) -> Iterator[tuple[Position | None, list[ScannedRecord]]]:
        """Returns the records from a position on, in pages of about `count` names.

        Each page comes with the position after it, which is None after the last one.
        """
        match = scan.pattern(self._prefix, task)
        with _translated_errors():
            nodes = list(self._primaries())
            for number, node in list(enumerate(nodes))[start[0] :]:
                first = start[1] if number == start[0] else 0
                for cursor, names in scan.names(node, match, first, count):
                    texts = [(name, name.decode(errors="replace")) for name in names]
                    keys = [(name, scan.key_of_name(text, self._prefix)) for name, text in texts]
                    ours = [(name, key) for name, key in keys if key is not None]
                    end = (number, cursor) if cursor else (number + 1, 0)
                    page = scan.heads(node, ours, expiry=expiry)
                    yield (end if end[0] < len(nodes) else None), page

    def get(self, keys: Iterable[Key], *, whole: bool = False) -> dict[Key, ScannedRecord]:
        """Returns the records of `keys` that exist, in one round trip to each node.

        Args:
            whole: read all bytes of long records, too.
        """
        size = scan.WHOLE if whole else scan.HEAD
        with _translated_errors():
            return {
                scanned.key: scanned
                for node, its_keys in self._by_node(keys)
                for scanned in scan.heads(
                    node, [(self.name(key), key) for key in its_keys], size=size
                )
            }

    def read(self, scanned: ScannedRecord) -> Record:
        """Returns the record; a large result is fetched when it is first read.

        Raises:
            CorruptRecordError: if the record cannot be read.
        """
        key, task = str(scanned.key), scanned.key.task
        decode = self._decode if scanned.whole else partial(self._decode_whole, scanned.key)
        try:
            return layout.read(scanned.raw, key, task, decode, scanned.expires_at)
        except CorruptRecordError:
            if scanned.whole:
                raise
            whole = self._fetch(scanned.key)
            return layout.read(whole, key, task, self._decode, scanned.expires_at)

    def _decode_whole(self, key: Key, record: Record) -> Any:
        """Returns the result of a record of which only the head was read."""
        whole = layout.read(self._fetch(key), record.key, record.task)
        if (whole.token, whole.state) != (record.token, record.state):
            raise ResultNotStoredError(f"the record of {record.key} has changed: read it again")
        return self._decode(whole)

    def find_message(self, task_id: str) -> Key | None:
        """Returns the key of the message with this task id, if it has a record of its own.

        Only a key that may run again has such records; this reads all names, and no record.
        """
        match = scan.message_pattern(self._prefix, task_id)
        with _translated_errors():
            for node in self._primaries():
                for _, names in scan.names(node, match):
                    for name in names:
                        key = scan.key_of_message(name.decode(errors="replace"), self._prefix)
                        if key is not None:
                            return key.of_message(task_id)
        return None

    def count_names(self) -> int:
        """Returns how many names a scan passes, including those that are not records."""
        with _translated_errors():
            return sum(node.dbsize() for node in self._primaries())

    def bytes_used(self, keys: Sequence[Key]) -> list[int]:
        """Returns the memory that each record of `keys` uses; deleted ones are left out."""
        replies: list[Any] = []
        with _translated_errors():
            for node, its_keys in self._by_node(keys):
                pipeline = node.pipeline(transaction=False)
                for key in its_keys:
                    pipeline.memory_usage(self.name(key))
                replies += pipeline.execute(raise_on_error=False)
        return [size for size in replies if isinstance(size, int)]

    def server_info(self) -> ServerInfo:
        """Returns the properties of the server; of a cluster, those of one primary."""
        with _translated_errors():
            return server_info.server_info(next(self._primaries()))

    def _primaries(self) -> Iterator[Any]:
        """Returns a client for each primary."""
        if not hasattr(self._client, "get_primaries"):
            yield self._client
            return
        # In an order that another connection to the cluster has, too.
        for node in sorted(self._client.get_primaries(), key=lambda node: str(node.name)):
            yield self._client.get_redis_connection(node)

    def _by_node(self, keys: Iterable[Key]) -> Iterable[tuple[Any, list[Key]]]:
        """Returns `keys` in groups, each with the client of its node."""
        if not hasattr(self._client, "get_node_from_key"):
            return [(self._client, list(keys))]
        nodes: dict[Any, list[Key]] = defaultdict(list)
        for key in keys:
            node = self._client.get_node_from_key(self.name(key))
            nodes[self._client.get_redis_connection(node)].append(key)
        return nodes.items()


@contextmanager
def _translated_errors() -> Iterator[None]:
    """Translates the errors of redis-py inside the block."""
    try:
        yield
    except CONNECTION_ERRORS as error:
        raise translate_error(error, "") from error
