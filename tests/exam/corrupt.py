"""Corrupts a checkpoint in a thousand ways: `python -m tests.exam.corrupt [--trials N]`.

Each must be refused before a weight of it is used, and the checkpoint before it must be taken.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path

from shardtune.checkpoint.digest import digest_tensors
from shardtune.checkpoint.latest import latest_checkpoint
from shardtune.checkpoint.reader import Reader
from shardtune.launch.process_group import JoinedWorld
from tests.checkpoint.together import save, state
from tests.exam.corruption import CORRUPTIONS


def refused(runs: Path, trial: int) -> bool:
    """Whether the damage of this trial was noticed, and the checkpoint before was used."""
    draw = random.Random(trial)
    folder = runs / "trial"
    shutil.rmtree(folder, ignore_errors=True)
    for step in (4, 5):
        shutil.copytree(runs / "ours" / f"step-{step:06d}", folder / f"step-{step:06d}")
    other = draw.choice([runs / "ours" / "step-000003", runs / "theirs" / "step-000005"])
    draw.choice(CORRUPTIONS)(draw, folder / "step-000005", other)
    found = latest_checkpoint(folder, "run", JoinedWorld())
    named = [path.name for path, why in found.passed_over if why]
    if named != ["step-000005"] or found.checkpoint is None:
        return False
    return digest_tensors(Reader(*found.checkpoint)) == digest_tensors(state(4))


def corrupt(trials: int) -> int:
    """How many of so many corruptions were refused."""
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        save(runs / "ours", 3, 4, 5)
        save(runs / "theirs", 5, run="another")
        return sum(refused(runs, trial) for trial in range(trials))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=1000)
    trials = parser.parse_args().trials
    good = corrupt(trials)
    print(f"{good} of {trials} corruptions refused, each with the checkpoint before it in use")
    return int(good < trials)


if __name__ == "__main__":
    sys.exit(main())
