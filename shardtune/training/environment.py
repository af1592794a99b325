"""With what a run was made: versions, machine, git revision."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from typing import Any

from shardtune.core.machine import Machine
from shardtune.core.world import World

_PACKAGES = ("torch", "transformers", "peft", "datasets", "tokenizers", "safetensors", "pydantic")


def describe_environment(world: World) -> dict[str, Any]:
    """Plain facts for `environment.json`. No environment variables: they hold secrets."""
    import torch

    from shardtune import __version__

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "shardtune": __version__,
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "cores": Machine.here().cores,
        "gpus": devices,
        "ranks": world.size,
        "git": _git_revision(),
    }


def _git_revision() -> dict[str, Any] | None:
    """The revision of the folder that the run was started in, if it is a git checkout."""
    revision = _git("rev-parse", "HEAD")
    if not revision:
        return None
    return {"revision": revision, "changed": bool(_git("status", "--porcelain"))}


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
