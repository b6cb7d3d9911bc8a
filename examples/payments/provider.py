"""A slow payment provider that charges on every request, even on repeated ones."""

from __future__ import annotations

import random
import secrets
import time

from .events import Payment

MIN_SECONDS = 0.005
MAX_SECONDS = 0.015
#: The process is killed meanwhile.
HANGING_SECONDS = 10.0


def capture(payment: Payment, *, hangs: bool = False) -> str:
    """Charges the customer and returns the charge's id; `hangs` makes the call slow."""
    time.sleep(HANGING_SECONDS if hangs else random.uniform(MIN_SECONDS, MAX_SECONDS))
    return f"ch_{payment.currency}_{secrets.token_hex(10)}"
