"""Golden keys: the same in every release, process, platform and Python version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.key.golden import derived

pytestmark = pytest.mark.core

REPOSITORY = Path(__file__).parents[3]

#: Call, digest of its key, fingerprint. To change one on purpose, increase `canonical.VERSION`.
GOLDEN = {
    "nothing": ["zSxJeGQ-6OUoRCdGtduELQ", ""],
    "int": ["PN0MlSPt3FmEwTzQ5dHvBQ", ""],
    "negative": ["3pYnfwezj11q07jyKJWlhw", ""],
    "huge": ["d7UW1xdqTakpYjIDUH9dlA", ""],
    "float": ["fEekJQnG14CSnickNLGn8A", ""],
    "tiny": ["aaU6d6_lg8vUy3wogar83Q", ""],
    "infinite": ["tQpS1RKZu3E111fumT8FPA", ""],
    "true": ["GyRlJoJGoHmkQ6roe3fC5Q", ""],
    "false": ["kPOTtb3BOYPOI-7u44BE3w", ""],
    "text": ["CL5jz7J6Fk7Py12f4a0mPA", ""],
    "unicode": ["3dvocc-NTWdiDGYfEDPrcQ", ""],
    "bytes": ["RJpfOhjROr5SrLBYNZqj5w", ""],
    "decimal": ["pA0HKdxR0FD4u9qEctlj4A", ""],
    "uuid": ["036trCsbkuT0ZB2poqnm_A", ""],
    "datetime": ["lnXxREE-HdvMv3DcYxSE5g", ""],
    "naive": ["13uusW4rvXSfYhXmDKmz8g", ""],
    "date": ["U1U3LSQVmF7EgURuxH4fMQ", ""],
    "time": ["iVtQz0MOlvGGOxdJh7-u1g", ""],
    "timedelta": ["6-ECp2Tnk8-spHl65MCS-Q", ""],
    "list": ["hRk5aJHon12isifPuMS1_Q", ""],
    "set": ["s7FPX4vgNzVXHRfWjKpQcA", ""],
    "dict": ["pHQ7KkCU9dgxkfUz6E9HmA", ""],
    "int-key": ["ppVIURp99_Le7D7zlZjPGA", ""],
    "text-key": ["iMgsfGtPxFwbWQ7ZZPcTdQ", ""],
    "nested": ["kfCjyfVSFEL67eFUpRAkdg", ""],
    "enum": ["otRWx4Yv-PgMNYbRpNyNqg", ""],
    "dataclass": ["Pk5HgFrPs943TNufY3N6Sg", ""],
    "amount": ["qtp6zn_JBwug5dNiBFfY1w", ""],
    "rest": ["1qeLDRVyOwfy7uSQ6rBHlQ", ""],
    "options": ["Ly2LYau2IcT9EvxMskLhRA", ""],
    "template": ["7kg_0tKNXAA4cslJGHuxoQ", "f186ea640c2f5d63"],
    "ambiguous": ["eNlRM0KnhXhWyvL1-QcwAg", "e8d5cbe07c6469c4"],
    "names": ["FoFRMDAyan9NcSh8XnP6AQ", "8a42ba7e8fde0e6b"],
    "callable": ["-un60Ank7eK-BKCNunkkjg", "f186ea640c2f5d63"],
    "task-id": ["eS0djGFC_OfwI1IzKnvGmg", ""],
    # Changed on purpose, before the first release: keys that callers bring got a namespace of
    # their own. Until then "explicit" had the digest ct55-0LsqxVlt3N1bAsukg.
    "explicit": ["~XUu_BHoPn0pnw_7WY52VtA", "98c9e0e21d25ae0b"],
    "explicit-parts": ["~ERPgOQ_xgOSBElJJX-dZrw", "98c9e0e21d25ae0b"],
    "explicit-as-template": ["~FqLDu23rViKkWk2l9zMu2Q", "98c9e0e21d25ae0b"],
    "explicit-as-callable": ["~Tbmv65R0Q1rgpd55aQEcJw", "98c9e0e21d25ae0b"],
    "part": ["y9whYDKBS1AKg6XUUvz3Jw", ""],
    "explicit-part": ["~XwJKld3iYCsuAZTBJEVuhw", ""],
}


def test_keys_equal_those_of_earlier_releases() -> None:
    assert derived() == GOLDEN


@pytest.mark.parametrize("seed", ["1", "2"])
def test_keys_equal_those_of_other_processes(seed: str) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "tests.unit.key.golden"],
        env={**os.environ, "PYTHONHASHSEED": seed},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )

    assert json.loads(printed.stdout) == GOLDEN


def test_golden_keys_are_distinct() -> None:
    assert len({digest for digest, _ in GOLDEN.values()}) == len(GOLDEN)
