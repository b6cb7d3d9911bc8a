"""Tests, one folder for each kind; see .github/CONTRIBUTING.md."""

import os

if os.environ.get("STRAIGHT_LINE") == "off":
    # In this process and in the workers that it starts, every message takes the flow.
    from celery_idempotent.task import straight

    straight.line_of = lambda *_: None
