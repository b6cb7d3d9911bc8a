"""Runs the demo: ``python -m examples.payments``, or ``python -m celery_idempotent.demo``."""

from __future__ import annotations

import sys

try:
    from .cli import main
except KeyboardInterrupt:  # importing Celery takes a while
    print("Interrupted before the demo started.", file=sys.stderr)
    sys.exit(130)
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed: pip install 'celery-idempotent[demo]'")

if __name__ == "__main__":
    sys.exit(main())
