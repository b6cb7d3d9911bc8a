"""A consumer process: broker URL and options, Redis URL, queue, name. SIGTERM ends it."""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Any

from kombu import Connection, Queue
from redis import Redis

from celery_idempotent import Idempotency
from celery_idempotent.contrib.kombu import IdempotentConsumer

broker, options, url, queue, name = sys.argv[1:]
idem = Idempotency(url, key_prefix=queue, lease=1)
ledger = Redis.from_url(url)


def handle(body: Any, message: Any) -> None:
    if body["number"] == 100 and name == "victim":
        ledger.set(f"{queue}:victim-is-handling", "1")
        time.sleep(3600)
    ledger.hincrby(f"{queue}:handled", body["number"], 1)


connection = Connection(broker, transport_options=json.loads(options))
consumer = IdempotentConsumer(
    idem, connection, [Queue(queue, routing_key=queue)], handle, prefetch_count=20
)


def stop(*_: object) -> None:
    consumer.should_stop = True


signal.signal(signal.SIGTERM, stop)
consumer.run(safety_interval=0.2)
