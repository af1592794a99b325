"""Ludwig's `backend:` section, taken as it is: another spelling of `launch` and `strategy`."""

from __future__ import annotations

from collections.abc import Mapping

from shardtune.config.job import Job, LocalLaunch, RayLaunch
from shardtune.core.files.yaml_document import KeyPath
from shardtune.errors import JobError, Problem

_TRAINER: KeyPath = ("backend", "trainer")
_MEANS: dict[KeyPath, KeyPath] = {
    ("backend",): ("launch",),
    ("backend", "type"): ("launch", "type"),
    (*_TRAINER, "use_gpu"): ("launch", "use_gpu"),
    (*_TRAINER, "resources_per_worker"): ("launch", "resources_per_worker"),
    (*_TRAINER, "strategy"): ("strategy",),
}
"""Which key means which. `num_workers` depends on where they run."""


def translated(job: Job, origins: Mapping[KeyPath, str]) -> tuple[Job, dict[KeyPath, str]]:
    """The job without `backend`, and where its values were written; JobError if it says a thing
    twice."""
    backend = job.backend
    if backend is None:
        return job, dict(origins)
    trainer = backend.trainer
    given = {"launch": True, "strategy": trainer.strategy is not None}
    twice = [name for name, there in given.items() if there and name in job.model_fields_set]
    on_ray = backend.type == "ray"
    only_ray = {"use_gpu", "resources_per_worker"} & trainer.model_fields_set
    problems = [
        Problem(
            origins.get(("backend",), ""),
            f"`backend` and `{name}` both say how the job runs",
            f"keep one of them: `{name}` is shardtune's own, `backend` Ludwig's",
        )
        for name in twice
    ] + [
        Problem(
            origins.get((*_TRAINER, name), ""),
            f"backend.trainer.{name} belongs to `type: ray`",
            "set backend.type: ray, or remove it",
        )
        for name in sorted(only_ray if not on_ray else ())
    ]
    if problems:
        raise JobError(problems)
    launch: LocalLaunch | RayLaunch = LocalLaunch(processes=trainer.num_workers)
    if on_ray:
        launch = RayLaunch(
            type="ray",
            workers=trainer.num_workers,
            use_gpu=trainer.use_gpu,
            resources_per_worker=trainer.resources_per_worker,
        )
    strategy = trainer.strategy or job.strategy
    job = job.model_copy(update={"backend": None, "launch": launch, "strategy": strategy})
    workers: KeyPath = ("launch", "workers" if on_ray else "processes")
    return job, _moved(origins, _MEANS | {(*_TRAINER, "num_workers"): workers})


def _moved(origins: Mapping[KeyPath, str], means: Mapping[KeyPath, KeyPath]) -> dict[KeyPath, str]:
    """Each value's place, under the key that it has now."""
    found: dict[KeyPath, str] = {}
    for path, place in origins.items():
        longest = max((old for old in means if path[: len(old)] == old), key=len, default=None)
        if longest is None:
            found[path] = place
        elif longest != ("backend",) or path == ("backend",):
            now: KeyPath = (*means[longest], *path[len(longest) :])
            found[now] = place
    return found
