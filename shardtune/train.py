"""The story of a run, from top to bottom."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtune.checkpoint.async_saver import AsyncSaver
from shardtune.checkpoint.run_dir import RunDir
from shardtune.config.job import Job
from shardtune.config.model_rules import check_model
from shardtune.core.cache import cache_dir
from shardtune.core.model.kind import require_trained_family
from shardtune.core.model.parallel_plan import require_divisible
from shardtune.core.progress import Progress
from shardtune.core.run_report import RunReport
from shardtune.core.stop_request import StopRequest
from shardtune.core.world import World
from shardtune.data.dataset import CALIBRATION_SAMPLES, PreparedData
from shardtune.data.loader import Loader
from shardtune.data.prepare import prepare
from shardtune.kernels.measure_matmul import widen_slow_products
from shardtune.launch.process_group import join_process_group
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.load import check_fits_data, check_weights
from shardtune.models.model_files import ModelFiles
from shardtune.models.packed_attention import describe_attention, same_on_all_ranks
from shardtune.models.packing_check import require_document_isolation
from shardtune.models.quantization.fp8_linear import describe_fp8_matmul
from shardtune.plan.run_forecast import RunForecast
from shardtune.report.live import RunView
from shardtune.training.engine_setup import make_plan
from shardtune.training.evaluation import Evaluator
from shardtune.training.health import explain_oom
from shardtune.training.meter import Meter
from shardtune.training.pending_steps import PendingSteps
from shardtune.training.preflight import preflight
from shardtune.training.ranks_agree import require_agreement
from shardtune.training.run import Run
from shardtune.training.time_left import TimeLeft


def train(
    job: Job,
    *,
    resume: bool = False,
    overwrite: bool = False,
    predicted: RunForecast | None = None,
) -> RunReport | None:
    """Trains `job` on the ranks of which this process is one; returns the report, which is empty
    if the run was preempted. With `overwrite` an earlier run makes room for it. Whoever
    starts the ranks has `predicted` what the run will take; only the first rank needs it."""
    inputs = open_inputs(job, quiet=True)
    with join_process_group(int(job.launch.threads)) as world:
        require_agreement(world, job)
        if world.device == "cpu" and job.train.precision != "fp32":
            widen_slow_products()
        files = RunDir(Path(job.save.directory).expanduser(), writes=world.is_main)
        if overwrite and world.is_main:
            files.prepare(overwrite=True)  # only now: what is wrong must not cost the old run
        files.write_forecast(predicted)
        data = open_loader(job, inputs, world)
        steps = count_steps(job, data)
        plan = make_plan(job, world.size, steps)
        builder = PretrainedModelBuilder(
            inputs.model, job.adapter, job.train, inputs.data.calibration_samples
        )
        view = RunView(steps, shown=world.is_main)
        view.say(how_loaded(job))
        clock = TimeLeft(steps, int(job.evaluate.every))
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
            if job.model.quantization == "fp8":
                view.say(describe_fp8_matmul(world.device))
            evaluator = Evaluator(
                engine,
                inputs.data.eval,
                data.evaluation,
                inputs.model.tokenizer,
                inputs.model.stop_ids,
                job.evaluate,
                world.device,
            )
            keep, background = job.save.keep, job.save.background
            saver = AsyncSaver(files.checkpoints, world, keep=keep, background=background)
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
            )
            preflight(run, data)
            progress = run.resume() if resume else run.begin()
            progress = fit(run, data, progress, steps)
            world.heartbeat.enter("finish")
            if progress.preempted:
                view.say(f"preempted after step {progress.step}, with a checkpoint")
                return None
            return run.finish(progress, probe=next(data.steps(0, 1))[0])


def fit(run: Run, data: Loader, progress: Progress, steps: int) -> Progress:
    """The training loop. It never asks which strategy it is running.

    An engine may return from a step that a GPU has yet to compute. What came out of it is read at a
    look, and only there does anybody wait: after each step or every few (`train.log_every`), for
    the step before, so that the GPU has one to compute meanwhile.
    """
    job, world, first = run.job, run.world, progress.step + 1
    meter = Meter(steps - progress.step, world.device)
    world.heartbeat.begin(first)
    batches = data.steps(progress.step, steps, run.engine.stage)
    with PendingSteps(run, data, meter, progress) as pending:
        for step, microbatches in enumerate(batches, first):
            with explain_oom(world, f"at step {step}", microbatches, job.train):
                # Forward, backward, clip, update, schedule.
                pending.add(run.engine.step(microbatches))
            world.heartbeat.enter("collective")
            stop = (
                world.stop_request() if step < steps else StopRequest.NONE
            )  # the last one ends anyway
            last = step == steps or stop is not StopRequest.NONE
            evaluating = due(step, int(job.evaluate.every)) and not last
            saving = due(step, job.save.every) or last
            # These need what came out of this very step.
            whole = evaluating or saving or step == first or job.save.trace
            if whole or due(step, job.train.log_every):
                progress = pending.flush(stop, whole=whole)  # waits, logs, checks each step
            world.heartbeat.enter("save")
            if step == first:
                run.prepare_saving()
            run.keep_saving()
            with meter.paused():  # both follow a look: nothing is computed meanwhile
                # Before the checkpoint: a run that goes on after it must not lack these lines.
                if evaluating:
                    run.evaluate(progress)
                if saving:
                    run.save(progress)
            if progress.stopped:
                break
            world.heartbeat.begin(step + 1)
    world.heartbeat.enter("save")
    run.saved()
    return progress


def count_steps(job: Job, data: Loader) -> int:
    """How many steps the run has, which only the data can tell where the job counts epochs."""
    return job.train.steps or data.total_steps(job.train.epochs or 1.0)


def how_loaded(job: Job) -> str:
    """What takes its time before the first step."""
    calibrated = job.model.quantization == "fp8"
    compiled = job.train.kernels == "compiled"
    words = ["loading the model"]
    if calibrated:
        words.append(f"calibrating fp8 weights (GPTQ, {CALIBRATION_SAMPLES} samples)")
    words += ["compiling its kernels"] if compiled else []
    return ", then ".join(words)


def due(step: int, every: int) -> bool:
    """True in every `every`-th step; never where `every` is 0."""
    return every > 0 and step % every == 0


@dataclass(frozen=True)
class Inputs:
    """What a run reads: everything that can be wrong before the first process is started."""

    model: ModelFiles
    data: PreparedData


def open_inputs(job: Job, *, quiet: bool) -> Inputs:
    """Finds the model, reads and tokenises the data; both are cached, so a second call is quick.

    This happens before the ranks join: whoever comes first does the work, the others wait at a
    file lock, and no collective can time out meanwhile.
    """
    model = ModelFiles(job.model, job.data.chat_template)
    paired = model.kind == "encoder_decoder"
    target = job.data.longest_target if paired else None
    require_trained_family(model.own_config, job.model.name)
    check_model(job, model.kind)
    check_fits_data(model, job.data.sequence_length, target)
    check_weights(model, job.adapter)
    require_cuttable(job, model.config)
    data = prepare(
        job.data, model.tokenizer, model.stop_ids, cache=cache_dir(), quiet=quiet, kind=model.kind
    )
    return Inputs(model, data)


def require_cuttable(job: Job, config: Any) -> None:
    """Refuses a model that the strategy can't cut into its stages and slices."""
    mesh = job.strategy.mesh(int(job.launch.processes))
    staged = mesh.size_of("pipeline") > 1  # a strategy that is still to be chosen never is
    require_divisible(config, mesh, job.strategy.layout().pipelining if staged else None)


def open_loader(job: Job, inputs: Inputs, world: World) -> Loader:
    """This rank's share of every step. Ranks that hold parts of one model share their rows."""
    mesh = job.strategy.mesh(world.size)
    mesh.require(world.size)
    return Loader(
        inputs.data,
        job.data,
        seed=job.train.seed,
        global_batch=job.train.global_batch,
        micro_batch=int(job.train.micro_batch),
        rank=mesh.data_rank(world.rank),
        ranks=mesh.data_ranks,
        pad_id=inputs.model.tokenizer.pad_token_id or 0,
        epochs=job.train.epochs,
        earlier_ends=job.train.earlier_ends,
    )
