"""`launch` and `backend`: where the ranks are started."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Tag

from shardtune.config.sections.field_types import (
    Auto,
    NotNegative,
    NotNegativeNumber,
    Positive,
    unless_said,
)
from shardtune.core.job_section import Section
from shardtune.parallel import Strategy, spelt_out


class LocalLaunch(Section):
    """Start the processes on this machine."""

    type: Literal["local"] = "local"
    processes: Auto | Positive = "auto"
    """One per GPU; `auto` counts them, and starts one process where there is none."""
    threads: Auto | Positive = "auto"
    """Threads a process may use; `auto` takes OMP_NUM_THREADS where the environment has it, and
    else divides the cores among the processes."""
    restarts: NotNegative = 3
    """How often the run restarts from its last checkpoint after a process died or hung. At the
    third failure in the same step it ends in any case."""
    patience: Annotated[float, Field(ge=1)] = 4.0
    """Seconds without a heartbeat inside a step (or 2.5 median steps, if that is more) after which
    a process counts as hung. The first step, compiling, evaluating and saving may take longer."""
    grace: Annotated[float, Field(gt=0)] = 30.0
    """Seconds after SIGTERM in which the step has to end and its checkpoint to be written; then the
    processes are killed."""
    rejoin: Annotated[float, Field(ge=0)] = 600.0
    """On several nodes: seconds that one may be missing, at the start or after it was lost, before
    the others give up."""

    def with_processes(self, count: int) -> LocalLaunch:
        return self.model_copy(update={"processes": count})


class RayLaunch(Section):
    """Run on Ray's workers: on a Ray that is started for this run, or on a running cluster.

    `save.directory` has to be on storage that all workers share."""

    type: Literal["ray"]
    workers: Auto | Positive = "auto"
    """Ranks; `auto` takes one for each GPU of the cluster."""
    use_gpu: Auto | bool = "auto"
    """Whether each worker gets a GPU; `auto` gives one where the cluster has any."""
    resources_per_worker: dict[str, NotNegativeNumber] = Field(default_factory=dict)
    """What else a worker is given, as Ray counts it: `{CPU: 4}`."""
    address: str | None = None
    """Address of a running Ray: `auto` finds it, `ray://HOST:10001` connects to another machine.
    Null starts one on this machine and stops it afterwards."""
    max_failures: NotNegative = 3
    """How often the run restarts from its last checkpoint after workers died."""
    dashboard: bool = False
    """Whether a Ray that is started here serves its dashboard, on the loopback address."""
    storage: str | None = None
    """Where the run directory is copied at the end, result and checkpoints with it: any path that
    fsspec understands, such as `s3://bucket/run`."""
    threads: Auto | Positive = "auto"
    """Threads a worker may use; `auto` takes its CPUs."""

    @property
    def processes(self) -> Auto | int:
        """Ranks, by the name that they have under `type: local`."""
        return self.workers

    def with_processes(self, count: int) -> RayLaunch:
        return self.model_copy(update={"workers": count})


Launch = Annotated[
    Annotated[LocalLaunch, Tag("local")] | Annotated[RayLaunch, Tag("ray")], unless_said("local")
]


class BackendTrainer(Section):
    """How Ludwig's trainer is distributed."""

    use_gpu: Auto | bool = "auto"
    """As `launch.use_gpu`."""
    num_workers: Auto | Positive = "auto"
    """As `launch.workers`."""
    resources_per_worker: dict[str, NotNegativeNumber] = Field(default_factory=dict)
    """As `launch.resources_per_worker`."""
    strategy: Annotated[Strategy | None, BeforeValidator(spelt_out)] = None
    """As the section `strategy`."""


class Backend(Section):
    """Ludwig's `backend` section: another way to write `launch` and `strategy`."""

    type: Literal["ray", "local"]
    """As `launch.type`."""
    trainer: BackendTrainer = BackendTrainer()
    """What runs there."""
