"""Updates a search index: a burst of changes, shorter than a run, indexes a product twice at most.

    celery -A examples.burst.tasks worker
    >>> [index.delay(42).id for _ in range(100)]

One message waits in the queue, and all callers get its result. When it begins, it reads whatever
has changed by then. A change that comes later publishes one more message, which waits until the
first has ended: no change is missed, and the product is never indexed twice at the same time.

CELERY_BROKER_URL and CELERY_RESULT_BACKEND set the broker and the result backend.
"""

from __future__ import annotations

import time

from celery import Celery

from celery_idempotent import IdempotentTask

app = Celery("search")


@app.task(
    base=IdempotentTask,
    idempotency_key="product:{product_id}",
    idempotency_until="started",
    idempotency_dedupe_publish=True,
)
def index(product_id: int) -> str:
    """Reads the product as it is now, and writes it to the index."""
    document = read(product_id)
    write(product_id, document)
    return document


def read(product_id: int) -> str:
    """Represents a query of the database."""
    return f"product {product_id} as of {time.time():.3f}"


def write(product_id: int, document: str) -> None:
    """Represents a slow search engine."""
    time.sleep(1)
    print(f"indexed {document}")
