"""Synchronizes a mailbox. Two synchronizations of one mailbox never run at the same time.

    celery -A examples.one_at_a_time.tasks worker
    >>> synchronize.delay("ada@example.org")
    >>> synchronize.delay("ada@example.org")

The second call waits for the end of the first, and then runs: new mail may have come since. Calls
for other mailboxes run meanwhile. To skip the second call, set idempotency_on_conflict="ignore".

CELERY_BROKER_URL and CELERY_RESULT_BACKEND set the broker and the result backend.
"""

from __future__ import annotations

import time

from celery import Celery

from celery_idempotent import IdempotentTask

app = Celery("mailboxes")


@app.task(base=IdempotentTask, idempotency_key="{mailbox}", idempotency_until="finished")
def synchronize(mailbox: str) -> int:
    """Fetches new mail and returns the number of messages."""
    print(f"{mailbox}: connected")
    count = fetch(mailbox)
    print(f"{mailbox}: {count} new messages")
    return count


def fetch(mailbox: str) -> int:
    """Represents a connection to a mail server, which accepts one for each mailbox."""
    time.sleep(1)
    return len(mailbox)
