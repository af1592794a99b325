"""Job files for tests, one section a line, so that each test knows where it wrote what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardtune.config.job import Job
from shardtune.core.runs.run_environment import RunEnvironment

SECTIONS = {
    "model": "{name: tiny}",
    "adapter": "{type: none}",
    "data": "{train: [{path: good.jsonl, format: completion}], sequence_length: 64}",
    "train": "{steps: 2, global_batch: 2}",
    "launch": "{processes: 1}",
    "save": "{directory: runs/bad}",
}
LINE = {name: number for number, name in enumerate(SECTIONS, 1)}
"""Where a section stands in `job_text`."""


def job_text(**sections: str) -> str:
    """A good job, but for the sections given; others follow in the order of their names."""
    return "".join(f"{name}: {text}\n" for name, text in (SECTIONS | sections).items())


def write_job(folder: Path, **sections: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(job_text(**sections), encoding="utf-8")
    return path


def make_job(**sections: dict[str, Any]) -> Job:
    """The smallest job, with these sections; `data` may be left out."""
    data = {"train": [{"path": "a.jsonl", "format": "completion"}]} | sections.pop("data", {})
    return Job.model_validate_json(json.dumps({"model": {"name": "tiny"}, "data": data} | sections))


ENVIRONMENT = """\
{"shardtune": "0.1.0", "python": "3.11", "platform": "Linux", "run": "0123456789abcdef", "data": {}}
"""
"""By which, beside its job, a run of an earlier version is known."""


def make_environment(run: str = "a" * 16) -> RunEnvironment:
    """What a run directory is told about where its run was made."""
    return RunEnvironment(
        shardtune="0",
        python="3",
        packages={},
        platform="Linux",
        cores=1,
        gpus=(),
        ranks=1,
        git=None,
        run=run,
        data={},
    )
