"""Properties of a Redis server that the Redis user may read."""

from __future__ import annotations

import contextlib
import time
from hashlib import sha1
from typing import Any

from redis.exceptions import NoScriptError, ResponseError

_PROBE = "redis.call('SET', KEYS[1], '', 'PX', 1)"
_PROBE_SHA = sha1(_PROBE.encode(), usedforsecurity=False).hexdigest()


def server_info(client: Any) -> dict[str, Any]:
    """Returns the reply to INFO, and with it ``save`` of the configuration and ``clock_ahead``.

    Fields that the user may not read are missing. ``clock_ahead`` is the seconds by which the
    server's clock is ahead of this machine's.
    """
    sent_at = time.time()
    seconds, microseconds = client.time()
    info = {"clock_ahead": seconds + microseconds / 1e6 - (sent_at + time.time()) / 2}
    # A worker's user may lack INFO, and many hosted servers refuse CONFIG GET.
    for read in (client.info, lambda: client.config_get("save")):
        with contextlib.suppress(ResponseError):
            info |= read()
    return info


def write_error(client: Any, name: str) -> str:
    """Writes a one-millisecond key `name` in a script; returns the error if it is refused."""
    try:
        try:
            client.evalsha(_PROBE_SHA, 1, name)
        except NoScriptError:
            client.eval(_PROBE, 1, name)
    except ResponseError as error:
        return str(error)
    return ""
