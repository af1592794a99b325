"""The story of a run, from top to bottom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from shardtune.checkpoint.async_saver import AsyncSaver
from shardtune.checkpoint.overwrite import overwriting
from shardtune.checkpoint.run_dir import RunDir
from shardtune.config.job import Job
from shardtune.core.host.stop_request import StopRequest
from shardtune.core.progress import Progress
from shardtune.core.runs.run_report import RunReport
from shardtune.core.world import World
from shardtune.data.dataset import CALIBRATION_SAMPLES
from shardtune.data.loader import Loader
from shardtune.engine.cuda_graphs import describe_graphs
from shardtune.kernels.measure_matmul import widen_slow_products
from shardtune.launch.process_group import JoinedWorld, StopSignals, join_process_group
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.packed_attention import describe_attention, same_on_all_ranks
from shardtune.models.packing_check import (
    require_document_isolation,
    require_isolating_layers,
)
from shardtune.models.peft_adapters import describe_left_out
from shardtune.models.quantization.fp8_experts import describe_fp8
from shardtune.plan.run_forecast import RunForecast
from shardtune.report.live import RunView
from shardtune.report.run_panel import StepForecastLine
from shardtune.training.engine_setup import make_plan
from shardtune.training.evaluation import Evaluator
from shardtune.training.health import explain_oom
from shardtune.training.inputs import count_steps, open_inputs, open_loader
from shardtune.training.meter import Meter
from shardtune.training.pending_steps import PendingSteps
from shardtune.training.preflight import preflight
from shardtune.training.ranks_agree import checked_by_main_rank, require_agreement
from shardtune.training.run import Run
from shardtune.training.scheduled_tasks import (
    TASKS_KEY,
    ScheduledTask,
    asked_by_ranks,
    due,
)
from shardtune.training.step_profiler import StepProfiler
from shardtune.training.time_left import TimeLeft
from shardtune.training.tracking import tracking


def train(
    job: Job,
    *,
    resume: bool = False,
    overwrite: bool = False,
    predicted: RunForecast | None = None,
    stop_signals: StopSignals | None = None,
    quiet: bool = False,
    tracks: bool = False,
    profile_steps: int = 0,
) -> RunReport | None:
    """Trains `job` on the ranks of which this process is one; returns the report, which is empty
    if the run was preempted. With `overwrite` an earlier run makes room for it. Whoever
    starts the ranks has `predicted` what the run will take; only the first rank needs it.
    `stop_signals` tells afterwards whether the run was asked to end early. A `quiet` run prints
    warnings only. With `tracks` rank 0 starts the job's trackers, because nobody else does. Of
    `profile_steps` steps each rank takes a profile."""
    inputs = open_inputs(job, quiet=True)
    with (
        join_process_group(int(job.launch.threads), stop_signals) as world,
        open_run_dir(job, world, inputs.tasks, overwrite=overwrite) as files,
        tracking(job, files, wanted=tracks and world.is_main) as trackers,
    ):
        if world.device == "cpu" and job.train.precision != "fp32":
            widen_slow_products()
        files.write_forecast(predicted)
        data = open_loader(job, inputs, world)
        steps = count_steps(job, data)
        plan = make_plan(job, world.size, steps)
        builder = PretrainedModelBuilder(
            inputs.model, job.adapter, job.train, inputs.data.calibration_samples
        )
        view = RunView(
            steps, shown=world.is_main, quiet=quiet, forecast=_shown_forecast(predicted, world)
        )
        view.say(how_loaded(job))
        if not data.packing:
            padding = f"{data.padding_share(steps):.0%} of what is computed is padding"
            view.say(f"one document a row: {padding}")
        intervals = {each.name: each.every for each in inputs.tasks}
        clock = TimeLeft(steps, int(job.evaluate.every), intervals)
        if data.packing:
            config, attention = inputs.model.config, job.model.attn_implementation
            checked_by_main_rank(world, lambda: require_isolating_layers(config, attention))
        with clock.timed("load"):
            engine = plan.strategy.build(builder, plan.setup, world)  # the only strategy-aware line
        if data.packing:
            require_document_isolation(
                engine.module(),
                rows=int(job.train.micro_batch),
                device=world.device,
                precision=job.train.compute_precision,
            )
        with engine, view:
            if world.device.startswith("cuda"):
                view.say(same_on_all_ranks(world.all_gather(describe_attention(engine.module()))))
                view.say(describe_graphs(engine))
            if left_out := describe_left_out(engine.module(), job.adapter):
                view.say(left_out)
            if job.model.quantization == "fp8":
                view.say(describe_fp8(engine.module(), world.device))
            evaluator = Evaluator(
                engine,
                inputs.data.eval,
                data.evaluation,
                inputs.model.tokenizer,
                inputs.model.stop_ids,
                job.evaluate,
                world.device,
            )
            saver = AsyncSaver(
                files.checkpoints,
                world,
                keep=job.save.keep,
                background=job.save.background,
                committed=files.mark_saved,
            )
            digests = inputs.data.digests()
            run = Run(
                job,
                world,
                inputs.model,
                engine,
                evaluator,
                files,
                view,
                digests,
                saver,
                predicted,
                clock,
                sets=inputs.data,
                tasks=inputs.tasks,
                respondent=asked_by_ranks(job, inputs.model, engine, plan, world),
            )
            preflight(run, data)
            progress = run.resume() if resume else run.begin()
            run.describe_data(data)
            profiler = None
            if profile_steps:
                left = steps - progress.step
                profiler = StepProfiler(files.own_profile(), world, profile_steps, left, view.say)
            progress = fit(run, data, progress, steps, profiler)
            world.heartbeat.enter("finish")
            if progress.preempted:
                trackers.hurried = True
                view.say(f"preempted after step {progress.step}, with a checkpoint")
                return None
            return run.finish(progress, probe=next(data.steps(0, 1))[0])


@contextmanager
def open_run_dir(
    job: Job, world: JoinedWorld, tasks: Sequence[ScheduledTask], *, overwrite: bool
) -> Iterator[RunDir]:
    """The run directory, which is ours from here on. With `overwrite` the run in it is put back if
    this one doesn't come to its beginning; ranks that disagree don't even move it."""
    require_agreement(world, job, {f"{TASKS_KEY}: {each.name}": each.content for each in tasks})
    files = RunDir(Path(job.save.directory).expanduser(), writes=world.is_main)
    with overwriting(files, wanted=overwrite and world.is_main):
        if world.is_main:
            files.claim()
        yield files


def fit(
    run: Run, data: Loader, progress: Progress, steps: int, profiler: StepProfiler | None = None
) -> Progress:
    """The training loop. It never asks which strategy it is running.

    An engine may return from a step that a GPU has yet to compute. Its result is read at a sync
    point, the only place that waits: every `train.log_every` steps, for all steps but the newest,
    so that the GPU has one to compute meanwhile.
    """
    job, world, first = run.job, run.world, progress.step + 1
    checkpoints, evaluations = run.checkpoints, run.evaluations
    if evaluations.ends_early(progress):  # it goes on, with no more patience than before
        return progress
    meter = Meter(steps - progress.step, world.device)
    world.heartbeat.begin(first)
    batches = data.steps(progress.step, steps, run.engine.stage)
    with PendingSteps(run, data, meter, progress) as pending:
        for step, microbatches in enumerate(batches, first):
            with explain_oom(world, f"at step {step}", microbatches, job.train):
                # Forward, backward, clip, update, schedule.
                pending.add(run.engine.step(microbatches), microbatches)
            world.heartbeat.enter("collective")
            # The last step ends the run anyway.
            stop = world.stop_request() if step < steps else StopRequest.NONE
            last = step == steps or stop is not StopRequest.NONE
            # The end is evaluated by `finish`, unless something is decided by it.
            evaluating = evaluations.due(step) and not last
            evaluating |= step == steps and bool(evaluations.watched)
            saving = due(step, job.save.every) or last
            # These need what came out of this very step.
            whole = evaluating or saving or step == first or job.save.trace
            if whole or due(step, job.train.log_every):
                progress = pending.flush(stop, whole=whole)  # waits, logs, checks each step
            world.heartbeat.enter("save")
            if step == first:
                checkpoints.prepare()
            checkpoints.poll()
            with meter.paused():  # both follow a sync point: the device is idle
                # Before the checkpoint: a run that goes on after it must not lack these lines.
                if evaluating:
                    progress = pending.progress = evaluations.judge(progress, whole=last)
                if saving or progress.best_step == step or evaluations.ends_early(progress):
                    world.heartbeat.enter("save")
                    checkpoints.save(progress)
                if profiler is not None:
                    profiler.after_step()
            if progress.stopped or evaluations.ends_early(progress):
                break
            world.heartbeat.begin(step + 1)
    if profiler is not None:
        profiler.stop()
    world.heartbeat.enter("save")
    checkpoints.wait()
    return progress


def _shown_forecast(predicted: RunForecast | None, world: World) -> StepForecastLine | None:
    """What the live view shows beside what it measures. Of a processor too little is known."""
    if predicted is None or world.device == "cpu":
        return None
    return StepForecastLine(predicted.summary.tokens_per_second, predicted.allocated_gib)


def how_loaded(job: Job) -> str:
    """What takes its time before the first step."""
    calibrated = job.model.quantization == "fp8"
    compiled = job.train.kernels == "compiled"
    words = ["loading the model"]
    if calibrated:
        words.append(f"calibrating fp8 weights (GPTQ, {CALIBRATION_SAMPLES} samples)")
    words += ["compiling its kernels"] if compiled else []
    return ", then ".join(words)
