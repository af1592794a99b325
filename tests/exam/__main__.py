"""`make exam`: every case of the fault exam on this machine, as a table.

python -m tests.exam [--only 30 31] [--json FILE] [--docs] [--without-peer]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from tests.exam import artefacts, ownership, page, peer, read_files, saves, supervision, values
from tests.exam.case import Findings, Verdict
from tests.exam.harness import Lab
from tests.exam.proofs import Proofs, require_collected, run_tests
from tests.exam.slots import Slots, at, of_forked_ranks
from tests.exam.table import ROWS, Check, Row, count

AT_A_TIME, BESIDE_TIMED = 4, 2
"""Runs beside one another, on two cores: each has its pauses. Fewer beside one that is timed."""
TIMED: tuple[Check, ...] = (
    supervision.kills, supervision.hangs, supervision.signals, supervision.interruption,
    supervision.orphans, supervision.pauses, values.memory,
)  # fmt: skip
"""Checks that look at the clock are never made beside one another, and go before all others."""
LONG: tuple[Check, ...] = (
    artefacts.huge_rows, saves.resumed_at_every_step, saves.killed_in_save, artefacts.pickles,
    ownership.lost_and_found, read_files.incomplete_model,
)  # fmt: skip
"""Those that take longest begin first."""


def main() -> int:
    arguments = _arguments()
    rows = [row for row in ROWS if not arguments.only or row.number in arguments.only]
    begun = time.monotonic()
    require_collected(all_tests(rows))
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder), _slots(rows))
        lab.prepare()
        psutil.cpu_times_percent()
        verdicts, theirs = sit(rows, lab, with_peer=not arguments.without_peer)
        lab.slots.cpu["forked ranks"] = of_forked_ranks()
        busy = 100 - psutil.cpu_times_percent().idle
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(_table(rows, verdicts, theirs))
    minutes = (time.monotonic() - begun) / 60
    held = {p: count(rows, verdicts, p) for p in ("P0", "P1")}
    for priority, (good, applying) in held.items():
        console.print(f"{priority}: {good} of {applying} cases that apply are held")
    console.print(f"{minutes:.1f} minutes, processors busy {busy:.0f} % of the time")
    console.print(lab.slots.report())
    if arguments.json:
        found = [
            {"case": row.number, "priority": row.priority, "title": row.title,
             **asdict(verdicts[row.number])}
            for row in rows
        ]  # fmt: skip
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    if arguments.docs:
        page.write(rows, verdicts, theirs, minutes)
    enough = held["P1"][0] >= 0.8 * held["P1"][1]
    return int(held["P0"][0] < held["P0"][1] or not enough)


def sit(
    rows: Sequence[Row], lab: Lab, *, with_peer: bool
) -> tuple[dict[int, Verdict], dict[int, Verdict]]:
    """Each check once, whatever the number of rows that it answers; ours and the peer's."""
    checks = _checks(rows)
    timed = [check for check in TIMED if check in checks]
    # A thread each: what keeps a check waiting is a slot, or another's run, which needs one.
    with ThreadPoolExecutor(max_workers=len(checks) + 3) as pool:
        struck = pool.submit(_in_turn, timed, lab)
        tests = pool.submit(run_tests, all_tests(rows), lab)
        theirs = pool.submit(peer.sit, lab) if with_peer else None
        others = {check: pool.submit(_findings, check, lab) for check in checks
                  if check not in timed}  # fmt: skip
    seen = struck.result() | {check: each.result() for check, each in others.items()}
    verdicts = {row.number: _verdict(row, tests.result(), seen) for row in rows}
    return verdicts, theirs.result() if theirs else {}


def all_tests(rows: Sequence[Row]) -> list[str]:
    return sorted({test for row in rows for test in row.tests})


def _checks(rows: Sequence[Row]) -> list[Check]:
    return list(dict.fromkeys(check for row in rows for check in row.checks))


def _slots(rows: Sequence[Row]) -> Slots:
    """Runs that several checks look at, tests and what is timed go first, then what takes long."""
    others = [check for check in _checks(rows) if check not in (*TIMED, *LONG)]
    names = [*(check.__name__ for check in (*LONG, *others)), "peer"]
    return Slots(
        AT_A_TIME,
        {name: number for number, name in enumerate(names)},
        {check.__name__: AT_A_TIME - BESIDE_TIMED for check in TIMED},
    )


def _in_turn(checks: Sequence[Check], lab: Lab) -> dict[Check, Findings]:
    return {check: _findings(check, lab) for check in checks}


def _findings(check: Check, lab: Lab) -> Findings:
    found, name = Findings(), check.__name__
    try:
        with at(name):
            check(lab, found)
    except Exception as error:
        found.expect(f"{name} fails: {type(error).__name__}: {error}", False)
        traceback.print_exc()
    seconds = lab.slots.clock[name]  # without those in which it waited for others
    print(f"{name}: {found.verdict().outcome}, {seconds:.0f} s", file=sys.stderr, flush=True)
    return found


def _verdict(row: Row, proofs: Proofs, seen: dict[Check, Findings]) -> Verdict:
    if row.missing:
        return Verdict("not applicable", row.missing)
    found = Findings()
    for check in row.checks:
        found.facts += seen[check].facts
        found.figures += seen[check].figures
    for test in row.tests:
        proofs.tell(test, found)
    if row.tests:
        found.show(f"{proofs.count(row.tests)} tests")
    return found.verdict()


def _table(rows: Sequence[Row], verdicts: dict[int, Verdict], theirs: dict[int, Verdict]) -> Table:
    table = Table("case", "", "what", "held", "figure", "Hugging Face's Trainer", padding=(0, 1))
    for row in rows:
        verdict, other = verdicts[row.number], theirs.get(row.number)
        table.add_row(
            str(row.number), row.priority, row.title, verdict.outcome, verdict.figure,
            str(other or ""),
        )  # fmt: skip
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs the fault exam.")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases")
    parser.add_argument("--json", type=Path, help="write the table there too")
    parser.add_argument("--docs", action="store_true", help="and into docs/faults.md")
    parser.add_argument("--without-peer", action="store_true", help="leave the Trainer out")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
