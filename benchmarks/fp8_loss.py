"""What 8-bit frozen weights cost in loss: a job in bf16 and once more with `precision: fp8-base`.

    python -m benchmarks.fp8_loss job.yaml
    python -m benchmarks.fp8_loss --runs BF16 FP8

Two ordinary runs of `shardtune train`, on the same data in the same order; `--runs` compares two
run directories that are there already.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.table import write_table

LIMIT = 0.005
LAST = 20  # steps at the end that are looked at by themselves


def train(job: str, precision: str, steps: int, folder: Path) -> Path:
    words = [f"train.precision={precision}", f"train.steps={steps}", f"save.directory={folder}"]
    command = [sys.executable, "-m", "shardtune", "train", job, *words, "--overwrite"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [each for each in map(json.loads, lines) if each["kind"] == "step"]


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("job", nargs="?", help="with an adapter, under ddp")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", type=Path, nargs=2, metavar=("BF16", "FP8"))
    options = parser.parse_args(given)
    if not options.runs and not options.job:
        parser.error("name a job, or two runs")
    with tempfile.TemporaryDirectory() as folder:
        wide, small = options.runs or (
            train(options.job, precision, options.steps, Path(folder) / precision)
            for precision in ("bf16", "fp8-base")
        )
        both = [steps_of(run) for run in (wide, small)]
        samples = [[step["samples_sha256"] for step in each] for each in both]
        if samples[0] != samples[1]:
            raise SystemExit("the two runs were not trained on the same samples")
        exact, rounded = ([step["loss"] for step in each] for each in both)
        job = (wide / "job.yaml").read_text(encoding="utf-8")
    name = next(line.split()[-1] for line in job.splitlines() if line.strip().startswith("name:"))
    rows = [
        [kind, f"{mean(each):.4f}", f"{mean(each[-LAST:]):.4f}", f"{each[-1]:.4f}"]
        for kind, each in (("bf16", exact), ("fp8-base", rounded))
    ]
    more = mean(rounded) / mean(exact) - 1
    write_table(
        "fp8_loss",
        "What 8-bit frozen weights cost in loss",
        ["", "mean loss", f"of the last {LAST} steps", "of the last"],
        rows,
        f"{len(exact)} steps of {Path(name).name}, with an adapter, on the same samples in "
        f"the same order: {100 * more:+.2f} % of loss on average. More than {100 * LIMIT} % is a "
        "failure.",
    )
    return int(more > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
