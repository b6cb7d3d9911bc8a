"""Processes that call one function with one key: URL, key, how many, and whether for ever."""

from __future__ import annotations

import os
import sys
import time

from redis import Redis

from celery_idempotent import Idempotency

url, key, number, *forever = sys.argv[1:]
# Fifty at once on a busy machine may each wait seconds for their turn: that must not end a lease.
# One that is to be killed has a short one.
idem = Idempotency(url, key_prefix=key, lease=1 if forever else 30, wait_timeout=60)


@idem.idempotent(key="{order}", name="engine.callers")
def charge(order: str) -> str:
    Redis.from_url(url).rpush(f"runs:{order}", os.getpid())
    time.sleep(3600 if forever else 0.5)
    return f"receipt-{os.getpid()}"


children = []
for _ in range(int(number)):
    child = os.fork() if not forever else 0
    if child == 0:
        os.write(1, f"{charge(key)}\n".encode())
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
