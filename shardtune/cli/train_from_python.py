"""The launcher of `shardtune.train`: the command `train`, whose errors its caller reads.

python -m shardtune.cli.train_from_python PARENT ERRORS JOB [--resume | --overwrite]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from shardtune.cli.main import leave, parse
from shardtune.cli.train_command import start
from shardtune.compat.quiet import quiet_bitsandbytes
from shardtune.core.host.parent_death import die_with_parent
from shardtune.errors import ShardtuneError
from shardtune.launch import INTERRUPTED


def launch(parent: int, errors: Path, words: Sequence[str]) -> int:
    """Trains; what is wrong goes to the file `errors`. Returns the exit code."""
    die_with_parent(parent)
    quiet_bitsandbytes()
    try:
        return start(parse(["train", *words]))
    except ShardtuneError as error:
        problems = [asdict(problem) for problem in error.problems]
        told = {"error": type(error).__name__, "problems": problems}
        errors.write_text(json.dumps(told), encoding="utf-8")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    leave(launch(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
