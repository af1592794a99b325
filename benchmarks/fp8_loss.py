"""What FP8 frozen weights cost in loss: jobs in bf16 and with `quantization: fp8`.

    python -m benchmarks.fp8_loss job.yaml other.yaml
    python -m benchmarks.fp8_loss --runs BF16 FP8 BF16 FP8

Ordinary runs of `shardtune train`, the two of a job on the same data in the same order; `--runs`
compares run directories that are there already, in pairs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from benchmarks.table import DOCS, write_table

LIMIT = 0.005
LAST = 20  # steps at the end that are looked at by themselves
HEADINGS = (
    "model", "data", "machine", "steps", "loss in bf16", "in fp8", "difference",
    f"of the last {LAST} steps",
)  # fmt: skip


def train(job: Path, stored: str, steps: int, folder: Path) -> Path:
    words = [f"model.quantization={stored}", f"train.steps={steps}", f"save.directory={folder}"]
    command = [sys.executable, "-m", "shardtune", "train", str(job), *words, "--overwrite"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [each for each in map(json.loads, lines) if each["kind"] == "step"]


def pairs(options: argparse.Namespace, folder: Path) -> Iterator[tuple[Path, Path]]:
    """Run directories: bf16, and 8 bits."""
    yield from zip(options.runs[::2], options.runs[1::2], strict=True)
    for number, job in enumerate(options.jobs):
        both = [
            train(job, stored, options.steps, folder / f"{stored}_{number}")
            for stored in ("none", "fp8")
        ]
        yield both[0], both[1]


def machine_of(run: Path) -> str:
    """On which the 8-bit numbers were multiplied; a CPU does so as wider ones."""
    file = run / "environment.json"
    gpus = json.loads(file.read_text(encoding="utf-8"))["gpus"] if file.exists() else []
    return gpus[0] if gpus else "CPU"


def compared(wide: Path, small: Path) -> tuple[list[str], float]:
    """A row of the table, and how much more the loss is as a share."""
    both = [steps_of(run) for run in (wide, small)]
    samples = [[step["samples_sha256"] for step in each] for each in both]
    if samples[0] != samples[1]:
        raise SystemExit("the two runs were not trained on the same samples")
    exact, rounded = ([step["loss"] for step in each] for each in both)
    job = yaml.safe_load((wide / "job.yaml").read_text(encoding="utf-8"))
    more = mean(rounded) / mean(exact) - 1
    last = mean(rounded[-LAST:]) / mean(exact[-LAST:]) - 1
    sources = " + ".join(Path(source["path"]).stem for source in job["data"]["train"])
    names = Path(job["model"]["name"]).name, sources, machine_of(small)
    losses = [f"{mean(each):.4f}" for each in (exact, rounded)]
    return [*names, str(len(exact)), *losses, f"{more:+.2%}", f"{last:+.2%}"], more


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("jobs", nargs="*", type=Path, help="with an adapter, under ddp")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", type=Path, nargs="+", default=[], metavar="DIRECTORY")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="FOLDER", help="(docs)")
    options = parser.parse_args(given)
    if not options.runs and not options.jobs:
        parser.error("name a job, or two runs")
    if len(options.runs) % 2:
        parser.error("runs come in pairs: bf16, and 8 bits")
    with tempfile.TemporaryDirectory() as folder:
        found = [compared(*pair) for pair in pairs(options, Path(folder))]
    write_table(
        "fp8_loss",
        "What FP8 frozen weights cost in loss",
        HEADINGS,
        [row for row, _ in found],
        "Means over all steps, and over the last ones. With an adapter, on the same samples in the "
        f"same order. More than {LIMIT:.1%} is more than we want.",
        folder=options.out,
    )
    return int(any(more > LIMIT for _, more in found))


if __name__ == "__main__":
    sys.exit(main())
