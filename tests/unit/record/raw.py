"""Builds the bytes of a record, independently of record/layout.py."""

from __future__ import annotations

from uuid import UUID

UUID_ID = "7a5b1c9e-4f7d-4a59-9f0e-0c8a4d2f6b11"


def raw_record(
    letter: bytes = b"S",
    *,
    attempt: int = 1,
    token: int = 1_763_726_400_123_457,
    at_ms: int = 1_763_726_460_123,
    fingerprint: bytes = b"8 bytes!",
    task_id: bytes = b"\0" + UUID(UUID_ID).bytes,
    worker: bytes = b"celery@host/4711",
    execution_id: bytes = b"an execution id!",
    form: bytes = b"",
    body: bytes = b"",
) -> bytes:
    return b"".join(
        (
            letter,
            attempt.to_bytes(1, "big"),
            token.to_bytes(7, "big"),
            at_ms.to_bytes(6, "big"),
            bytes([len(fingerprint)]) + fingerprint,
            len(task_id).to_bytes(2, "big") + task_id,
            bytes([len(worker)]) + worker,
            bytes([len(execution_id)]) + execution_id,
            bytes([len(form)]) + form,
            body,
        )
    )
