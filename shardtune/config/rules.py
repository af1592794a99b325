"""What no single section can check: a table of rules over the whole job.

A rule is a name, the key it speaks of, the test that must be false, and the fact and fix to print.
Rules are checked after `auto` values are resolved, all of them, so that a person sees every problem
at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from shardtune.config.job import AdamW, Job, LoRA, NoAdapter
from shardtune.core.machine import Machine
from shardtune.core.yaml_document import KeyPath
from shardtune.errors import JobError, Problem
from shardtune.parallel import FSDP, DeepSpeed, Pipeline
from shardtune.parallel.deepspeed.deepspeed_fields import ZeRO


@dataclass(frozen=True)
class Rule:
    """One row of the table. `broken` may name the numbers through `fact`, which sees the job."""

    name: str
    key: KeyPath
    broken: Callable[[Job], bool]
    fact: Callable[[Job], str]
    fix: str


def _shared_names(job: Job) -> list[str]:
    """Names that two sets of one side bear. A training set may be called as an evaluation set."""
    sides = (job.data.train, job.data.eval)
    counts = (Counter(source.name for source in side) for side in sides)
    return sorted({name for count in counts for name, times in count.items() if times > 1})


def _processes(job: Job) -> int:
    return job.launch.processes if isinstance(job.launch.processes, int) else 1


def _shares(job: Job) -> int:
    """Into how many shares the rows of a step go: ranks with parts of one model share theirs."""
    return job.strategy.mesh(_processes(job)).data_ranks


def _at_once(job: Job) -> int:
    micro_batch = job.train.micro_batch
    return micro_batch * _shares(job) if isinstance(micro_batch, int) else 0


def _slices(job: Job) -> int:
    return job.strategy.mesh(_processes(job)).size_of("tensor")


def _schedule(job: Job) -> str:
    """The order in which the stages of a pipeline work; nothing where there are none."""
    order = job.strategy.layout().pipelining
    return order.kind if order is not None and order.kind != "layers" else ""


def _groups(job: Job) -> FSDP:
    """How FSDP is asked to form groups and stages; as by default under other strategies."""
    return job.strategy if isinstance(job.strategy, FSDP) else FSDP()


def _chunks(job: Job) -> int | None:
    """Stages of each rank, where somebody has set a number that the order has no use for."""
    strategy = job.strategy
    if not isinstance(strategy, FSDP | Pipeline) or strategy.schedule == "interleaved":
        return None
    usual = type(strategy).model_fields["chunks"].default
    return strategy.chunks if strategy.chunks != usual else None


def _packed(job: Job) -> bool:
    """Whether frozen weights are packed in blocks, which are restored for each matmul."""
    return job.model.quantization in ("nf4", "int8")


def _variant(job: Job) -> str:
    return job.adapter.variant if isinstance(job.adapter, LoRA) else ""


def _trains_modules(job: Job) -> bool:
    """Whether whole modules are trained; only the model can tell whether the right ones are."""
    adapter = job.adapter
    return isinstance(adapter, NoAdapter) or (
        isinstance(adapter, LoRA) and bool(adapter.modules_to_save)
    )


def _bits(job: Job) -> int:
    return job.train.optimizer.bits if isinstance(job.train.optimizer, AdamW) else 32


def _paged(job: Job) -> bool:
    return isinstance(job.train.optimizer, AdamW) and job.train.optimizer.paged


def _not_all(job: Job) -> str:
    """What keeps one rank from training all weights with halves of them in main memory."""
    reasons = {
        f"an adapter ({job.adapter.type}) is trained": not isinstance(job.adapter, NoAdapter),
        f"precision is {job.train.precision}": job.train.precision != "bf16",
        f"moments have {_bits(job)} bits": _bits(job) != 32,
        f"strategy is {job.strategy.type}": job.strategy.type != "ddp",
        f"there are {_processes(job)} ranks": _processes(job) > 1,
    }
    return " and ".join(reason for reason, holds in reasons.items() if holds)


def _offload(job: Job) -> ZeRO:
    """Where DeepSpeed is to keep what; nowhere else than usual under other strategies."""
    return job.strategy.zero_optimization if isinstance(job.strategy, DeepSpeed) else ZeRO()


def _cuts_the_model(job: Job) -> bool:
    mesh = job.strategy.mesh(_processes(job))
    return mesh.data_ranks != mesh.size


def _leaks(job: Job) -> list[str]:
    """What is named on both sides. Two splits of one data set may be."""
    held_out = {(source.path, source.split) for source in job.data.eval}
    return [one.path for one in job.data.train if (one.path, one.split) in held_out]


RULES: tuple[Rule, ...] = (
    Rule(
        "steps-or-epochs",
        ("train", "steps"),
        lambda job: job.train.steps is not None and job.train.epochs is not None,
        lambda job: f"both steps ({job.train.steps}) and epochs ({job.train.epochs}) are given",
        "keep one of the two",
    ),
    Rule(
        "warmup-within-steps",
        ("train", "warmup_steps"),
        lambda job: job.train.steps is not None and job.train.warmup_steps >= job.train.steps,
        lambda job: (
            f"{job.train.warmup_steps} steps of warmup in a run of {job.train.steps}: "
            "the rate would never reach its peak"
        ),
        "warm up for fewer steps, or train for more",
    ),
    Rule(
        "micro-batch-within-global",
        ("train", "micro_batch"),
        lambda job: _shares(job) <= job.train.global_batch < _at_once(job),
        lambda job: (
            f"micro_batch({job.train.micro_batch}) x processes({_shares(job)}) = "
            f"{_at_once(job)} > global_batch({job.train.global_batch})"
        ),
        "lower micro_batch or raise global_batch; `micro_batch: auto` always fits",
    ),
    Rule(
        "flash-attention-packs-one-row",
        ("train", "micro_batch"),
        lambda job: (
            job.data.packing
            and job.model.attention == "flash_attention_2"
            and job.train.micro_batch != 1
        ),
        lambda job: (
            f"flash_attention_2 keeps packed documents apart in one row at a time, not in "
            f"{job.train.micro_batch}"
        ),
        "set train.micro_batch: 1, data.packing: false, or model.attention: sdpa",
    ),
    Rule(
        "every-rank-has-rows",
        ("launch", "processes"),
        lambda job: _shares(job) > job.train.global_batch,
        lambda job: (
            f"{_shares(job)} processes share {job.train.global_batch} rows a step: "
            f"{_shares(job) - job.train.global_batch} would always be idle"
        ),
        "raise train.global_batch or start fewer processes",
    ),
    Rule(
        "unique-names",
        ("data",),
        lambda job: bool(_shared_names(job)),
        lambda job: f"two data sets are called {', '.join(_shared_names(job))}",
        "give one of them a `name:` of its own",
    ),
    Rule(
        "train-is-not-eval",
        ("data", "eval"),
        lambda job: bool(_leaks(job)),
        lambda job: f"{', '.join(_leaks(job))} is both trained on and held out",
        "hold out rows that are not trained on, in a file of their own",
    ),
    Rule(
        "quantized-needs-adapter",
        ("model", "quantization"),
        lambda job: job.model.quantization != "none" and isinstance(job.adapter, NoAdapter),
        lambda job: (
            f"the weights are stored in {job.model.quantization}, and all of them are to be "
            "trained: a step is far smaller than the distance between two such numbers"
        ),
        "train an adapter (`adapter: {type: lora}`), or set model.quantization: none",
    ),
    Rule(
        "pissa-needs-all-digits",
        ("adapter", "variant"),
        lambda job: job.model.quantization != "none" and _variant(job) == "pissa",
        lambda job: (
            "pissa moves the strongest part of each weight into the adapter; what remains would be "
            f"quantized ({job.model.quantization}) otherwise than by whoever loads the adapter"
        ),
        "use variant: plain, dora or rslora, or set model.quantization: none",
    ),
    Rule(
        "fp8-computes-in-bf16",
        ("train", "precision"),
        lambda job: job.model.quantization == "fp8" and job.train.precision != "bf16",
        lambda job: (
            f"is {job.train.precision}, but products with weights stored in fp8 are computed in "
            "bf16, as GPUs scale them row by row"
        ),
        "set train.precision: bf16, or model.quantization: none",
    ),
    Rule(
        "fp8-needs-whole-weights",
        ("model", "quantization"),
        lambda job: job.model.quantization == "fp8" and job.strategy.type != "ddp",
        lambda job: (
            "fp8 multiplies with whole weights, each with a scale for its rows; "
            f"{job.strategy.type} divides them"
        ),
        "use strategy: {type: ddp}, or set model.quantization: none",
    ),
    Rule(
        "new-tokens-are-trained",
        ("model", "add_tokens"),
        lambda job: bool(job.model.add_tokens) and not _trains_modules(job),
        lambda job: (
            f"{', '.join(job.model.add_tokens)} would never come to mean anything: an adapter "
            f"({job.adapter.type}) by itself doesn't train the embedding"
        ),
        "use adapter: {type: lora, modules_to_save: [embed_tokens, lm_head]}, or {type: none}",
    ),
    Rule(
        "hybrid-has-replicas",
        ("strategy", "sharding"),
        lambda job: _groups(job).sharding == "hybrid" and _groups(job).replicas is None,
        lambda job: "hybrid repeats groups of ranks, and nothing says how many there are",
        "set replicas, best to the number of nodes, or sharding: full",
    ),
    Rule(
        "replicas-are-hybrid",
        ("strategy", "replicas"),
        lambda job: _groups(job).sharding == "full" and (_groups(job).replicas or 1) > 1,
        lambda job: f"sharding: full has one group of ranks, not {_groups(job).replicas}",
        "set sharding: hybrid, or leave replicas out",
    ),
    Rule(
        "schedule-has-stages",
        ("strategy", "schedule"),
        lambda job: _groups(job).schedule != "1f1b" and _groups(job).pipeline == 1,
        lambda job: f"{_groups(job).schedule} is an order of stages, and pipeline: 1 has but one",
        "set pipeline to the number of stages, or leave schedule out",
    ),
    Rule(
        "chunks-are-interleaved",
        ("strategy", "chunks"),
        lambda job: _chunks(job) is not None,
        lambda job: f"only interleaved gives each rank a number of stages, here {_chunks(job)}",
        "set schedule: interleaved, or leave chunks out",
    ),
    Rule(
        "fsdp-has-no-loss-scale",
        ("train", "precision"),
        lambda job: job.strategy.type == "fsdp" and job.train.precision == "fp16",
        lambda job: "fp16 needs a loss scale on which all shards agree; fsdp here has none",
        "set train.precision: bf16, or use strategy: {type: deepspeed}",
    ),
    Rule(
        "quantized-weights-stay-in-memory",
        ("model", "quantization"),
        lambda job: _packed(job) and _offload(job).offload_param.device == "nvme",
        lambda job: (
            f"weights in {job.model.quantization}, and zero_optimization.offload_param into files: "
            "DeepSpeed reads them back as numbers of the model's precision, which they are not"
        ),
        "set offload_param.device: cpu, or model.quantization: none",
    ),
    Rule(
        "8-bit-moments-stay-on-the-device",
        ("train", "optimizer", "bits"),
        lambda job: _bits(job) == 8 and _offload(job).offload_optimizer.device != "none",
        lambda job: (
            "moments in 8 bits, and zero_optimization.offload_optimizer: on the CPU a rank's whole "
            "share would be unpacked to 32 bits in every update"
        ),
        "set train.optimizer.bits: 32, or offload_optimizer.device: none",
    ),
    Rule(
        "paged-where-one-gpu-trains-all",
        ("train", "optimizer", "paged"),
        lambda job: _paged(job) and not job.halves_weights(_processes(job)),
        lambda job: (
            "a GPU reads the update's memory over the bus where it alone trains all weights in "
            f"bf16; here {_not_all(job)}"
        ),
        "leave paged out; with several GPUs use strategy: {type: fsdp, offload: cpu}",
    ),
    Rule(
        "tensor-has-no-loss-scale",
        ("train", "precision"),
        lambda job: (
            job.strategy.type != "fsdp" and _slices(job) > 1 and job.train.precision == "fp16"
        ),
        lambda job: "fp16 needs a loss scale on which all slices agree; tensor here has none",
        "set train.precision: bf16",
    ),
    Rule(
        "tensor-slices-plain-weights",
        ("model", "quantization"),
        lambda job: _slices(job) > 1 and _packed(job),
        lambda job: (
            f"{job.model.quantization} packs weights in blocks that run across the borders of "
            f"tensor({_slices(job)})'s slices"
        ),
        "set model.quantization: none, or use strategy: {type: fsdp}",
    ),
    Rule(
        "tensor-has-no-dora",
        ("adapter", "variant"),
        lambda job: _slices(job) > 1 and _variant(job) == "dora",
        lambda job: (
            "dora measures whole columns of each weight in every forward pass; under "
            f"tensor({_slices(job)}) a rank has slices of them"
        ),
        "use variant: plain, rslora or pissa",
    ),
    Rule(
        "pipeline-has-no-loss-scale",
        ("train", "precision"),
        lambda job: (
            job.strategy.type in ("pipeline", "layers")
            and _slices(job) == 1
            and job.train.precision == "fp16"
        ),
        lambda job: "fp16 needs a loss scale on which all stages agree; there is none here",
        "set train.precision: bf16",
    ),
    Rule(
        "compiled-layers-are-whole",
        ("train", "kernels"),
        lambda job: (
            job.train.kernels == "compiled"
            and (_cuts_the_model(job) or isinstance(job.strategy, DeepSpeed))
        ),
        lambda job: (
            f"{job.strategy.type} reaches into layers while they run, where compiled ones are "
            "closed"
        ),
        "set train.kernels: eager",
    ),
    Rule(
        "kept-layers-are-of-those-recomputed",
        ("train", "keep_layers"),
        lambda job: bool(
            job.train.keep_layers and job.train.gradient_checkpointing in ("none", "full")
        ),
        lambda job: (
            f"is {job.train.keep_layers}, but gradient_checkpointing: "
            f"{job.train.gradient_checkpointing} treats all layers alike"
        ),
        "set train.gradient_checkpointing: mlp or most, or leave keep_layers out",
    ),
    Rule(
        "recomputed-layers-are-whole",
        ("train", "gradient_checkpointing"),
        lambda job: (
            job.train.gradient_checkpointing in ("mlp", "most")
            and (job.strategy.type not in ("ddp", "fsdp") or _cuts_the_model(job))
        ),
        lambda job: (
            f"{job.train.gradient_checkpointing} chooses among the products of a whole layer; "
            f"{job.strategy.type} sends messages between them"
        ),
        "set gradient_checkpointing: full or none, or use strategy: {type: ddp} or {type: fsdp}",
    ),
    Rule(
        "activations-wait-under-ddp",
        ("train", "offload_activations"),
        lambda job: job.train.offload_activations and job.strategy.type != "ddp",
        lambda job: (
            "activations wait in main memory where each rank has the whole model; "
            f"{job.strategy.type} saves weights and messages among them"
        ),
        "leave it out, or use strategy: {type: ddp}; gradient_checkpointing: full saves most",
    ),
    Rule(
        "zero-bubble-needs-whole-weights",
        ("strategy", "tensor"),
        lambda job: _schedule(job) == "zero_bubble" and _slices(job) > 1,
        lambda job: (
            "zero_bubble computes gradients of weights apart from those of inputs, which torch "
            f"can't do for the slices of tensor({_slices(job)})"
        ),
        "use schedule: interleaved, which waits little too, or tensor: 1",
    ),
    Rule(
        "checkpoint-interval",
        ("save", "every"),
        lambda job: job.train.steps is not None and job.save.every > job.train.steps,
        lambda job: f"a checkpoint every {job.save.every} steps of a run of {job.train.steps}",
        "save more often, or 0 to save at the end only",
    ),
)


def check(job: Job, place: Callable[[KeyPath], str], machine: Machine | None = None) -> None:
    """Raises JobError with every rule that the job breaks. Where it is to run on `machine`, which
    is this one, also with what it lacks."""
    problems = [
        Problem(place(rule.key), rule.fact(job), rule.fix) for rule in RULES if rule.broken(job)
    ]
    found: list[Problem] = []
    problems += [Problem(place(("strategy",)), each.fact, each.fix) for each in _mesh_problems(job)]
    if isinstance(job.strategy, DeepSpeed):
        found += job.strategy.problems(_processes(job))
    if machine is not None:
        found += _lacking(job, machine)
    problems += [
        Problem(place(tuple(each.place.split("."))), each.fact, each.fix) for each in found
    ]
    if problems:
        raise JobError(problems)


def _lacking(job: Job, machine: Machine) -> list[Problem]:
    """Packages that aren't installed, and what the strategy needs besides."""
    needed = {
        "strategy.type": ("deepspeed", "deepspeed", isinstance(job.strategy, DeepSpeed)),
        "train.optimizer.bits": ("bitsandbytes", "quant", _bits(job) == 8),
        "model.quantization": ("bitsandbytes", "quant", _packed(job)),
    }
    problems = [
        Problem(place, f"{package} is not installed", f"pip install 'shardtune[{extra}]'")
        for place, (package, extra, used) in needed.items()
        if used and find_spec(package) is None
    ]
    if isinstance(job.strategy, DeepSpeed):
        problems += job.strategy.problems_here(gpu=machine.gpus > 0)
    return problems


def _mesh_problems(job: Job) -> tuple[Problem, ...]:
    """A mesh that doesn't multiply out to the processes that are to be started."""
    if isinstance(job.strategy, DeepSpeed):
        return ()  # it has a word of its own for its groups
    try:
        job.strategy.mesh(_processes(job)).require(_processes(job))
    except JobError as error:
        return error.problems
    return ()
