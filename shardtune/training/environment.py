"""With what a run was made: versions, machine, git revision."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata

from shardtune.core.host.machine import Machine
from shardtune.core.runs.run_environment import GitRevision, RunEnvironment
from shardtune.core.world import World

_PACKAGES = ("torch", "transformers", "peft", "datasets", "tokenizers", "safetensors", "pydantic")


def describe_environment(world: World, run: str, data: Mapping[str, str]) -> RunEnvironment:
    """The facts of `environment.json`: those of this machine, of the run and of its data sets."""
    import torch

    from shardtune import __version__

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return RunEnvironment(
        shardtune=__version__,
        python=platform.python_version(),
        packages={name: metadata.version(name) for name in _PACKAGES},
        platform=platform.platform(),
        cores=Machine.here().cores,
        gpus=tuple(devices),
        ranks=world.size,
        git=_git_revision(),
        run=run,
        data=dict(data),
    )


def _git_revision() -> GitRevision | None:
    """The revision of the folder that the run was started in, if it is a git checkout."""
    revision = _git("rev-parse", "HEAD")
    if not revision:
        return None
    return GitRevision(revision=revision, changed=bool(_git("status", "--porcelain")))


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments],  # noqa: S607 - whichever git the person uses
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
