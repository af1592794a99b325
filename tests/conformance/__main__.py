"""Prints the conformance table: `python -m tests.conformance [ROW ...]`."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two ranks on two cores, not two times two threads

from tests.conformance.guarantees import examine
from tests.conformance.table import ROWS


def main() -> None:
    chosen = [row for row in ROWS if not sys.argv[1:] or row.id.startswith(tuple(sys.argv[1:]))]
    print("| row | ranks | largest difference | held / predicted, bytes | sent / declared, bytes |")
    print("|---|--:|--:|---|---|")
    for row in chosen:
        try:
            found = examine(row)
        except AssertionError as error:
            print(f"| {row.id} | {row.ranks} | failed: {str(error).strip().splitlines()[-1]} | | |")
            continue
        held = ", ".join(f"{state} {a:,} / {b:,}" for state, (a, b) in found.held.items())
        sent = ", ".join(f"{kind} {a:,} / {b:,}" for kind, (a, b) in found.sent.items())
        print(f"| {row.id} | {row.ranks} | {found.difference:.1e} | {held} | {sent} |", flush=True)


if __name__ == "__main__":
    main()
