"""What earlier versions have stored, which every later version must read.

``python -m tests.golden`` writes the states of `cases.py`, as this version stores them, into the
file of its layout. Cases that a file has are never written again: each file is kept for ever.
tests/store/test_golden.py fixes the bytes that this version writes.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
