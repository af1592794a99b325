"""Prints the conformance table: `python -m tests.conformance [ROW ...]`."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two ranks on two cores, not two times two threads

from tests import async_io
from tests.conformance.guarantees import examine, refusal
from tests.conformance.table import ROWS


def main() -> None:
    chosen = [row for row in ROWS if not sys.argv[1:] or row.id.startswith(tuple(sys.argv[1:]))]
    print("| row | ranks | largest difference | held / predicted, bytes | sent / declared, bytes |")
    print("|---|--:|--:|---|---|")
    missing = async_io.missing()
    for row in chosen:
        if row.refused:
            print(f"| {row.id} | {row.ranks} | refused: {refusal(row)} | | |")
            continue
        if row.build and missing:
            print(f"| {row.id} | {row.ranks} | not run: {missing} | | |")
            continue
        try:
            found = examine(row)
        except AssertionError as error:
            print(f"| {row.id} | {row.ranks} | failed: {str(error).strip().splitlines()[-1]} | | |")
            continue
        held = ", ".join(f"{state} {a:,} / {b:,}" for state, (a, b) in found.held.items())
        files = [f"{state} {a:,} / {b:,}" for state, (a, b) in found.swapped.items()]
        held += f"; in files {', '.join(files)}" if files else ""
        sent = ", ".join(f"{kind} {a:,} / {b:,}" for kind, (a, b) in found.sent.items())
        print(f"| {row.id} | {row.ranks} | {found.difference:.1e} | {held} | {sent} |", flush=True)


if __name__ == "__main__":
    main()
