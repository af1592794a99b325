"""Start-up: seconds from `shardtune train` to the end of its first step, cold and warm.

    python -m benchmarks.startup                     Llama-3.1-8B, LoRA, 8 x 2048 tokens
    python -m benchmarks.startup --row "1B bf16 1x1024" --out drawn
    python -m benchmarks.startup --tiny --out /tmp/x  a toy on the CPU: whether it runs

The command runs twice on the same files: random weights of the true shape, written first, which
isn't counted. The first run has empty caches (torch's compiler, Triton, ours), the second finds
what the first has left. Weights are in the page cache for both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_cases import CASES, Case
from benchmarks.gpu_data import batches, config_of
from benchmarks.gpu_train import train_job, write_rows, write_tokenizer
from benchmarks.table import DOCS, write_table
from shardtune.core.files.yaml_document import dump_document
from shardtune.launch.torch_env import torch_environment

STEPS = 2
POLL = 0.05  # seconds between two looks at the metrics
CACHES = {
    "XDG_CACHE_HOME": "cache",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}
"""Environment variables of the caches that a first run finds empty, each with a folder's name."""
WANTED = {"cold": 40.0, "warm": 15.0}
"""Seconds that we want on an H200 with Llama-3.1-8B."""


def measure(case: Case, *, tiny: bool) -> dict[str, dict[str, Any]]:
    """Seconds to the first step of a cold and of a warm run, and what the run says of itself."""
    config = config_of(case, tiny=tiny)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = [sys.executable, "-m", "benchmarks.gpu_run", case.name]
        writer += ["--write", str(folder / "model"), *(["--tiny"] if tiny else [])]
        subprocess.run(writer, check=True)
        write_tokenizer(folder / "model", config.vocab_size)
        write_rows(folder / "rows.jsonl", batches(case, config.vocab_size, tiny=tiny), steps=STEPS)
        return {kind: _start(case, folder, kind, tiny=tiny) for kind in WANTED}


def _start(case: Case, folder: Path, kind: str, *, tiny: bool) -> dict[str, Any]:
    """One run, in a directory of its own."""
    job = train_job(case, folder, steps=STEPS, tiny=tiny)
    run = folder / f"run-{kind}"
    job["save"]["directory"] = str(run)
    file = folder / f"{kind}.yaml"
    file.write_text(dump_document(job), encoding="utf-8")
    caches = {name: str(folder / where) for name, where in CACHES.items()}
    log = folder / f"{kind}.log"
    with log.open("w", encoding="utf-8") as out:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "shardtune", "train", str(file)],
            env=os.environ | torch_environment(os.environ) | caches,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        first = None
        while process.poll() is None:
            if first is None and _steps(run / "metrics.jsonl"):
                first = time.perf_counter() - began
                print(f"{kind}: the first step is on the disk after {first:.1f} s", flush=True)
            time.sleep(POLL)
        whole = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"the {kind} run failed:\n{log.read_text(encoding='utf-8')[-2000:]}")
    steps = _steps(run / "metrics.jsonl")
    return {"first_step": whole if first is None else first, "whole": whole, "loss": steps[0]}


def _steps(file: Path) -> list[float]:
    """The losses of the steps that a run has written so far; a last line may be half there."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    return [line["loss"] for line in map(json.loads, lines) if line["kind"] == "step"]


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", choices=CASES, default="bf16 8x2048", help="(bf16 8x2048)")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="FOLDER", help="(docs)")
    parser.add_argument("--tiny", action="store_true", help="a toy on the CPU")
    options = parser.parse_args(given)
    if options.tiny and options.out == DOCS:
        parser.error("--tiny measures nothing worth a place in the docs: give --out")
    found = measure(CASES[options.row], tiny=options.tiny)
    rows = [
        [kind, f"{each['first_step']:.1f}", f"{WANTED[kind]:.0f}", f"{each['whole']:.1f}"]
        for kind, each in found.items()
    ]
    write_table(
        "startup",
        "From `shardtune train` to the first step",
        ["caches", "seconds to the first step", "wanted", f"seconds of a run of {STEPS} steps"],
        rows,
        f"The job of the row `{options.row}` of [gpu.md](gpu.md), with a job's defaults, on local "
        "files. *Cold* has empty caches of torch's compiler, of Triton and of ours; *warm* finds "
        "what the run before has left. A step counts when its metrics are on the disk, one step "
        "later than it is computed.",
        folder=options.out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
