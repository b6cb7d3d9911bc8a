"""One call of a script, and what its caller saw."""

from __future__ import annotations

from typing import Any, NamedTuple

#: Later than any reply.
NEVER = 2**63


class Operation(NamedTuple):
    """Times are nanoseconds of the clock that all processes of a machine share."""

    key: str
    script: str
    #: By the names in the script's head.
    arguments: dict[str, Any]
    #: Of the message whose entry the script gets; empty without one.
    root: bytes
    invoked: int
    #: `NEVER`, if no reply arrived.
    returned: int
    #: How often the call was sent.
    copies: int = 1
    #: The reply; empty without one.
    case: str = ""
    #: The record in the reply.
    raw: bytes = b""
    #: The server's time in the reply, in milliseconds; 0 if the script did not read it.
    now_ms: int = 0

    def __str__(self) -> str:
        shown = {
            name: value[:8].hex() if isinstance(value, bytes) and len(value) == 8 else value
            for name, value in self.arguments.items()
            if name in ("execution_id", "task_id", "token", "generation", "hold_ms", "continues")
        }
        listed = " ".join(f"{name}={value}" for name, value in shown.items())
        end = "…" if self.returned == NEVER else f"{self.returned / 1e6:.3f}"
        times = f"{self.invoked / 1e6:.3f}–{end}"
        reply = f"{self.case or 'no reply'} {_short(self.raw)}"
        return f"{times} {self.script}({listed}) at {self.now_ms}: {reply}"


def _short(raw: bytes) -> str:
    if len(raw) < 15:
        return ""
    token, at = int.from_bytes(raw[2:9], "big"), int.from_bytes(raw[9:15], "big")
    return f"{raw[:1].decode()} attempt={raw[1]} token={token} at={at}"
