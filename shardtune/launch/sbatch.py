"""An sbatch script for a job: short, and meant to be read and changed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtune.launch import SECRET

ATTEMPTS = 4


@dataclass(frozen=True)
class SlurmRequest:
    """What to ask Slurm for."""

    nodes: int
    gpus: int
    """Of each node, and so many ranks."""
    time: str = "24:00:00"
    partition: str | None = None
    account: str | None = None


def sbatch_script(job: Path, overrides: Sequence[str], run: Path, wanted: SlurmRequest) -> str:
    """The script. `run` is the job's run directory."""
    # A node's only task starts its ranks: as many as it has GPUs, whatever the job says.
    alone = wanted.gpus == 1
    lines = {
        "job-name": job.stem,
        "nodes": str(wanted.nodes),
        "ntasks-per-node": f"{wanted.gpus}  # a task {'starts' if alone else 'is'} a rank",
        "gpus-per-node": str(wanted.gpus),
        "exclusive": "",
        "time": wanted.time,
        "partition": wanted.partition,
        "account": wanted.account,
        "output": "%x-%j.log",
        "open-mode": "append  # a job that comes back goes on in its log",
        "signal": "TERM@120  # before the time is up, the step ends and a checkpoint is written",
        "requeue": "  # a preempted job comes back",
    }
    asked = [
        f"#SBATCH --{name}{'=' if text.strip() and text[0] != ' ' else ''}{text}"
        for name, text in lines.items()
        if text is not None
    ]
    given = [*overrides, "launch.processes=1"] if alone else overrides
    command = shlex.join(["shardtune", "train", str(job), *given])
    folder = shlex.quote(str(run))
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {job.name} on {wanted.nodes} nodes with {wanted.gpus} ranks each.",
            *asked,
            "",
            'cd "$SLURM_SUBMIT_DIR" || exit 2  # on storage that every node sees',
            f"run={folder}",
            "# Whoever doesn't know it can't join the ranks.",
            f"export {SECRET}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
            "",
            f"for attempt in {' '.join(map(str, range(1, ATTEMPTS + 1)))}; do",
            "    again=()",
            '    [ -e "$run/job.yaml" ] && again=(--resume)  # from its last checkpoint',
            f'    srun --kill-on-bad-exit=1 {command} "${{again[@]}}"',
            "    code=$?",
            "    # Done, a problem for a person, or stopped; anything else may pass.",
            "    case $code in 0 | 2 | 130 | 143) break ;; esac",
            "done",
            "",
            "# Stopped by SIGTERM, with a checkpoint: come back for the rest.",
            '[ $code -eq 143 ] && scontrol requeue "$SLURM_JOB_ID"',
            "exit $code",
            "",
        ]
    )
