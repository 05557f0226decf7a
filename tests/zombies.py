"""Zombies, in full: `make zombies`. See docs/design/crash-testing.md.

Real processes that save, prune, pin and copy are stopped before each of their calls to the disk, succeeded by another
incarnation, and woken. Bugs are planted in them that this has to find. Exit status 0 only if nothing is wrong and none
was missed.
"""

from __future__ import annotations

import argparse
import sys
import time

from support_zombies import BUGS, DEEDS, calls_of, haunt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stride", type=int, default=1, help="stop before every n-th call only")
    args = parser.parse_args()
    began_s = time.monotonic()
    pauses = 0
    violations: list[str] = []
    for deed in DEEDS:
        haunting = haunt(deed, stride=args.stride)
        pauses += haunting.pauses
        violations += haunting.violations
        sys.stdout.write(
            f"{deed:16}{calls_of(deed):5} calls{haunting.pauses:7,} pauses{len(haunting.violations):4} violations\n"
        )
    for line in violations[:20]:
        sys.stdout.write(f"VIOLATION {line}\n")
    caught = 0
    for bug, (_plant, deed) in BUGS.items():
        found = haunt(deed, bug=bug, enough=1).violations
        caught += bool(found)
        sys.stdout.write(f"planted: {bug:42}{found[0] if found else 'MISSED'}\n")
    sys.stdout.write(
        f"pauses {pauses:,}   violations {len(violations)}   planted bugs caught {caught}/{len(BUGS)}   "
        f"({time.monotonic() - began_s:.0f} s)\n"
    )
    return 1 if violations or caught < len(BUGS) else 0


if __name__ == "__main__":
    sys.exit(main())
