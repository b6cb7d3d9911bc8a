"""``python -m tests.public_api``: write the snapshot anew, after a change that is meant."""

from tests.public_api.describe import describe
from tests.public_api.test_public_api import SNAPSHOT

SNAPSHOT.write_text(describe(), encoding="utf-8")
