"""From `shardtune train` to ranks: what is looked at before any exists, and who starts them.

A command that is a rank already (under torchrun, in a Slurm step) only looks and trains. Any other
starts the ranks of this machine: alone, or together with the same command on other machines.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune import __version__
from shardtune.cli.arguments import Commands, add_command, add_job, add_nodes, count
from shardtune.cli.fault_page import leaving_page
from shardtune.core.world import World, outside_nodes, outside_ranks
from shardtune.errors import JobError, Problem, ShardtuneError
from shardtune.launch import LAUNCHER_PID, SECRET
from shardtune.launch.output_stream import guard_output
from shardtune.launch.slurm_env import slurm_step

if TYPE_CHECKING:
    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.config.auto import ResolvedJob
    from shardtune.config.job import Job, RayLaunch
    from shardtune.config.job_file import LoadedJob
    from shardtune.core.yaml_document import KeyPath
    from shardtune.launch.node import Node
    from shardtune.launch.peers import Launchers
    from shardtune.launch.process_group import StopSignals
    from shardtune.launch.restart_policy import RestartPolicy
    from shardtune.models.model_files import ModelFiles
    from shardtune.plan.forecast import Forecast
    from shardtune.plan.run_forecast import RunForecast
    from shardtune.train import Inputs


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "train",
        start,
        "train a job",
        """\
  shardtune train recipes/quickstart.yaml
  shardtune train recipes/quickstart.yaml train.steps=10 save.directory=runs/try
  shardtune train recipes/quickstart.yaml --resume
  shardtune train recipes/quickstart.yaml --resume train.steps=48
  shardtune train recipes/zero1.yaml --nodes 2 --node-rank 0 --head host:29400
  torchrun --nproc-per-node 2 -m shardtune train recipes/quickstart.yaml
  accelerate launch --multi_gpu -m shardtune train recipes/quickstart.yaml""",
    )
    add_job(command)
    add_nodes(command)
    again = command.add_mutually_exclusive_group()
    again.add_argument(
        "--resume", action="store_true", help="go on after the newest checkpoint of the run"
    )
    again.add_argument(
        "--overwrite", action="store_true", help="replace the run that is in save.directory"
    )
    command.add_argument(
        "--restart-schedule",
        action="store_true",
        help="with --resume: the learning rate's schedule begins anew",
    )
    command.add_argument(
        "--ignore-forecast", action="store_true", help="run even what is forecast not to fit"
    )
    command.add_argument(
        "--profile",
        type=count,
        metavar="N",
        help="profile N steps after warm-up on each rank, for `shardtune diagnose`",
    )
    shown = command.add_mutually_exclusive_group()
    shown.add_argument("--quiet", action="store_true", help="print warnings and errors only")
    shown.add_argument(
        "--json",
        action="store_true",
        help="print each line of metrics.jsonl as it is written, then the report, for programs",
    )


def read_job(arguments: argparse.Namespace) -> tuple[LoadedJob, ResolvedJob]:
    """The job, checked."""
    from shardtune.config.job_file import load_job

    loaded = load_job(arguments.job, arguments.overrides)
    return loaded, resolve_here(loaded)


def resolve_here(
    loaded: LoadedJob,
    *,
    runs_here: bool = False,
    nodes: int = 1,
    resume: bool = False,
    restart_schedule: bool = False,
) -> ResolvedJob:
    """The job with a value for each `auto`, checked; where it is to run here, against what this
    machine has, too. With `resume` it goes on as the run in its directory does."""
    from shardtune.checkpoint.extension import continued
    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.config.auto import resolve
    from shardtune.config.rules import check
    from shardtune.core.machine import Machine
    from shardtune.plan.this_machine import measured_here, planner_here

    job = loaded.job
    machine = measured_here() if job.train.precision == "auto" else Machine.here()
    nodes = max(nodes, outside_nodes())
    run = RunDir(Path(job.save.directory).expanduser())
    begun = run.read_job() if resume else None
    planner = planner_here(machine, nodes, begun)
    resolved = resolve(
        job,
        machine,
        outside_ranks(),
        nodes=nodes,
        planner=planner,
        begun=begun,
    )
    if resume:
        resolved = continued(resolved, run, restart_schedule=restart_schedule)
    check(resolved.job, loaded.place, machine if runs_here else None)
    return resolved


def start(arguments: argparse.Namespace) -> int:
    """The command `train`."""
    guard_output()
    _require_resume(arguments)
    node = this_node(arguments)
    if arguments.json and os.environ.get("RANK", "0") == "0" and LAUNCHER_PID not in os.environ:
        return _start_with_json(arguments, node)
    if outside_ranks() is not None:
        return _as_rank(arguments)
    return _start_ranks(arguments, node)


def _start_with_json(arguments: argparse.Namespace, node: Node | None) -> int:
    """Metrics on standard output, everything else on standard error."""
    from shardtune.cli.json_progress import printing_json
    from shardtune.config.job_file import load_job

    directory = load_job(arguments.job, arguments.overrides).job.save.directory
    with printing_json(Path(directory).expanduser()):
        arguments.quiet = True
        return _as_rank(arguments) if outside_ranks() is not None else _start_ranks(arguments, node)


def _start_ranks(arguments: argparse.Namespace, node: Node | None) -> int:
    """Starts the ranks of this machine."""
    from shardtune.config.job import RayLaunch
    from shardtune.config.job_file import load_job

    loaded = load_job(arguments.job, arguments.overrides)
    _mend(Path(loaded.job.save.directory).expanduser())
    if isinstance(loaded.job.launch, RayLaunch):
        return _start_on_ray(arguments, loaded, loaded.job.launch, node)
    nodes, first = node.count if node else 1, node is None or node.number == 0
    resolved = resolve_here(
        loaded,
        runs_here=True,
        nodes=nodes,
        resume=arguments.resume,
        restart_schedule=arguments.restart_schedule,
    )
    job = resolved.job
    run = _run_directory(arguments, loaded, job, first=first)
    predicted = _predicted(arguments, job, nodes)

    from shardtune.checkpoint.overwrite import overwriting
    from shardtune.core.machine import Machine
    from shardtune.core.yaml_document import dump_document
    from shardtune.launch.supervisor import run_local
    from shardtune.plan.run_forecast import RunForecast
    from shardtune.plan.this_machine import forecast_here
    from shardtune.report.summary import print_summary
    from shardtune.training.tracking import tracking

    with (
        _launchers(node, job) as launchers,
        _locked(run, first),
        tempfile.TemporaryDirectory() as temp,
        ExitStack() as until_the_end,
    ):
        with _telling(launchers):
            reasons = {**loaded.understood, **resolved.reasons}
            chosen = replace(resolved, reasons=reasons)
            said = first and not arguments.quiet
            inputs = _open(chosen, predicted if said else None, quiet=not said)
            if first:
                wanted = bool(arguments.overwrite)
                until_the_end.enter_context(overwriting(run, wanted=wanted, say=_say))
                run.prepare()
                run.write_forecast(RunForecast.of(predicted) if predicted is not None else None)
            _agree_on(launchers, job, inputs, run)
        # The ranks get the job as it was resolved and checked here: a file that is edited
        # meanwhile, or that lies in the directory that was just cleared, must not matter.
        checked = Path(temp) / arguments.job.name
        checked.write_text(dump_document(job.model_dump(mode="json")), encoding="utf-8")
        command = ["-m", "shardtune", "train", str(checked), *["--quiet"] * arguments.quiet]

        def again(halvings: int) -> list[str]:
            if halvings and first:  # another micro-batch takes another amount of memory
                found = forecast_here(_smaller(job, halvings), Machine.here(), nodes)
                run.write_forecast(RunForecast.of(found) if found is not None else None)
            change = [f"train.micro_batch={_smaller(job, halvings).train.micro_batch}"]
            return [*command, "--resume", *(change if halvings else [])]

        code = 0
        with (
            leaving_page(run, wanted=first, stopped=lambda: code > 0),
            tracking(job, run, wanted=first, say=_say) as trackers,
        ):
            code = run_local(
                [*command, *(["--resume"] * arguments.resume), *_profiling(arguments)],
                processes=int(job.launch.processes) // nodes,
                threads=int(job.launch.threads),
                logs=run.logs,
                policy=_policy(loaded.job, job, predicted, resume=arguments.resume),
                again=again,
                launchers=launchers,
            )
            trackers.hurried = code > 128  # whoever sent the signal wants the machine
    if said and (report := run.read_report()) is not None:
        print_summary(report)
    return code


def _profiling(arguments: argparse.Namespace) -> list[str]:
    """For the first attempt: another one is resumed after a fault, and has been profiled."""
    return ["--profile", str(arguments.profile)] if arguments.profile else []


def _start_on_ray(
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
    from shardtune.cli.train_on_ray import start_on_ray

    return start_on_ray(arguments, loaded, _run_directory(arguments, loaded))


def _open(resolved: ResolvedJob, predicted: Forecast | None, *, quiet: bool) -> Inputs:
    """Opens what the run reads, and prints what it will do."""
    from shardtune.report.plan_table import print_outlook
    from shardtune.report.start_summary import print_opening
    from shardtune.train import count_steps, open_inputs, open_loader
    from shardtune.training.engine_setup import make_plan

    job = resolved.job
    inputs = open_inputs(job, quiet=quiet)
    world = World(size=int(job.launch.processes))
    steps = count_steps(job, open_loader(job, inputs, world))
    make_plan(job, world.size, steps)
    if not quiet:
        sources = [each.report for each in (*inputs.data.train, *inputs.data.eval)]
        reasons = {**resolved.reasons, **_model_reasons(inputs.model)}
        print_opening(job, reasons, sources, notes=resolved.notes)
    if predicted is not None:
        print_outlook(predicted, steps)
    return inputs


def _policy(asked: Job, job: Job, predicted: Forecast | None, *, resume: bool) -> RestartPolicy:
    """What doesn't fit although the forecast chose it is halved unasked, as long as no step has
    been taken with it. `asked` is the job as it was written."""
    from shardtune.config.auto import memory_decides
    from shardtune.config.job import LocalLaunch
    from shardtune.core.machine import Machine
    from shardtune.launch.restart_policy import RestartPolicy

    launch, train = job.launch, job.train
    assert isinstance(launch, LocalLaunch)
    most = int(train.micro_batch).bit_length() - 1
    chosen = memory_decides(asked, Machine.here())
    return RestartPolicy(
        launch.restarts,
        launch.patience,
        launch.grace,
        halvings=most if train.on_oom == "reduce_micro_batch" else 0,
        halvings_at_start=most if chosen and predicted is not None and not resume else 0,
    )


def _smaller(job: Job, halvings: int) -> Job:
    """The job with a micro-batch that was halved so often."""
    rows = int(job.train.micro_batch) >> halvings
    return job.model_copy(update={"train": job.train.model_copy(update={"micro_batch": rows})})


def _model_reasons(model: ModelFiles) -> dict[KeyPath, str]:
    """What only the model's files tell about a value of the job."""
    if not model.section.add_tokens:
        return {}
    return {("model", "add_tokens"): str(model.growth)}


def _predicted(arguments: argparse.Namespace, job: Job, nodes: int) -> Forecast | None:
    """What the run will take here; refuses what doesn't fit, before anything is opened."""
    from shardtune.core.machine import Machine
    from shardtune.plan.this_machine import forecast_here, require_fit

    found = forecast_here(job, Machine.here(), nodes)
    if found is not None and not arguments.ignore_forecast:
        require_fit(found)
    return found


def _run_directory(
    arguments: argparse.Namespace, loaded: LoadedJob, job: Job | None = None, *, first: bool = True
) -> RunDir:
    """The run's directory, if it may be written to. Only the first node asks: another one may come
    back to a run that goes on. Whether it may go on is told by the resolved `job`."""
    from shardtune.checkpoint import run_guards as guards
    from shardtune.checkpoint.run_dir import RunDir

    run, place = RunDir(Path(loaded.job.save.directory).expanduser()), ("save", "directory")
    if not first:
        return run
    guards.require_folder(run, loaded.place(place))
    guards.require_plain(run, loaded.place(place))
    if arguments.resume:
        guards.require_run(run)
        if job is not None:
            guards.require_resumable(run, job)
        guards.require_run_id(run)
        if os.environ.get("RANK", "0") == "0":
            for note in guards.notes_on(run):
                _say(f"note: {note}")
        return run
    guards.require_safe_place(run, loaded.job, loaded.place(place))
    if arguments.overwrite:
        guards.require_overwritable(run, loaded.place(place))
    else:
        guards.require_unoccupied(run, loaded.place(place))
    return run


def _mend(directory: Path) -> None:
    """Ends an overwrite that was cut short, before anybody looks at the directory."""
    from shardtune.checkpoint.overwrite import is_unsettled, settle
    from shardtune.checkpoint.run_dir import RunDir

    run = RunDir(directory)
    if is_unsettled(run):
        with run.locked():
            if settle(run):
                _say(f"{directory}: an overwrite was cut short; the run that was there is back")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _require_resume(arguments: argparse.Namespace) -> None:
    """Refuses to begin a schedule anew in a run that only begins."""
    if arguments.restart_schedule and not arguments.resume:
        fact = "a run that begins has its schedule before it"
        raise JobError(Problem("--restart-schedule", fact, "give it with --resume"))


def _locked(run: RunDir, first: bool) -> AbstractContextManager[None]:
    return run.locked() if first else nullcontext()


# As a rank ---------------------------------------------------------------------------------------


def _as_rank(arguments: argparse.Namespace) -> int:
    """One of the processes that our launcher, torchrun or Slurm has started."""
    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.config.job_file import load_job
    from shardtune.core.parent_death import die_with_parent
    from shardtune.launch.accelerate_env import drop_plugins
    from shardtune.launch.error_file import reporting_errors

    if (launcher := os.environ.get(LAUNCHER_PID)) is not None:  # before anything that takes time
        die_with_parent(int(launcher))
    if (given := drop_plugins(os.environ)) and os.environ["RANK"] == "0":
        print(f"note: {', '.join(given)} of accelerate: not used; the job's strategy decides")
    with reporting_errors():
        loaded = load_job(arguments.job, arguments.overrides)
        if LAUNCHER_PID in os.environ:  # our launcher has resolved, checked, predicted and cleared
            job, clears = loaded.job, False
            predicted = RunDir(Path(job.save.directory).expanduser()).read_forecast()
        else:
            if os.environ["RANK"] == "0":
                _mend(Path(loaded.job.save.directory).expanduser())
            job = resolve_here(
                loaded,
                runs_here=True,
                resume=arguments.resume,
                restart_schedule=arguments.restart_schedule,
            ).job
            _run_directory(arguments, loaded, job)
            predicted = _predicted_by_rank_0(arguments, job)
            clears = arguments.overwrite  # only after all ranks have joined

        from shardtune.launch.process_group import StopSignals
        from shardtune.train import train

        stop_signals = StopSignals()
        with _alone(job), _leaving_page(job, stop_signals):
            train(
                job,
                resume=arguments.resume,
                overwrite=clears,
                predicted=predicted,
                stop_signals=stop_signals,
                quiet=arguments.quiet or arguments.json,
                tracks=LAUNCHER_PID not in os.environ,
                profile_steps=arguments.profile or 0,
            )
    return stop_signals.exit_code


def _predicted_by_rank_0(arguments: argparse.Namespace, job: Job) -> RunForecast | None:
    """The first rank refuses what doesn't fit, and writes down what was predicted."""
    from shardtune.plan.run_forecast import RunForecast

    if os.environ["RANK"] != "0":
        return None
    found = _predicted(arguments, job, outside_nodes())
    return RunForecast.of(found) if found is not None else None


def _alone(job: Job) -> AbstractContextManager[None]:
    """Keeps other runs out of the directory. Our own launcher does that for its ranks."""
    from shardtune.checkpoint.run_dir import RunDir

    if LAUNCHER_PID in os.environ or os.environ["RANK"] != "0":
        return nullcontext()
    return RunDir(Path(job.save.directory).expanduser()).locked()


def _leaving_page(job: Job, stop_signals: StopSignals) -> AbstractContextManager[None]:
    """A run without our launcher leaves its page itself, when it fails or is preempted."""
    from shardtune.checkpoint.run_dir import RunDir

    run = RunDir(Path(job.save.directory).expanduser())
    wanted = LAUNCHER_PID not in os.environ and os.environ["RANK"] == "0"
    return leaving_page(run, wanted=wanted, stopped=lambda: stop_signals.exit_code > 0)


# Several nodes -----------------------------------------------------------------------------------


def this_node(arguments: argparse.Namespace) -> Node | None:
    """Which of several nodes this is, as the command line or Slurm says; None on one machine. A
    task of Slurm that is a rank is told so as torchrun would."""
    told = {
        "--nodes": arguments.nodes, "--node-rank": arguments.node_rank, "--head": arguments.head
    }  # fmt: skip
    missing = [name for name, value in told.items() if value is None]
    if len(missing) < len(told):
        if missing:
            fact = "several nodes need --nodes, --node-rank and --head"
            raise JobError(Problem("command line", fact, f"add {' and '.join(missing)}"))
        return _node(arguments.nodes, arguments.node_rank, arguments.head, arguments.interface)
    step = None if outside_ranks() is not None else slurm_step(os.environ)
    if step is None:
        return None
    if step.is_launcher:
        head = f"{step.head}:{step.port}"
        return _node(step.nodes, step.node, head, arguments.interface)
    os.environ.update(step.rank_environment())
    return None


def _node(nodes: int, number: int, head: str, interface: str | None) -> Node:
    """Imports torch, for which a mistake in a job of one machine shouldn't wait."""
    from shardtune.launch.node import Node

    return Node.parse(nodes, number, head, interface)


@contextmanager
def _launchers(node: Node | None, job: Job) -> Iterator[Launchers | None]:
    """The launchers of the other nodes. They hear of us before we open anything: that may take
    long, and they shall know that we are there."""
    from shardtune.config.job import LocalLaunch

    if node is None:
        yield None
        return
    from shardtune.launch.multi_node import MultiNode

    assert isinstance(job.launch, LocalLaunch)
    if node.number == 0 and SECRET not in os.environ:
        _say(f"note: {SECRET} is not set: who reaches {node.head}:{node.port} can join this run")
    processes = int(job.launch.processes) // node.count
    yield MultiNode(node, processes, wait=job.launch.rejoin, say=_say)


@contextmanager
def _telling(launchers: Launchers | None) -> Iterator[None]:
    """What is wrong here ends the wait of the others."""
    from shardtune.launch.multi_node import MultiNode

    try:
        yield
    except ShardtuneError as error:
        if isinstance(launchers, MultiNode):
            launchers.announce_refusal(error.problems)
            launchers.close()
        raise


def _agree_on(launchers: Launchers | None, job: Job, inputs: Inputs, run: RunDir) -> None:
    """What has to be the same on all nodes."""
    import torch

    from shardtune.launch.multi_node import MultiNode

    if isinstance(launchers, MultiNode):
        said = job.model_dump_json(exclude={"launch"})
        launchers.must_match = {
            "train.precision": job.train.compute_precision,  # which `auto` takes by the machine
            "the job": hashlib.sha256(said.encode()).hexdigest()[:12],
            "the number of processes": launchers.processes,
            "shardtune": __version__,
            "Python": ".".join(platform.python_version_tuple()[:2]),
            "torch": torch.__version__,
            **{f"data set {name}": digest[:12] for name, digest in inputs.data.digests().items()},
        }
        launchers.require_shared_folder(run.path)
