"""Replaces every `auto` of a job once, in a new job, and keeps the reason for each.

Some follow from what the machine has, some from the job itself. What only a forecast can tell (the
strategy, the micro-batch on GPUs, what is recomputed) stays `auto` until a planner has spoken:
`plan/this_machine.py` has the one of a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from shardtune.config.job import Job, LocalLaunch, LoRA, RayLaunch, TrainSection
from shardtune.config.model_config import config_of, kind_if_known
from shardtune.config.trackers import tracker_of
from shardtune.core.files.yaml_document import KeyPath, dotted
from shardtune.core.host.machine import Machine
from shardtune.core.model.active_experts import active_experts
from shardtune.core.model.family_support import support_of
from shardtune.core.model.kind import ModelKind
from shardtune.core.setup import Precision
from shardtune.core.strategy import JobFacts, ResolvedStrategy, ToldValue
from shardtune.errors import JobError, ModelError, Problem

MICRO_BATCH: KeyPath = ("train", "micro_batch")
PRECISION: KeyPath = ("train", "precision")
_TRACK: KeyPath = ("track",)
MICRO_BATCH_TOKENS = 4096  # of a CPU, and where no forecast can be made
MICRO_BATCHES_A_STAGE = 4  # a rank then waits for at most a fifth of its time


@dataclass(frozen=True)
class ResolvedJob:
    """A job without `auto` (but for what only the model or the files can tell), and the reasons."""

    job: Job
    reasons: dict[KeyPath, str]
    notes: tuple[str, ...] = ()
    """What else a person should know: of a strategy's own file, what is left out."""


Planner = Callable[[Job], ResolvedJob]
"""Replaces what a forecast decides; what it can't decide it leaves `auto`."""


def resolve(
    job: Job,
    machine: Machine,
    ranks: int | None = None,
    *,
    nodes: int = 1,
    planner: Planner | None = None,
    begun: Job | None = None,
) -> ResolvedJob:
    """`ranks` is the number of processes that run already (under torchrun), where they do; `nodes`
    that of machines like this one. A resolved job counts the processes of all of them.

    Without a planner the strategy and what is recomputed stay as they are. `begun` is the job of a
    run that goes on, which keeps its precision on whatever machine.
    """
    draft, kind = _Draft(job), kind_if_known(job.model)
    _resolve_launch(draft, machine, ranks, nodes)
    _take_told(draft)
    draft.take_strategy(draft.job.strategy.on_nodes(nodes))
    _resolve_length(draft)
    _resolve_family(draft, kind)
    _resolve_kernels(draft, machine, kind)
    _resolve_offload(draft, machine)
    _resolve_precision(draft, machine, kind, begun)
    _resolve_evaluation(draft)
    _resolve_names(draft)
    if not memory_decides(draft.job, machine):
        _resolve_micro_batch(draft)
    _resolve_strategy_file(draft)
    if planner is not None and _is_open(draft.job):
        draft.take(planner(draft.job))
    _resolve_micro_batch(draft)  # where no planner could tell
    return ResolvedJob(draft.job, draft.reasons, draft.notes)


@dataclass
class _Draft:
    """A job whose values are being replaced."""

    job: Job
    reasons: dict[KeyPath, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return int(self.job.launch.processes)

    def put(self, path: KeyPath, value: Any, reason: str) -> None:
        self.job = _with_value(self.job, path, value)
        self.reasons[path] = reason

    def take(self, resolved: ResolvedJob) -> None:
        self.job = resolved.job
        self.reasons |= resolved.reasons

    def take_strategy(self, resolved: ResolvedStrategy) -> None:
        self.job = self.job.model_copy(update={"strategy": resolved.strategy})
        self.reasons = resolved.reasons | self.reasons
        self.notes += resolved.notes


def _with_value(section: Any, path: KeyPath, value: Any) -> Any:
    """A copy of `section` with another value at `path`."""
    if not path:
        return value
    part, rest = path[0], path[1:]
    if isinstance(part, int):
        items = list(section)
        items[part] = _with_value(items[part], rest, value)
        return tuple(items)
    return section.model_copy(update={part: _with_value(getattr(section, part), rest, value)})


def _is_open(job: Job) -> bool:
    """Whether a planner has something to decide."""
    train = job.train
    return job.strategy.planned or "auto" in (train.micro_batch, train.gradient_checkpointing)


# What the machine and the job decide --------------------------------------------------------------


def _resolve_launch(draft: _Draft, machine: Machine, ranks: int | None, nodes: int) -> None:
    launch = draft.job.launch
    counted: KeyPath = ("launch", "workers" if isinstance(launch, RayLaunch) else "processes")
    if ranks is not None:
        here = max(1, ranks // nodes)
        if launch.processes != ranks:
            draft.put(counted, ranks, f"{ranks} processes were started from outside")
    else:
        here = max(1, machine.gpus) if launch.processes == "auto" else launch.processes
        if nodes > 1:
            draft.put(counted, nodes * here, f"{nodes} nodes x {here} processes")
        elif launch.processes == "auto":
            found = f"one per GPU, {machine.gpus} found"
            draft.put(counted, here, found if machine.gpus else "no GPU found: one process")
    if launch.threads == "auto":
        threads, why = max(1, machine.cores // here), f"{machine.cores} cores / {here} processes"
        own = isinstance(launch, LocalLaunch) and ranks is None  # torchrun sets it by itself
        if own and machine.omp_threads is not None:
            threads, why = machine.omp_threads, "OMP_NUM_THREADS of the environment"
        draft.put(("launch", "threads"), threads, why)


def _resolve_length(draft: _Draft) -> None:
    if draft.job.train.steps is None and draft.job.train.epochs is None:
        draft.put(("train", "epochs"), 1.0, "neither steps nor epochs is given: one pass")


def _resolve_family(draft: _Draft, kind: ModelKind) -> None:
    """What the model's family can do: its attention, whether it keeps packed documents apart, and
    its experts."""
    job = draft.job
    try:
        config = config_of(job.model)
    except ModelError:  # whoever opens the model says what is wrong with it
        config = {}
    _resolve_experts(draft, active_experts(config))
    _resolve_balance(draft, config)
    family, support = config.get("model_type", "this model"), support_of(config)
    if job.model.attention == "auto" and support is not None:
        has = " or ".join(support.attention)
        words = "" if support.best_attention == "sdpa" else f", which has no sdpa ({has})"
        draft.put(("model", "attention"), support.best_attention, f"the best for {family}{words}")
    if job.data.packing == "auto" and config:
        packs, reason = True, f"{family} isolates packed documents"
        if kind != "decoder":
            packs, reason = False, "padded: source-target pairs are not packed"
        elif support is None:
            packs = False
            reason = f"padded: it is not known whether {family} isolates packed documents"
        elif support.mixes_documents:
            packs, reason = False, f"padded, as {family} mixes documents: {support.mixes_documents}"
        draft.put(("data", "packing"), packs, reason)


def _resolve_experts(draft: _Draft, active: int) -> None:
    """What LoRA does with the experts of a mixture; `active` is how many a token goes through."""
    adapter = draft.job.adapter
    if not isinstance(adapter, LoRA) or not active:
        return
    adapts = adapter.adapts_experts
    if adapter.experts == "auto":
        reason = "targets: all-linear" if adapts else "adapter.targets names other layers"
        draft.put(("adapter", "experts"), "all" if adapts else "none", reason)
    if adapts and adapter.expert_rank == "auto":
        rank = adapter.rank_of_experts(active)
        reason = f"rank {adapter.rank} / {active} experts that a token goes through"
        draft.put(("adapter", "expert_rank"), rank, reason)


def _resolve_balance(draft: _Draft, config: Mapping[str, Any]) -> None:
    """The load-balancing loss that a mixture was published with."""
    if draft.job.train.router_aux_loss_coef != "auto" or "router_aux_loss_coef" not in config:
        return
    used = bool(config.get("output_router_logits"))
    found = float(config["router_aux_loss_coef"] or 0) if used else 0.0
    draft.put(
        ("train", "router_aux_loss_coef"),
        found,
        f"config.json {'uses' if used else 'does not use'} it (output_router_logits)",
    )


def _resolve_kernels(draft: _Draft, machine: Machine, kind: ModelKind) -> None:
    """Layers that an engine cuts or hooks into are left as transformers writes them, and so are
    those of models with an encoder."""
    strategy = draft.job.strategy
    fast, reason = True, "a GPU was found"
    if not machine.gpus:
        fast, reason = False, "no GPU was found"
    elif not strategy.capabilities.compiled_layers:
        fast, reason = False, f"strategy {strategy.type} doesn't support compiled layers"
    elif kind != "decoder":
        fast, reason = False, "the model has an encoder and a decoder"
    elif draft.job.train.balances_experts or draft.job.train.router_z_loss_coef:
        fast, reason = False, "router losses need hooks that compiled layers bypass"
    if draft.job.train.loss == "auto":
        draft.put(("train", "loss"), "fused" if fast else "plain", reason)
    if draft.job.train.kernels == "auto":
        draft.put(("train", "kernels"), "compiled" if fast else "eager", reason)


def _resolve_offload(draft: _Draft, machine: Machine) -> None:
    """Without a GPU all memory is one."""
    if machine.gpus:
        return
    job, reason = draft.job, "no GPU was found"
    # Where a strategy can't it is refused, here as where there is a GPU.
    if job.train.offload_activations and job.strategy.capabilities.activation_offload:
        draft.put(("train", "offload_activations"), False, reason)
    if job.maps_states_to_host(draft.ranks):
        draft.put(("train", "optimizer", "paged"), False, reason)


def _resolve_precision(draft: _Draft, machine: Machine, kind: ModelKind, begun: Job | None) -> None:
    if draft.job.train.precision == "auto":
        draft.put(PRECISION, *_precision(draft.job, machine, kind, begun))


def _precision(
    job: Job, machine: Machine, kind: ModelKind, begun: Job | None
) -> tuple[Precision, str]:
    """What a run was begun with, what a strategy's own file says, what the weights need, or what
    the device is fast in."""
    if begun is not None and begun.train.precision != "auto":
        return begun.train.precision, "as the run was begun"
    if told := job.strategy.precision():
        return told
    if job.model.quantization == "fp8":
        return "bf16", "matmuls with fp8 weights need bf16"
    if machine.matmul is None:
        return "bf16", "what the device is fast in isn't known here"
    best, reason = machine.matmul.best(gpu=machine.gpus > 0)
    if best not in job.strategy.capabilities.precisions:
        return "fp32", f"{reason}, which strategy {job.strategy.type} doesn't take"
    if best == "fp16" and kind == "encoder_decoder":
        return "fp32", f"{reason}, in which published T5 weights overflow"
    return best, reason


def _resolve_evaluation(draft: _Draft) -> None:
    if draft.job.evaluate.every == "auto":
        draft.put(("evaluate", "every"), draft.job.save.every, "as often as save.every")
    for index, entry in enumerate(draft.job.evaluate.tasks):
        if entry.every == "auto":
            path = ("evaluate", "tasks", index, "every")
            draft.put(path, draft.job.evaluate.every, "as often as evaluate.every")


def _resolve_names(draft: _Draft) -> None:
    data = draft.job.data
    for side, sources in (("train", data.train), ("eval", data.eval_sources)):
        for index, source in enumerate(sources):
            if source.name == "auto":
                draft.put(("data", side, index, "name"), source.label, "the file's name")


# The micro-batch ----------------------------------------------------------------------------------


def memory_decides(job: Job, machine: Machine) -> bool:
    """Whether a forecast chooses the micro-batch, because only memory and speed speak for one: it
    is `auto`, there are GPUs, and no file, no kernel and no pipeline wants another."""
    return (
        job.train.micro_batch == "auto"
        and machine.gpus > 0
        and job.strategy.capabilities.micro_batch_by_memory
        and not _one_row(job)
    )


def _resolve_micro_batch(draft: _Draft) -> None:
    if draft.job.train.micro_batch == "auto":
        draft.put(MICRO_BATCH, *_micro_batch(draft.job, draft.ranks))


def _micro_batch(job: Job, processes: int) -> tuple[int, str]:
    """Rows of a forward pass: what a strategy's own file says, else what keeps a device busy."""
    global_batch, length = job.train.global_batch, job.data.sequence_length
    if told := job.strategy.micro_batch(global_batch, processes):
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
        f"a rank has {rows} row{'s' * (rows > 1)} a step; {fitting} x {length} tokens "
        f"stay within {MICRO_BATCH_TOKENS}"
    )


def rows_of(job: Job, ranks: int) -> int:
    """Rows of a rank in a step; where they can't be spread evenly, some ranks have one more."""
    return max(1, job.train.global_batch // job.strategy.mesh(ranks).data_ranks)


def _one_row(job: Job) -> bool:
    """Whether packed documents can be kept apart in micro-batches of one row only."""
    return job.data.packs and job.model.attention == "flash_attention_2"


# A strategy's own file ----------------------------------------------------------------------------


def _take_told(draft: _Draft) -> None:
    """What a strategy's own file says of the job, where that itself is silent."""
    told = dict(draft.job.strategy.told(draft.ranks))
    if (trackers := told.pop(_TRACK, None)) is not None:
        _take_trackers(draft, trackers)
    told = {path: each for path, each in told.items() if not _says(draft.job.train, str(path[1]))}
    if told:
        _take_train(draft, told)


def _take_trackers(draft: _Draft, told: ToldValue) -> None:
    if "track" in draft.job.model_fields_set:
        draft.notes += (f"{told.place}: its trackers are left out: the job has `track` itself",)
        return
    assert isinstance(told.value, list)
    try:
        trackers = tuple(map(tracker_of, told.value))
    except ValidationError as error:
        fix = "change it there, or set `track`"
        problems = [
            Problem(told.place, f"{dotted(item['loc'])} of a tracker: {item['msg']}", fix)
            for item in error.errors(include_url=False)
        ]
        raise JobError(problems) from None
    draft.job = draft.job.model_copy(update={"track": trackers})
    for index, each in enumerate(trackers):
        draft.reasons |= {("track", index, key): told.place for key in each.model_fields_set}


def _take_train(draft: _Draft, told: Mapping[KeyPath, ToldValue]) -> None:
    train = draft.job.train
    fields = train.model_dump(mode="json", exclude_unset=True)
    for path, each in told.items():
        *sections, key = path[1:]
        section = fields
        for name in sections:
            section = section.setdefault(str(name), {})
        section[str(key)] = each.value
    try:
        changed = TrainSection.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        problems = []
        for item in error.errors(include_url=False):
            path = ("train", *(part for part in item["loc"] if part not in ("adamw", "sgd")))
            place = told[path].place if path in told else dotted(path)
            fact = f"is {json.dumps(item['input'])}, and train takes none such: {item['msg']}"
            problems.append(Problem(place, fact, f"change it there, or set {dotted(path)}"))
        raise JobError(problems) from None
    draft.job = draft.job.model_copy(update={"train": changed})
    draft.reasons |= {path: each.place for path, each in told.items()}


_EXCLUDING = {"steps": "epochs", "warmup_steps": "warmup_ratio"}  # of which a job gives one


def _says(train: TrainSection, key: str) -> bool:
    """Whether a job has a value of its own for a key, or for one that excludes it. Null is a value
    where it isn't the default: `max_grad_norm: null` never clips."""
    for each in {key, _EXCLUDING.get(key, key)} & train.model_fields_set:
        value, default = getattr(train, each), TrainSection.model_fields[each].default
        if value != "auto" and (value is not None or default is not None):
            return True
    return False


def _resolve_strategy_file(draft: _Draft) -> None:
    """Who has a file to read leaves no micro-batch to the forecast."""
    if draft.job.train.micro_batch != "auto":
        draft.take_strategy(draft.job.strategy.resolved(_facts(draft.job)))


def _facts(job: Job) -> JobFacts:
    """What such a file has to agree with."""
    train = job.train
    return JobFacts(
        ranks=int(job.launch.processes),
        global_batch=train.global_batch,
        micro_batch=int(train.micro_batch),
        precision=train.compute_precision,
        max_grad_norm=train.max_grad_norm,
        optimizer=train.optimizer.setup(),
        learning_rate=train.learning_rate,
        schedule=train.schedule,
        warmup_steps=_warmup_steps(train),
        steps=train.steps,
        hidden_size=_hidden_size(job),
    )


def _warmup_steps(train: TrainSection) -> int | None:
    if train.warmup_ratio is None:
        return train.warmup_steps
    return train.warmup(train.steps) if train.steps else None


def _hidden_size(job: Job) -> int | None:
    """The model's width, where its config.json can be had."""
    try:
        config = config_of(job.model)
    except ModelError:  # whoever opens the model says what is wrong with it
        return None
    found = (config.get(key) for key in ("hidden_size", "d_model", "n_embd"))
    return next((width for width in found if isinstance(width, int)), None)
