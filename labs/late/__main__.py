"""``make late``: plays commands that Redis executes late, and counts the broken promises."""

from __future__ import annotations

import argparse
import sys
import time

from labs.late.programs import PROGRAMS, play


def main() -> int:
    parser = argparse.ArgumentParser(prog="make late", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of programs, from 0")
    options = parser.parse_args()
    broken = 0
    for number, program in enumerate(PROGRAMS):
        if options.only and number not in options.only:
            continue
        started_at = time.monotonic()
        found = play(program, options.rounds)
        broken += len(found)
        seconds = time.monotonic() - started_at
        print(f"{program.title}: {options.rounds} rounds, {len(found)} broken, {seconds:.0f} s")
        print(*found, sep="\n", end="\n" if found else "", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
