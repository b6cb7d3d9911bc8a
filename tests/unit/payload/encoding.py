"""Helpers that encode and decode payloads, an offload storage in memory, and sample values."""

from __future__ import annotations

from threading import get_ident
from typing import Any

from celery import Celery
from kombu import serialization
from kombu.serialization import prepare_accept_content

from celery_idempotent.core.payload.codec import PayloadCodec
from celery_idempotent.core.payload.result_codec import ResultCodec
from celery_idempotent.core.record import RESULT, Payload, Record, State
from celery_idempotent.core.store import run_sync
from celery_idempotent.settings import Settings


def _works(serializer: str) -> bool:
    try:
        serialization.dumps(None, serializer)
    except Exception:
        return False
    return True


SERIALIZERS = [name for name in ("json", "pickle", "yaml", "msgpack") if _works(name)]

app = Celery("payloads", backend="cache+memory://", set_as_current=False)

KEY = "shop.charge:digest"


class MemoryStorage:
    """An offload storage in memory; all its methods fail while it is `unavailable`.

    Attributes:
        threads: those that have used it.
    """

    def __init__(self) -> None:
        self.unavailable = False
        self.objects: dict[str, bytes] = {}
        self.threads: list[int] = []

    def put(self, name: str, data: bytes, seconds: float) -> None:
        self._use()
        self.objects[name] = data
        self.seconds = seconds

    def get(self, name: str) -> bytes | None:
        self._use()
        return self.objects.get(name)

    def delete(self, name: str) -> None:
        self._use()
        self.objects.pop(name, None)

    def _use(self) -> None:
        self.threads.append(get_ident())
        if self.unavailable:
            raise OSError("unavailable")


def make_codec(accept: Any = SERIALIZERS, offload_storage: Any = None, cipher: Any = None) -> Any:
    codec = PayloadCodec(ResultCodec(app), prepare_accept_content(list(accept)))
    codec.offload_storage = offload_storage
    codec.cipher = cipher
    return codec


def encode(
    value: Any,
    serializer: str = "json",
    *,
    compression: str | None = None,
    max_size: int = 1_000_000,
    key: str = KEY,
    field: str = RESULT,
    codec: PayloadCodec | None = None,
) -> Payload:
    settings = Settings(serializer=serializer, compression=compression, max_result_size=max_size)
    codec = codec or make_codec()
    return run_sync(codec.encode_result(value, settings, key=key, token=17, field=field))


def encode_error(
    error: BaseException, *, codec: PayloadCodec | None = None, max_size: int = 1_000_000
) -> Payload:
    settings = Settings(serializer="json", max_result_size=max_size)
    codec = codec or make_codec()
    return run_sync(codec.encode_error(error, settings, key=KEY, token=17))


def record_with(payload: Payload, state: State = State.COMPLETED) -> Record:
    outcome = payload._asdict()
    return Record(state, KEY, "shop.charge", "a", "w", token=1, attempt=5, **outcome)


def decode(
    payload: Payload, codec: PayloadCodec | None = None, state: State = State.COMPLETED
) -> Any:
    return (codec or make_codec()).decode(record_with(payload, state))


def decode_field(payload: Payload, field: str, codec: PayloadCodec) -> Any:
    return run_sync(codec.decode_field(payload, KEY, field))


class OutOfStockError(Exception):
    """Of a module that every worker can import."""
