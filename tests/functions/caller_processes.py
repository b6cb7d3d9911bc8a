"""Forks processes that call one function: URL, key, number of processes, whether to run forever."""

from __future__ import annotations

import os
import sys
import time

from redis import Redis

from celery_idempotent import Idempotency

url, key, number, *forever = sys.argv[1:]
# On a busy machine each of fifty processes may wait for seconds, which must not end a lease. A
# process that the test kills has a short lease.
idem = Idempotency(url, key_prefix=key, lease=1 if forever else 30, wait_timeout=60)


@idem.idempotent(key="{order}", name="functions.caller")
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
