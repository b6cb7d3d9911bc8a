"""``python -m tests.public_api`` rewrites the snapshot after an intended change."""

from tests.public_api.describe import describe
from tests.public_api.test_public_api import SNAPSHOT

SNAPSHOT.write_text(describe(), encoding="utf-8")
