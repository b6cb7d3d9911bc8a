"""A look over the records and their server, for people and for programs that watch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from celery_idempotent.errors import CorruptRecordError, ResultNotStoredError
from celery_idempotent.key.key import Key
from celery_idempotent.record import layout
from celery_idempotent.record.record import Record
from celery_idempotent.store import scan, server_info
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.scan import ScannedRecord
from celery_idempotent.store.server_info import ServerInfo
from celery_idempotent.store.transport.connection import (
    CONNECTION_ERRORS,
    close_client,
    translate_error,
)


class RecordReader:
    """Reads, and only reads, what is under one prefix. A `with` block closes its connections.

    Every method raises StoreUnavailableError if Redis cannot be asked.

    Args:
        client: of its own.
        place: where the records are.
        decode: turns a finished record's body into its result.
        fetch: the bytes of a whole record, even when this look is over.
    """

    def __init__(
        self,
        client: Any,
        config: StoreConfig,
        decode: Callable[[Record], Any],
        fetch: Callable[[Key], bytes],
    ) -> None:
        self._client = client
        self._prefix = config.prefix
        self._ours = not config.borrows_client
        self._decode = decode
        self._fetch = fetch

    def __enter__(self) -> RecordReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours:
            close_client(self._client)

    def name(self, key: Key) -> str:
        """The name of the record in Redis."""
        return f"{self._prefix}:{key}"

    def key_of(self, text: str) -> Key | None:
        """The key that a name in Redis, or `Record.key`, stands for; None if it is neither."""
        return scan.key_of(text, self._prefix)

    def scan(
        self, task: str | None = None, *, expiry: bool = True
    ) -> Iterator[list[ScannedRecord]]:
        """All records, or one task's, a page at a time.

        A page may be empty: SCAN goes through others' names too. See `store.scan`.
        """
        match = scan.pattern(self._prefix, task)
        with _told():
            for node in self._primaries():
                for names in scan.names(node, match):
                    texts = [(name, name.decode(errors="replace")) for name in names]
                    keys = [(name, scan.key_of_name(text, self._prefix)) for name, text in texts]
                    ours = [(name, key) for name, key in keys if key is not None]
                    yield scan.heads(node, ours, expiry=expiry)

    def get(self, keys: Iterable[Key]) -> dict[Key, ScannedRecord]:
        """What stands under each of `keys`, one round trip a node; those with nothing left out."""
        with _told():
            found = [
                one
                for node, there in self._by_node(keys)
                for one in scan.heads(node, [(self.name(key), key) for key in there])
            ]
        return {one.key: one for one in found}

    def read(self, found: ScannedRecord) -> Record:
        """The record that was found; a large result is fetched when it is asked for.

        Raises:
            CorruptRecordError: if what is there cannot be read.
        """
        key = str(found.key)
        decode = self._decode if found.whole else self._decode_whole
        try:
            return layout.read(found.raw, key, found.key.task, decode, found.expires_at)
        except CorruptRecordError:
            if found.whole:
                raise
            whole = self._fetch(found.key)
            return layout.read(whole, key, found.key.task, self._decode, found.expires_at)

    def _decode_whole(self, record: Record) -> Any:
        """The result of a record of which only the head is here."""
        key = self.key_of(record.key)
        assert key is not None
        whole = layout.read(self._fetch(key), record.key, record.task)
        if (whole.token, whole.state) != (record.token, record.state):
            raise ResultNotStoredError(f"{record.key} has changed meanwhile: look again")
        return self._decode(whole)

    def count_names(self) -> int:
        """How many names a scan goes through, others' included."""
        with _told():
            return sum(node.dbsize() for node in self._primaries())

    def bytes_used(self, keys: Sequence[Key]) -> list[int]:
        """What the records of `keys` take in the server's memory; those that are gone left out."""
        answers: list[Any] = []
        with _told():
            for node, there in self._by_node(keys):
                pipeline = node.pipeline(transaction=False)
                for key in there:
                    pipeline.memory_usage(self.name(key))
                answers += pipeline.execute(raise_on_error=False)
        return [size for size in answers if isinstance(size, int)]

    def server_info(self) -> ServerInfo:
        """What the server says of itself; of a Cluster one primary speaks for all."""
        with _told():
            return server_info.server_info(next(self._primaries()))

    def _primaries(self) -> Iterator[Any]:
        """A client for each node that has keys of its own."""
        if not hasattr(self._client, "get_primaries"):
            yield self._client
            return
        for node in self._client.get_primaries():
            yield self._client.get_redis_connection(node)

    def _by_node(self, keys: Iterable[Key]) -> Iterable[tuple[Any, list[Key]]]:
        """`keys`, with the client of the node that has them."""
        if not hasattr(self._client, "get_node_from_key"):
            return [(self._client, list(keys))]
        nodes: dict[Any, list[Key]] = defaultdict(list)
        for key in keys:
            node = self._client.get_node_from_key(self.name(key))
            nodes[self._client.get_redis_connection(node)].append(key)
        return nodes.items()


@contextmanager
def _told() -> Iterator[None]:
    """Whatever Redis does wrong inside, as an error of ours."""
    try:
        yield
    except CONNECTION_ERRORS as error:
        raise translate_error(error, "") from error
