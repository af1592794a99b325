"""The commands that look before a run: estimate, plan, bench and slurm."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardtune.config.auto import ResolvedJob
    from shardtune.config.job import Job
    from shardtune.config.job_file import LoadedJob
    from shardtune.core.model.shape import ModelShape
    from shardtune.core.yaml_document import KeyPath
    from shardtune.plan.cluster import Cluster
    from shardtune.plan.forecast import Forecast


def estimate(arguments: argparse.Namespace) -> int:
    """One job on one cluster. Exit code 1 if it doesn't fit."""
    from shardtune.config.rules import check
    from shardtune.plan.forecast import forecast
    from shardtune.plan.this_machine import offer, shortage

    loaded, resolved, shape, cluster = _given(arguments)
    job = _spread(resolved, shape, cluster)
    check(job, _place(loaded))
    found = forecast(job, shape, cluster)
    summary = found.summary()
    if not found.fits:
        summary["reasons"] += [shortage(found), offer(found.job, shape, cluster)]
    if arguments.dry_run:
        summary["dry_run"] = _dry_run(found)
    if arguments.json:
        print(json.dumps(summary, indent=2))
        return int(not found.fits)
    from rich.console import Console

    from shardtune.report.plan_table import print_dry_run, print_forecast

    console = Console()
    print_forecast(found, console)
    if arguments.dry_run:
        print_dry_run(summary["dry_run"], console)
    if not found.fits:
        print(f"{shortage(found)}\n    fix: {offer(found.job, shape, cluster)}", file=sys.stderr)
    return int(not found.fits)


def _dry_run(found: Forecast) -> dict[str, Any]:
    """One rank's steps on tensors without memory, beside the closed form of the same.

    Operations run on their own there: what a compiler would make of them can't be seen.
    """
    from shardtune.measure.dry_run import dry_run
    from shardtune.models.builder import MetaModelBuilder
    from shardtune.models.load import config_from
    from shardtune.plan.forecast import GIB, forecast
    from shardtune.plan.model_config import config_of
    from shardtune.training.engine_setup import make_plan

    train = found.job.train.model_copy(update={"kernels": "eager"})
    job = found.job.model_copy(update={"train": train})
    closed = forecast(job, found.shape, found.cluster)
    setup = make_plan(job, found.mesh.size, job.train.steps or job.train.warmup_steps + 1).setup
    seen = dry_run(
        MetaModelBuilder.of(config_from(config_of(job.model)), job.model, job.adapter, train),
        job.strategy,
        setup,
        ranks=found.mesh.size,
        rows=closed.work.micro_batch,
        length=closed.work.sequence,
        microbatches=closed.work.microbatches,
        vocabulary=found.shape.vocab,
    )
    return {
        "kernels": "eager",
        "allocated_gib": seen.peak / GIB,
        "moment": seen.moment,
        "gpu_gib": {name: size / GIB for name, size in seen.classes.items()},
        "closed_form_gib": closed.memory.allocated / GIB,
        "difference": closed.memory.allocated / seen.peak - 1,
    }


def plan(arguments: argparse.Namespace) -> int:
    """Every strategy on one cluster, the best first. Exit code 1 if none fits."""
    from shardtune.config.rules import check
    from shardtune.plan.search import rank
    from shardtune.plan.this_machine import offer

    loaded, resolved, shape, cluster = _given(arguments)
    ranking = rank(resolved.job, shape, cluster, arguments.minimise)
    if not any(each.found for each in ranking.candidates):  # it isn't memory that is lacking
        check(_spread(resolved, shape, cluster), _place(loaded))
    best = ranking.best
    fix = "" if best else offer(_spread(resolved, shape, cluster), shape, cluster)
    if arguments.json:
        print(json.dumps(_summary(ranking, fix), indent=2))
    else:
        from rich.console import Console

        from shardtune.report.plan_table import print_ranking

        print_ranking(ranking, Console())
    if best is None or best.found is None:
        print(f"nothing fits on {cluster.name}\n    fix: {fix}", file=sys.stderr)
        return 1
    if arguments.write is not None:
        _write(arguments.write, best.found)
        print(f"wrote {arguments.write}: {best.name}", file=sys.stderr)
    return 0


def _write(target: Path, found: Forecast) -> None:
    """The job as a file: there `launch.processes` counts those of one node."""
    from shardtune.config.job import LocalLaunch
    from shardtune.core.yaml_document import dump_document
    from shardtune.errors import JobError, Problem

    job = found.job
    if isinstance(job.launch, LocalLaunch):
        launch = job.launch.with_processes(found.cluster.gpus_per_node)
        job = job.model_copy(update={"launch": launch})
    try:
        target.write_text(dump_document(job.model_dump(mode="json")), encoding="utf-8")
    except OSError as error:
        fact = f"{target} can't be written: {error.strerror}"
        raise JobError(Problem("--write", fact, "name a file in a folder that is there")) from None


def _summary(ranking: Any, fix: str) -> dict[str, Any]:
    best = ranking.best
    return {
        "best": None if best is None else {"name": best.name, **best.found.summary()},
        "fix": fix or None,
        "candidates": [
            {
                "name": each.name,
                "fits": each.fits,
                "why": each.why,
                "step_seconds": each.found.speed.step.total if each.found else None,
                "gpu_gib": each.found.memory.required / 2**30 if each.found else None,
                "cost": each.found.cost if each.found else None,
                "micro_batch": each.found.work.micro_batch if each.found else None,
                "gradient_checkpointing": each.found.work.checkpointing if each.found else None,
                "keep_layers": each.found.work.kept_layers if each.found else None,
            }
            for each in ranking.candidates
        ],
    }


def _given(
    arguments: argparse.Namespace,
) -> tuple[LoadedJob, ResolvedJob, ModelShape, Cluster]:
    """The job, and as it would run on GPUs, its model's shape, and the cluster. Nothing is
    opened."""
    from dataclasses import replace

    from shardtune.config.auto import resolve
    from shardtune.config.job_file import load_job
    from shardtune.core.machine import Machine
    from shardtune.errors import JobError, Problem
    from shardtune.plan.cluster import parse_cluster
    from shardtune.plan.model_config import shape_of

    cluster = parse_cluster(arguments.cluster)
    if arguments.price is not None:
        if not 0 <= arguments.price < math.inf:
            fact = f"is {arguments.price:g}"
            raise JobError(Problem("--price", fact, "give what a GPU costs for an hour"))
        cluster = replace(cluster, price_per_gpu_hour=arguments.price)
    loaded = load_job(arguments.job, arguments.overrides)
    machine = Machine(cores=16 * cluster.gpus_per_node, gpus=cluster.gpus)
    resolved = resolve(loaded.job, machine, cluster.gpus, nodes=cluster.nodes)
    return loaded, resolved, shape_of(resolved.job.model), cluster


def _place(loaded: LoadedJob) -> Callable[[KeyPath], str]:
    """Where to look for a value: how many ranks there are is said by the cluster."""
    return lambda path: "--cluster" if path[0] == "launch" else loaded.place(path)


def _spread(resolved: ResolvedJob, shape: ModelShape, cluster: Cluster) -> Job:
    """The job with the strategy that it asks for; `auto` is the best, or DDP where nothing fits.
    Likewise with its micro-batch and what it computes again."""
    from shardtune.parallel import DDP, AutoStrategy
    from shardtune.plan.memory_budget import within_memory
    from shardtune.plan.search import rank

    job = resolved.job
    if not isinstance(job.strategy, AutoStrategy):
        return within_memory(resolved, shape, cluster).job
    best = rank(job, shape, cluster).best
    if best is not None and best.found is not None:
        return best.found.job
    return job.model_copy(update={"strategy": DDP()})


def bench(arguments: argparse.Namespace) -> int:
    """Measures this machine; started without ranks, it starts them."""
    from shardtune.core.machine import Machine
    from shardtune.core.world import outside_ranks
    from shardtune.plan.this_machine import profile_path

    target: Path = arguments.out or profile_path()
    if outside_ranks() is None:
        import tempfile

        from shardtune.launch.supervisor import run_local

        machine = Machine.here()
        processes = (
            arguments.processes or max(1, machine.gpus)
            if machine.gpus
            else (arguments.processes or min(2, machine.cores))
        )
        with tempfile.TemporaryDirectory() as logs:
            return run_local(
                ["-m", "shardtune", "bench", "--out", str(target)],
                processes=processes,
                threads=max(1, machine.cores // processes),
                logs=Path(logs),
            )
    return _bench_as_rank(target)


def _bench_as_rank(target: Path) -> int:
    import os

    from rich.console import Console

    from shardtune.core.yaml_document import dump_document
    from shardtune.launch.error_file import leaving_last_words
    from shardtune.launch.process_group import join
    from shardtune.measure.bench import bench as measure
    from shardtune.report.bench_table import draw_bench, print_bench

    with leaving_last_words(), join(int(os.environ.get("OMP_NUM_THREADS", 1))) as world:
        target.parent.mkdir(parents=True, exist_ok=True)
        profile = measure(world, target.parent, lambda text: print(f"measuring {text}", flush=True))
        if world.is_main:
            print_bench(profile, Console())
            target.write_text(dump_document(profile.model_dump(mode="json")), encoding="utf-8")
            if profile.measured.collectives:
                draw_bench(profile, target.with_suffix(".svg"))
            print(f"wrote {target}; `shardtune plan JOB --cluster {target}` uses it")
    return 0


def slurm(arguments: argparse.Namespace) -> int:
    """Prints an sbatch script. The job is checked here as far as it can be: for so many ranks."""
    from shardtune.config.auto import resolve
    from shardtune.config.job_file import load_job
    from shardtune.config.rules import check
    from shardtune.core.machine import Machine
    from shardtune.errors import JobError, Problem
    from shardtune.launch.sbatch import Wanted, sbatch_script

    counts = {"--nodes": arguments.nodes, "--gpus": arguments.gpus}
    wrong = [
        Problem(name, f"is {count}", "give at least 1")
        for name, count in counts.items()
        if count < 1
    ]
    names = {"--partition": arguments.partition, "--account": arguments.account}
    wrong += [
        Problem(option, f"is {name!r}", "give a name without spaces")
        for option, name in names.items()
        if name is not None and not re.fullmatch(r"\S+", name)
    ]
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", arguments.time):
        wrong.append(
            Problem("--time", f"is {arguments.time!r}", "write 24:00:00, or 2-00:00:00 for days")
        )
    if wrong:
        raise JobError(wrong)
    loaded = load_job(arguments.job, arguments.overrides)
    ranks = arguments.nodes * arguments.gpus
    machine = Machine(cores=16 * arguments.gpus, gpus=arguments.gpus)
    job = resolve(loaded.job, machine, ranks, nodes=arguments.nodes).job
    check(job, loaded.place)
    wanted = Wanted(
        arguments.nodes, arguments.gpus, arguments.time, arguments.partition, arguments.account
    )
    print(
        sbatch_script(arguments.job, arguments.overrides, Path(job.save.directory), wanted), end=""
    )
    return 0
