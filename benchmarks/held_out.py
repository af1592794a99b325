"""How far the planner's times are off on a source that no constant was fitted to.

    python -m benchmarks.held_out [--reference ../shared/reference]

The constants of the A100 are fitted anew without one source, from a start that no source has
decided, and judged on it. Only the A100 has several sources with enough rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.calibration import FITTED, SHARED, fit_chip, fitting_cases
from benchmarks.cases import Case
from benchmarks.judging import (
    REFERENCE,
    SEVERAL,
    SINGLE,
    Constants,
    cluster_of,
    errors,
    halves,
    read_all,
)
from benchmarks.planner_accuracy import percent
from benchmarks.table import DOCS, table
from shardtune.plan.estimate.constants import beginning_of

CHIP = "A100"
LEFT_OUT = (SINGLE, SEVERAL, "mosaicml/llm-foundry A100 40GB")
START = {
    "launch": 20e-6, "start": 2e-6, "sharpness": 3.0, "joint_sharpness": 3.0, "straggling": 0.03,
    "unaligned": 0.5, "fused_passes": 1.3, "eager_passes": 1.0, "compiled_passes": 1.0,
}  # fmt: skip
CHIP_START = {"matmul": 0.9, "attention": 0.4, "memory": 0.8, "link": 0.9, "clash": 0.3}
"""Round values, near what data sheets and counting give."""


def start() -> Constants:
    known = Constants()
    time = replace(known.time, **{name: START[name] for name in SHARED})
    chip = replace(known.chips[CHIP], **CHIP_START)
    return replace(known, time=time, chips=known.chips | {CHIP: chip})


def without(source: str, fitting: Sequence[Case]) -> Constants:
    """Fitted on all of this GPU's sources but one."""
    timed = [c for c in fitting_cases(fitting) if c.metric != "memory" and c.source != source]
    mine = [case for case in timed if beginning_of(cluster_of(case).gpu.name) == CHIP]
    return fit_chip(mine, start(), CHIP, FITTED[CHIP], SHARED)


def report(cases: Sequence[Case]) -> str:
    fitting, judging = halves(cases)
    rows = []
    for source in LEFT_OUT:
        own = [case for case in judging if case.source == source and case.measured]
        blind = np.abs(errors(own, without(source, fitting)))
        known = np.abs(errors(own, Constants()))
        means = (percent(float(each.mean())) for each in (blind, known))
        rows.append([source, str(len(own)), *means])
    lines = [
        "# Times of a source that was left out",
        "",
        f"Made by `python -m benchmarks.held_out`. The constants of the {CHIP} are fitted without "
        "one source, from round values, and judged on that source; beside it the mean error with "
        "the constants of `shardtune/plan/estimate/constants.py`, which half of its rows had a say "
        "in.",
        "",
        *table(["left out", "measurements", "mean error", "with its other half fitted"], rows),
        "Without the single-node file nothing says how fast a host launches operations, how",
        "sharply it holds a GPU back, or what slices add to that: GPUs are the limit of most other",
        "runs.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference", type=Path, default=REFERENCE)
    cases, _ = read_all(parser.parse_args().reference)
    text = report(cases)
    print(text)
    (DOCS / "planner_held_out.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
