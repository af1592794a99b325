"""`shardtune plan` and `shardtune estimate`: what a job would take on a cluster."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.cli.arguments import Commands, add_command, add_job, add_json
from shardtune.cli.say import say
from shardtune.cli.states_tables import add_states_options, asked_tables, print_states_tables

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardtune.config.job import Job
    from shardtune.config.job_file import LoadedJob
    from shardtune.core.files.yaml_document import KeyPath
    from shardtune.core.model.shape import ModelShape
    from shardtune.plan.cluster import Cluster
    from shardtune.plan.forecast import Forecast
    from shardtune.plan.forecast_summary import ChosenValue, DryRunSummary, EstimateResult


EXAMPLE = "8xA100-80GB"
"""What a command without a cluster is offered where this machine has no GPU."""


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "plan",
        plan,
        "rank every strategy for a job on a cluster, with reasons",
        """\
  shardtune plan recipes/quickstart.yaml --cluster 4xA40
  shardtune plan recipes/fsdp_full.yaml --cluster 2x8xH100 --write best.yaml
  shardtune plan recipes/ddp_lora.yaml --cluster 2xA40 model.name=qwen3-8b""",
    )
    _add_cluster(command)
    command.add_argument(
        "--minimise",
        choices=("time", "cost", "memory"),
        default="time",
        help="what to rank by (time)",
    )
    command.add_argument("--write", type=Path, metavar="FILE", help="write the best job here")
    command.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw all strategies: a .svg, .png or .html file"
    )
    add_job(command)

    command = add_command(
        commands,
        "estimate",
        estimate,
        "forecast whether a job fits on a cluster, and its step time",
        """\
  shardtune estimate recipes/quickstart.yaml --cluster 1xRTX4090
  shardtune estimate recipes/zero3_full.yaml --cluster 8xH100-80GB --json
  shardtune estimate recipes/fsdp_full.yaml --cluster 4xA40 --dry-run""",
    )
    _add_cluster(command)
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="also run two steps on fake tensors, and count their bytes",
    )
    command.add_argument(
        "--sweep",
        nargs="+",
        metavar="KEY=VALUES",
        help="one forecast for each value: KEY=1,2,4 or KEY=512..65536, which doubles",
    )
    command.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the sweep: a .svg, .png or .html file"
    )
    add_states_options(command, "estimate")
    add_job(command, optional=True)


def _add_cluster(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--cluster",
        metavar="SPEC",
        help="[NODESx]GPUSxTYPE[:pcie|:nvlink][:display|:NGiB][@Gbps], as 2x8xA100-80GB@400Gbps, "
        "or a profile (this machine's GPUs, where it has some)",
    )
    command.add_argument("--price", type=float, metavar="P", help="price per GPU hour")
    add_json(command)


def estimate(arguments: argparse.Namespace) -> int:
    """One job on one cluster. Exit code 1 if it doesn't fit."""
    from shardtune.config.rules import check
    from shardtune.plan.forecast import forecast
    from shardtune.plan.on_cluster import chosen_precision, chosen_values, resolve_as_asked
    from shardtune.plan.this_machine import shortage

    if (option := asked_tables(arguments)) is not None:
        print_states_tables(option, getattr(arguments, option.key), _cluster(arguments))
        return 0
    if arguments.sweep or arguments.plot:
        return _sweep(arguments)
    loaded, shape, cluster = _given(arguments)
    resolved = resolve_as_asked(loaded.job, shape, cluster)
    check(resolved.job, _place(loaded))
    found = forecast(resolved.job, shape, cluster)
    chosen = chosen_values(loaded.job, resolved)
    seen = _dry_run(found) if arguments.dry_run else None
    fix = "" if found.fits else _offer(loaded, found.job, shape, cluster)
    if arguments.json:
        noted = replace(found, reasons=(*chosen_precision(resolved), *found.reasons))
        print(_result(noted, chosen, fix, seen).to_json(indent=2, ascii_only=True))
        return int(not found.fits)
    from rich.console import Console

    from shardtune.report.plan_table import print_chosen, print_dry_run, print_forecast

    console = Console()
    print_forecast(found, console)
    print_chosen(chosen, console)
    if seen is not None:
        print_dry_run(seen, console)
    if not found.fits:
        print(f"{shortage(found)}\n    fix: {fix}", file=sys.stderr)
    return int(not found.fits)


def _sweep(arguments: argparse.Namespace) -> int:
    """The job with every choice of the swept values. Exit code 1 if none of them fits."""
    from shardtune.config.job_file import load_job
    from shardtune.config.model_config import shape_of
    from shardtune.errors import JobError, Problem
    from shardtune.plan.sweep import SWEEP_OPTION, parse_sweep, sweep
    from shardtune.report.plan_plots import sweep_drawings
    from shardtune.report.plot_file import PLOT_OPTION, require_plot, write_plot
    from shardtune.report.sweep_table import print_sweep, sweep_summary

    if not arguments.sweep:
        fix = f"say over what to draw: {SWEEP_OPTION} data.sequence_length=512..8192"
        raise JobError(Problem(PLOT_OPTION, "one forecast is no picture", fix))
    if arguments.plot is not None:
        require_plot(arguments.plot)
    keys, (_, _, cluster) = parse_sweep(arguments.sweep), _given(arguments)

    def changed(words: list[str]) -> tuple[Job, ModelShape]:
        job = load_job(arguments.job, [*arguments.overrides, *words]).job
        return job, shape_of(job.model)

    swept = sweep(keys, changed, cluster)
    if arguments.json:
        print(sweep_summary(swept).to_json(indent=2, ascii_only=True))
    else:
        print_sweep(swept)
    if arguments.plot is not None:
        title = f"{arguments.job.name} on {cluster.name}"
        write_plot(arguments.plot, title, *sweep_drawings(swept))
        print(f"wrote {arguments.plot}", file=sys.stderr)
    return int(not any(each.found is not None and each.found.fits for each in swept.points))


def _result(
    found: Forecast, chosen: tuple[ChosenValue, ...], fix: str, seen: DryRunSummary | None
) -> EstimateResult:
    """The forecast; of what doesn't fit, also what is missing and the fix."""
    from shardtune.plan.forecast_summary import EstimateResult
    from shardtune.plan.this_machine import shortage

    figures = dict(found.summary())
    if not found.fits:
        figures["reasons"] = (*found.reasons, shortage(found), fix)
    if seen is not None:
        figures["dry_run"] = seen
    return EstimateResult(**figures, chosen=chosen)


def _dry_run(found: Forecast) -> DryRunSummary:
    """One rank's steps on fake tensors, beside the closed form of the same.

    Operations run on their own there: what a compiler would make of them can't be seen.
    """
    from shardtune.config.model_config import config_of
    from shardtune.core.units import GIB
    from shardtune.measure.dry_run import dry_run
    from shardtune.models.builder import MetaModelBuilder
    from shardtune.models.load import config_from
    from shardtune.plan.forecast import forecast
    from shardtune.plan.forecast_summary import DryRunSummary
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
        target=closed.work.target,
        microbatches=closed.work.microbatches,
        vocabulary=found.shape.vocab,
    )
    return DryRunSummary(
        kernels="eager",
        allocated_gib=seen.peak / GIB,
        moment=seen.moment,
        gpu_gib={name: size / GIB for name, size in seen.classes.items()},
        closed_form_gib=closed.memory.allocated / GIB,
        difference=closed.memory.allocated / seen.peak - 1,
    )


def plan(arguments: argparse.Namespace) -> int:
    """Every strategy on one cluster, the best first. Exit code 1 if none fits."""
    from shardtune.config.rules import check
    from shardtune.plan.forecast import forecast
    from shardtune.plan.on_cluster import (
        chosen_precision,
        planned_anew,
        resolve_as_asked,
        resolve_on,
    )
    from shardtune.plan.search import rank
    from shardtune.report.plan_plots import ranking_drawings
    from shardtune.report.plot_file import require_plot, write_plot

    if arguments.plot is not None:
        require_plot(arguments.plot)
    loaded, shape, cluster = _given(arguments)
    resolved = resolve_on(loaded.job, cluster)
    ranking = rank(resolved.job, shape, cluster, arguments.minimise)
    best, fix = ranking.best, ""
    notes = (*chosen_precision(resolved), *planned_anew(loaded, ranking))
    if best is None:
        as_asked = resolve_as_asked(loaded.job, shape, cluster).job
        if not any(each.found for each in ranking.candidates):  # it isn't memory that is lacking
            check(as_asked, _place(loaded))
            forecast(as_asked, shape, cluster)
        fix = _offer(loaded, as_asked, shape, cluster)
    if arguments.json:
        from shardtune.plan.ranking_summary import summarise

        result = summarise(ranking, fix, notes)
        print(result.to_json(indent=2, ascii_only=True))
    else:
        from rich.console import Console

        from shardtune.report.plan_table import print_ranking

        print_ranking(ranking, Console())
        for note in (*notes, *(best.found.reasons if best and best.found else ())):
            print(note)
    if arguments.plot is not None:
        title = f"{arguments.job.name} on {cluster.name}"
        write_plot(arguments.plot, title, *ranking_drawings(ranking))
        print(f"wrote {arguments.plot}", file=sys.stderr)
    if best is None or best.found is None:
        print(f"nothing fits on {cluster.name}\n    fix: {fix}", file=sys.stderr)
        return 1
    if arguments.write is not None:
        _write(arguments.write, best.found)
        print(f"wrote {arguments.write}: {best.name}", file=sys.stderr)
    return 0


def _write(target: Path, found: Forecast) -> None:
    from shardtune.core.files.atomic_write import atomic_write
    from shardtune.errors import JobError, Problem
    from shardtune.plan.ranking_summary import job_text

    if target.exists() and not _is_written_job(target):
        fact = f"{target} is there already, and isn't as `plan` writes jobs"
        raise JobError(Problem("--write", fact, "name a file that doesn't exist yet"))
    try:
        atomic_write(target.resolve(), job_text(found))
    except OSError as error:
        fact = f"{target} can't be written: {error.strerror}"
        raise JobError(Problem("--write", fact, "name a file in a folder that is there")) from None


def _is_written_job(path: Path) -> bool:
    """Whether nothing is lost with it: no comment, order or file of a person."""
    from shardtune.config.job_file import load_job
    from shardtune.core.files.regular_file import read_regular
    from shardtune.core.files.yaml_document import dump_document
    from shardtune.errors import ShardtuneError

    try:
        text = read_regular(path, 1 << 20).decode("utf-8")
        return dump_document(load_job(path, []).job.model_dump(mode="json")) == text
    except (OSError, ValueError, ShardtuneError):
        return False


def _given(arguments: argparse.Namespace) -> tuple[LoadedJob, ModelShape, Cluster]:
    """The job, its model's shape, and the cluster. Nothing is opened."""
    from shardtune.config.job_file import load_job
    from shardtune.config.model_config import shape_of

    if arguments.job is None:
        arguments.parser.error("the following arguments are required: JOB")
    cluster = _cluster(arguments)
    loaded = load_job(arguments.job, arguments.overrides)
    return loaded, shape_of(loaded.job.model), cluster


def _cluster(arguments: argparse.Namespace) -> Cluster:
    from shardtune.errors import JobError, Problem
    from shardtune.plan.cluster import parse_cluster

    cluster = _here(arguments) if arguments.cluster is None else parse_cluster(arguments.cluster)
    if arguments.price is not None:
        if not 0 <= arguments.price < math.inf:
            fact = f"is {arguments.price:g}"
            raise JobError(Problem("--price", fact, "give what a GPU costs for an hour"))
        cluster = replace(cluster, price_per_gpu_hour=arguments.price)
    return cluster


def _here(arguments: argparse.Namespace) -> Cluster:
    """This machine's GPUs, for a command that names no cluster."""
    from shardtune.core.host.machine import Machine
    from shardtune.errors import JobError, Problem
    from shardtune.plan.cluster import OPTION
    from shardtune.plan.this_machine import cluster_here

    machine = Machine.here()
    if machine.gpus:
        cluster = cluster_here(machine, machine.gpus)
        say(f"planned for this machine: {cluster.name}")
        return cluster
    fact = "no GPU is visible here, and --cluster doesn't name those to plan for"
    fix = f"add {OPTION} {EXAMPLE}, or the GPUs that you mean; `shardtune bench --out here.yaml` "
    raise JobError(Problem(arguments.parser.prog, fact, f"{fix}measures this machine for it"))


def _offer(loaded: LoadedJob, job: Job, shape: ModelShape, cluster: Cluster) -> str:
    """What fits, to be pasted behind the command."""
    from shardtune.plan.this_machine import offer

    written = loaded.job
    rows = written.strategy.micro_batch(written.train.global_batch, cluster.gpus)
    return offer(job, shape, cluster, written=written, rows_told=rows is not None)


def _place(loaded: LoadedJob) -> Callable[[KeyPath], str]:
    """Where to look for a value: how many ranks there are is said by the cluster."""
    return lambda path: "--cluster" if path[0] == "launch" else loaded.place(path)
