"""Replaces every `auto` once, in a new job, and keeps the reason for each."""

from __future__ import annotations

from dataclasses import dataclass

from shardtune.config.job import Job, RayLaunch, Source
from shardtune.core.machine import Machine
from shardtune.core.mesh import Mesh
from shardtune.core.setup import OptimizerSetup
from shardtune.core.yaml_document import KeyPath
from shardtune.parallel import DeepSpeed, Strategy
from shardtune.parallel.deepspeed import json_file as deepspeed_json

MICRO_BATCH_TOKENS = 4096  # of a CPU, and where no forecast can be made (`budget.py` makes it)
MICRO_BATCHES_A_STAGE = 4  # a rank then waits for at most a fifth of its time


@dataclass(frozen=True)
class ResolvedJob:
    """A job without `auto` (but for what only the model or the files can tell), and the reasons."""

    job: Job
    reasons: dict[KeyPath, str]
    rows_open: bool = False
    """Whether a forecast may choose another micro-batch: it was `auto`, and there are GPUs."""
    rows_chosen: bool = False
    """Whether it has."""


def resolve(job: Job, machine: Machine, ranks: int | None = None, *, nodes: int = 1) -> ResolvedJob:
    """`ranks` is the number of processes that run already (under torchrun), where they do; `nodes`
    that of machines like this one. A resolved job counts the processes of all of them."""
    reasons: dict[KeyPath, str] = {}

    launch = job.launch
    counted: KeyPath = ("launch", "workers" if isinstance(launch, RayLaunch) else "processes")
    if ranks is not None:
        if launch.processes != ranks:
            reasons[counted] = f"{ranks} processes were started from outside"
        launch = launch.with_processes(ranks)
    elif launch.processes == "auto":
        processes = max(1, machine.gpus)
        reasons[counted] = (
            f"one per GPU, {machine.gpus} found" if machine.gpus else "no GPU found: one process"
        )
        launch = launch.with_processes(processes)
    here = int(launch.processes) if ranks is None else max(1, ranks // nodes)
    if ranks is None and nodes > 1:
        reasons[counted] = f"{nodes} nodes x {here} processes"
        launch = launch.with_processes(nodes * here)
    processes = int(launch.processes)
    if launch.threads == "auto":
        threads = max(1, machine.cores // here)
        reasons["launch", "threads"] = f"{machine.cores} cores / {here} processes"
        launch = launch.model_copy(update={"threads": threads})

    train = job.train
    if train.steps is None and train.epochs is None:
        reasons["train", "epochs"] = "neither steps nor epochs is given: one pass"
        train = train.model_copy(update={"epochs": 1.0})
    rows_open = train.micro_batch == "auto" and machine.gpus > 0 and _by_memory(job, processes)
    if train.micro_batch == "auto":
        micro_batch, reasons["train", "micro_batch"] = _micro_batch(job, processes)
        train = train.model_copy(update={"micro_batch": micro_batch})

    for field, fast, slow in (("loss", "fused", "plain"), ("kernels", "compiled", "eager")):
        if getattr(train, field) == "auto":
            chosen, reasons["train", field] = _fast_path(job, machine, processes, fast, slow)
            train = train.model_copy(update={field: chosen})
    # Under other strategies it is refused, here as where there is a GPU.
    if train.offload_activations and not machine.gpus and job.strategy.type in ("ddp", "auto"):
        reasons["train", "offload_activations"] = "no GPU was found"
        train = train.model_copy(update={"offload_activations": False})
    if job.pages_states(processes) and not machine.gpus:
        reasons["train", "optimizer", "paged"] = "no GPU was found"
        rule = train.optimizer.model_copy(update={"paged": False})
        train = train.model_copy(update={"optimizer": rule})

    evaluate = job.evaluate
    if evaluate.every == "auto":
        reasons["evaluate", "every"] = "as often as save.every"
        evaluate = evaluate.model_copy(update={"every": job.save.every})

    data = job.data.model_copy(
        update={
            side: tuple(
                _named(source, ("data", side, index), reasons)
                for index, source in enumerate(sources)
            )
            for side, sources in (("train", job.data.train), ("eval", job.data.eval))
        }
    )
    resolved = job.model_copy(
        update={"launch": launch, "train": train, "evaluate": evaluate, "data": data}
    )
    if file := _file(job):
        found = deepspeed_json.read(file, _facts(resolved))
        resolved = resolved.model_copy(update={"strategy": found.strategy})
        reasons = found.reasons | reasons
    return ResolvedJob(resolved, reasons, rows_open)


def _file(job: Job) -> DeepSpeed | None:
    """The strategy, where it is described by a DeepSpeed file."""
    strategy = job.strategy
    return strategy if isinstance(strategy, DeepSpeed) and strategy.config is not None else None


def _micro_batch(job: Job, processes: int) -> tuple[int, str]:
    """Rows of a forward pass: what a DeepSpeed file says, else what keeps a device busy."""
    global_batch, length = job.train.global_batch, job.data.sequence_length
    if (file := _file(job)) and (told := deepspeed_json.micro_batch(file, global_batch, processes)):
        return told
    mesh, rows = job.strategy.mesh(processes), rows_of(job, processes)
    fitting = max(1, MICRO_BATCH_TOKENS // length)
    micro_batch = 1 if _one_row(job) else min(rows, fitting)
    stages = mesh.size_of("pipeline")
    flowing = max(1, rows // (MICRO_BATCHES_A_STAGE * stages))
    if stages > 1 and flowing < micro_batch:
        return flowing, (
            f"{rows} rows a step make {-(-rows // flowing)} micro-batches, so that {stages} "
            "stages wait little for each other"
        )
    return micro_batch, (
        f"a rank has {rows} rows a step; {fitting} x {length} tokens "
        f"stay within {MICRO_BATCH_TOKENS}"
    )


def rows_of(job: Job, ranks: int) -> int:
    """Rows of a rank in a step; where they can't be spread evenly, some ranks have one more."""
    return max(1, job.train.global_batch // job.strategy.mesh(ranks).data_ranks)


def _by_memory(job: Job, processes: int) -> bool:
    """Whether only memory and speed speak for a micro-batch: no file, no kernel and no pipeline."""
    mesh = job.strategy.mesh(processes)
    return not _file(job) and not _one_row(job) and mesh.data_ranks == mesh.size


def _one_row(job: Job) -> bool:
    """Whether packed documents can be kept apart in micro-batches of one row only."""
    return job.data.packing and job.model.attention == "flash_attention_2"


def _fast_path(job: Job, machine: Machine, processes: int, fast: str, slow: str) -> tuple[str, str]:
    """Layers that are cut, or that DeepSpeed hooks into, are left as transformers writes them."""
    if not machine.gpus:
        return slow, "no GPU was found"
    mesh = job.strategy.mesh(processes)
    if leaves_layers_alone(job.strategy, mesh):
        return slow, f"strategy {job.strategy.type} works on layers as they are"
    return fast, "a GPU was found"


def leaves_layers_alone(strategy: Strategy, mesh: Mesh) -> bool:
    """Whether an engine needs layers as transformers writes them: it cuts them or hooks into them,
    and can't be given compiled ones, nor a loss that is fused with the head."""
    return isinstance(strategy, DeepSpeed) or mesh.data_ranks != mesh.size


def _facts(job: Job) -> deepspeed_json.Facts:
    """What a DeepSpeed file has to agree with."""
    train = job.train
    return deepspeed_json.Facts(
        ranks=int(job.launch.processes),
        global_batch=train.global_batch,
        micro_batch=int(train.micro_batch),
        precision=train.precision,
        max_grad_norm=train.max_grad_norm,
        optimizer=OptimizerSetup(**train.optimizer.model_dump()),
        learning_rate=train.learning_rate,
        schedule=train.schedule,
        warmup_steps=train.warmup_steps,
        steps=train.steps,
    )


def _named(source: Source, path: KeyPath, reasons: dict[KeyPath, str]) -> Source:
    if source.name != "auto":
        return source
    key: KeyPath = (*path, "name")
    reasons[key] = "the file's name"
    return source.model_copy(update={"name": source.label})
