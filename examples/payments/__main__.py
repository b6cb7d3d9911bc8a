"""Runs the demo: ``python -m examples.payments``."""

from __future__ import annotations

import sys

try:
    from .cli import main
except KeyboardInterrupt:  # importing Celery takes a while
    print("Interrupted before the demo started.", file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
