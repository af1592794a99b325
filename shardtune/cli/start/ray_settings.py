"""What has to be settled before Ray is imported: may this job go there, and how Ray behaves."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from shardtune.cli.start.run_claim import claim_directory
from shardtune.errors import JobError, Problem

if TYPE_CHECKING:
    from shardtune.config.job import RayLaunch
    from shardtune.config.job_file import LoadedJob
    from shardtune.launch.node import Node


def start_with_ray(
    arguments: argparse.Namespace, loaded: LoadedJob, launch: RayLaunch, node: Node | None
) -> int:
    """A job for Ray, if it can be run here."""
    if find_spec("ray") is None:
        place = loaded.place(("launch", "type"))
        raise JobError(Problem(place, "ray is not installed", "pip install 'shardtune[ray]'"))
    if arguments.profile:
        fact = "ranks that Ray starts take no profile"
        raise JobError(Problem("--profile", fact, "set launch.type: local"))
    if node is not None:
        fact = "a job with `launch: {type: ray}` runs on the nodes that Ray has"
        raise JobError(Problem("--nodes", fact, "leave it out, or set launch.type: local"))
    # Ray reads these when it is imported. Nothing is sent home; a Ray of our own listens on the
    # loopback address only.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if launch.address is None:
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")  # on a busy machine
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    from shardtune.cli.start.train_on_ray import start_on_ray

    return start_on_ray(arguments, loaded, claim_directory(arguments, loaded))
