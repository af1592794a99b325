"""Peers and ours on the GPU at hand, side by side: speed, memory and loss.

    python -m benchmarks.gpu                                  everything
    python -m benchmarks.gpu --rows bf16 --methods shardtune compile --out first
    python -m benchmarks.gpu --sample 24 --seed 7 --out drawn     random jobs (`gpu_sample.py`)
    python -m benchmarks.gpu --merge first/gpu.json second/gpu.json

Each method of each row runs in a process of its own, on random weights of the true shape. Rows,
peers and our settings are in `gpu_cases.py`. A method that fails is a line of the table. What is
done so far is in FOLDER/gpu.json after each one; gpu.md and gpu.svg come at the end, or later, from
the files of several runs. `--tiny` tries all of it on the CPU, with a model of the size of a toy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_cases import PEERS, Case, chosen
from benchmarks.gpu_report import Record, line, summary, write
from benchmarks.gpu_sample import case_of, described, sample
from benchmarks.table import DOCS

ENVIRONMENT = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "HF_HUB_OFFLINE": "1",
    "UNSLOTH_COMPILE_LOCATION": str(Path(tempfile.gettempdir()) / "unsloth_compiled_cache"),
}
"""Of every method, ours and others, unless it is set already."""
SHOWN = 15  # lines of a failed method's trace


def run_all(options: argparse.Namespace) -> Iterator[Record]:
    """Each method in turn; the card's own rate comes first."""
    where = {"run": uuid.uuid4().hex[:8]} | Child(["gpu_card"], options).result()
    if "error" in where:
        raise SystemExit(f"this machine's own speed can't be measured: {where['error']}")
    rate = where["matmul_flops"] / 1e12
    print(f"{where['gpu']}: {rate:.1f} TFLOP/s in bf16, run {where['run']}", flush=True)
    waiting: list[tuple[str, str, Child]] = []
    try:
        for case, method in wanted_of(options):
            missing = left_out(method, tiny=options.tiny)
            if missing:
                print(f"{case.name} | {method}: left out: {missing}", flush=True)
                continue
            words = ["gpu_run", case.name, method, "--steps", str(options.steps)]
            words += ["--kernels"] if options.kernels else []
            # The next one imports what it needs while this one runs; the card is this one's alone.
            waiting.append((case.name, method, Child(words, options)))
            if len(waiting) > 1:
                yield shown(where, *waiting.pop(0))
        while waiting:
            yield shown(where, *waiting.pop(0))
    finally:  # whoever was ended early leaves nothing on the card
        for _, _, child in waiting:
            child.end()


def wanted_of(options: argparse.Namespace) -> Iterator[tuple[Case, str]]:
    """Rows and methods that were asked for."""
    if options.only:
        picked = (pair.split(": ", 1) for pair in options.only)
        yield from ((case_of(row), method) for row, method in picked)
    elif options.sample:
        for number in range(1, options.sample + 1):
            case = sample(options.seed, number)
            print(f"{case.name}: {described(case)}", flush=True)
            yield from ((case, method) for method in (*case.ours, *case.peers))
    else:
        yield from chosen(options.rows, options.methods)


def shown(where: Record, case: str, method: str, child: Child) -> Record:
    record = where | {"case": case, "method": method} | child.result()
    print(line(record), flush=True)
    return record


def left_out(method: str, *, tiny: bool) -> str:
    """Why a method can't run here; nothing if it can."""
    peer = PEERS.get(method)
    if peer is None:
        return ""
    if tiny and peer.on_gpu_only:
        return "it needs a GPU"
    missing = [name for name in peer.needs if not _is_there(name)]
    return f"{' and '.join(missing)} can't be imported" if missing else ""


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # what it would be a part of
        return False


class Child:
    """A module in a process of its own, which waits for a line before it touches the card.

    Its output goes to files: a compiler's processes may outlive it and keep a pipe open.
    """

    def __init__(self, words: list[str], options: argparse.Namespace) -> None:
        module, *rest = words
        command = [sys.executable, "-m", f"benchmarks.{module}", *rest]
        command += ["--tiny"] if options.tiny else []
        self._timeout: float = options.timeout
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115 - until `result`
        self._err = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._out,
            stderr=self._err,
            env=ENVIRONMENT | dict(os.environ),
            start_new_session=True,
        )

    def result(self) -> dict[str, Any]:
        """What it prints last, or the line that says what went wrong."""
        with self._out as out, self._err as err:
            try:
                self._process.communicate(b"go\n", self._timeout)
            except subprocess.TimeoutExpired:
                return {"error": f"not done in {self._timeout:.0f} s"}
            finally:
                self.end()
            out.seek(0)
            err.seek(0)
            if self._process.returncode == 0:
                found: dict[str, Any] = json.loads(out.read().strip().splitlines()[-1])
                return found
            return {"error": what_failed(err.read(), self._process.returncode)}

    def end(self) -> None:
        """With what it has started, so that the next one has the card to itself; ranks of a run
        follow their launcher by themselves."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def what_failed(text: str, code: int) -> str:
    """The last line that names an error; advice may follow it. The rest goes to stderr."""
    lines = text.strip().splitlines()
    print("\n".join(lines[-SHOWN:]), file=sys.stderr, flush=True)
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    return [f"exit code {code}", *lines[-1:], *named[-1:]][-1]


def read(paths: list[Path]) -> list[Record]:
    """The records of earlier runs, in the order of the files."""
    return [record for path in paths for record in json.loads(path.read_text(encoding="utf-8"))]


def leave_on_sigterm() -> None:
    """By an exception. A method has a process group of its own, which the signal doesn't reach:
    whoever waits for it ends it on the way out."""

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not end the ending
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", default=[], help="words of the rows to run (all)")
    parser.add_argument("--methods", nargs="+", default=[], help="words of the methods (all)")
    parser.add_argument("--only", nargs="+", default=[], help="`row: method`, just these, in order")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="N random jobs")
    parser.add_argument("--seed", type=int, default=7, metavar="S", help="of the random jobs (7)")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each (10)")
    parser.add_argument("--timeout", type=float, default=400, help="seconds of each (400)")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="FOLDER", help="(docs)")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="JSON", help="run nothing")
    parser.add_argument(
        "--kernels", action="store_true", help="time by kind of kernel, in the file"
    )
    parser.add_argument("--note", default="", help="a paragraph to put below the table")
    parser.add_argument("--tiny", action="store_true", help="a toy on the CPU, two steps")
    options = parser.parse_args(given)
    if options.tiny:
        options.steps = min(options.steps, 2)
        if options.out == DOCS:
            parser.error("--tiny measures nothing worth a place in the docs: give --out")
    options.out.mkdir(parents=True, exist_ok=True)
    records = read(options.merge) if options.merge else []
    kept = options.out / "gpu.json"
    for record in () if options.merge else run_all(options):
        records.append(record)
        kept.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    if not records:
        print("nothing was measured")
        return 1
    kept.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    write(records, options.out, options.note)
    print(summary(records))
    return 0


if __name__ == "__main__":
    leave_on_sigterm()
    sys.exit(main())
