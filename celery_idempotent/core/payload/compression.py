"""Decompresses payloads up to a limit, which kombu's own functions lack.

Without it, a short body that someone has written to Redis could fill the memory of a worker.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from typing import Any

import kombu.compression

#: Bytes of memory for the decompressor of LZMA; its default preset needs 9 MiB.
_LZMA_MEMORY = 64 * 1024 * 1024


def decompressor(compression: str) -> Any:
    """Returns a new decompressor whose output can be limited, for one of kombu's compressions.

    Raises:
        KeyError: if there is none.
    """
    content_type = kombu.compression.get_encoder(compression)[1]
    if content_type == "application/x-gzip":
        return zlib.decompressobj()
    if content_type == "application/x-bz2":
        return bz2.BZ2Decompressor()
    if content_type == "application/x-lzma":
        return lzma.LZMADecompressor(memlimit=_LZMA_MEMORY)
    if content_type == "application/zstd":
        return vars(kombu.compression)["zstd"].ZstdDecompressor()
    raise KeyError(compression)


def decompress(body: bytes, compression: str, limit: int) -> bytes:
    """Returns the data of `body`.

    Raises:
        ValueError: if it cannot be decompressed, or does not end after `limit` bytes.
    """
    try:
        stream = decompressor(compression)
        data: bytes = stream.decompress(body, limit)
    except Exception as error:
        raise ValueError(f"{compression}: {type(error).__name__}") from error
    if not stream.eof:
        raise ValueError(f"it is truncated, or larger than {limit} bytes")
    return data
