"""Entry of ``python -m examples.payments``."""

from __future__ import annotations

import sys

try:
    from .cli import main
except KeyboardInterrupt:  # Celery takes its time to import
    print("Interrupted before anything began.", file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
