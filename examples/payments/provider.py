"""A payment provider that takes its time and charges whenever it is asked, even twice."""

from __future__ import annotations

import random
import secrets
import time

from .events import Payment

SHORTEST_SECONDS = 0.010
LONGEST_SECONDS = 0.040
HANGING_SECONDS = 2.0


def capture(payment: Payment, *, hangs: bool = False) -> str:
    """Take the money and return the id of a fresh charge; `hangs` is the one call that drags on."""
    usual_seconds = random.uniform(SHORTEST_SECONDS, LONGEST_SECONDS)
    time.sleep(HANGING_SECONDS if hangs else usual_seconds)
    return f"ch_{payment.currency}_{secrets.token_hex(10)}"
