"""Values of a job that contradict each other, whatever the strategy: a table of rules."""

from __future__ import annotations

from collections import Counter

from shardtune.config.job import Job, LoRA, NoAdapter
from shardtune.config.rule import Rule, rank_count
from shardtune.core.lr_one_cycle import OneCycle
from shardtune.core.model.chat_templates import GIVEN_VARIABLES


def _shared_names(job: Job) -> list[str]:
    """Names that two sets of one side bear. A training set may be called as an evaluation set."""
    sides = (job.data.train, job.data.eval_sources)
    counts = (Counter(source.name for source in side) for side in sides)
    return sorted({name for count in counts for name, times in count.items() if times > 1})


def _prefixed(job: Job) -> list[str]:
    """What is wrong with sets that have a prefix, and a format that has no source for it."""
    return [
        f"{each.label}: prefix is put before a source, and format: {each.format} has none"
        for each in (*job.data.train, *job.data.eval_sources)
        if each.prefix and each.format != "source_target"
    ]


def _leaks(job: Job) -> list[str]:
    """What is named on both sides. Two splits of one data set may be."""
    held_out = {(source.path, source.config, source.split) for source in job.data.eval_sources}
    return [one.path for one in job.data.train if (one.path, one.config, one.split) in held_out]


def _shares(job: Job) -> int:
    """Into how many shares the rows of a step go: ranks with parts of one model share theirs."""
    return job.strategy.mesh(rank_count(job)).data_ranks


def _at_once(job: Job) -> int:
    micro_batch = job.train.micro_batch
    return micro_batch * _shares(job) if isinstance(micro_batch, int) else 0


def _variant(job: Job) -> str:
    return job.adapter.variant if isinstance(job.adapter, LoRA) else ""


def _trains_modules(job: Job) -> bool:
    """Whether whole modules are trained; only the model can tell whether the right ones are."""
    adapter = job.adapter
    return isinstance(adapter, NoAdapter) or (
        isinstance(adapter, LoRA) and bool(adapter.modules_to_save)
    )


def _unsettable(job: Job) -> list[str]:
    """What is wrong with names of variables of the chat template."""
    return [
        f"{name} is given to every template, and can't be set"
        if name in GIVEN_VARIABLES
        else f"{name!r} is no name that a template can read"
        for name in job.data.chat_template_kwargs
        if name in GIVEN_VARIABLES or not name.isidentifier()
    ]


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count > 1)}"


VALUE_RULES: tuple[Rule, ...] = (
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
            f"{_steps(job.train.warmup_steps)} of warmup in a run of {job.train.steps}: "
            "the learning rate would never reach its peak"
        ),
        "warm up for fewer steps, or train for more",
    ),
    Rule(
        "warmup-once",
        ("train", "warmup_ratio"),
        lambda job: job.train.warmup_ratio is not None and job.train.warmup_steps > 0,
        lambda job: (
            f"both warmup_ratio ({job.train.warmup_ratio}) and warmup_steps "
            f"({job.train.warmup_steps}) are given"
        ),
        "keep one of the two",
    ),
    Rule(
        "schedule-within-steps",
        ("train", "schedule_start"),
        lambda job: job.train.steps is not None and job.train.schedule_start >= job.train.steps,
        lambda job: (
            f"the schedule begins after step {job.train.schedule_start} of {job.train.steps}"
        ),
        "train for more steps, or set train.schedule_start: 0",
    ),
    Rule(
        "one-cycle-has-its-own-warmup",
        ("train", "warmup_steps"),
        lambda job: job.train.schedule == "one_cycle" and job.train.warmup_steps > 0,
        lambda job: (
            f"{_steps(job.train.warmup_steps)} of warmup, and schedule: one_cycle, which begins "
            f"with a rise over {job.train.one_cycle.pct_start:.0%} of the run"
        ),
        "leave warmup_steps out; train.one_cycle.pct_start says how long the rate rises",
    ),
    Rule(
        "router-losses-read-layers-as-written",
        ("train", "kernels"),
        lambda job: (
            job.train.kernels == "compiled"
            and bool(job.train.balances_experts or job.train.router_z_loss_coef)
        ),
        lambda job: "is compiled, and router losses need hooks that compiled layers bypass",
        "set train.kernels: eager, or train.router_aux_loss_coef: 0 and "
        "train.router_z_loss_coef: 0",
    ),
    Rule(
        "one-cycle-is-the-schedule",
        ("train", "one_cycle"),
        lambda job: job.train.schedule != "one_cycle" and job.train.one_cycle != OneCycle(),
        lambda job: f"is set, but train.schedule is {job.train.schedule}",
        "set train.schedule: one_cycle, or leave it out",
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
            job.data.packs
            and job.model.attention == "flash_attention_2"
            and job.train.micro_batch != 1
        ),
        lambda job: (
            f"is {job.train.micro_batch}, but flash_attention_2 isolates packed documents only in "
            "micro-batches of one row"
        ),
        "set train.micro_batch: 1, data.packing: false, or model.attention: sdpa",
    ),
    Rule(
        "every-rank-has-rows",
        ("launch", "processes"),
        lambda job: _shares(job) > job.train.global_batch,
        lambda job: (
            f"{_shares(job)} processes share {job.train.global_batch} "
            f"row{'s' * (job.train.global_batch > 1)} a step: "
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
        "prefix-before-a-source",
        ("data",),
        lambda job: bool(_prefixed(job)),
        lambda job: ", ".join(_prefixed(job)),
        "leave prefix out, or use format: source_target",
    ),
    Rule(
        "template-variables-are-free",
        ("data", "chat_template_kwargs"),
        lambda job: bool(_unsettable(job)),
        lambda job: ", ".join(_unsettable(job)),
        "leave it out; set variables of the template, such as {enable_thinking: false}",
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
            f"is {job.model.quantization}, and adapter.type is none: a full fine-tune can't update "
            "quantized weights, as an update is far smaller than the spacing of their values"
        ),
        "train an adapter (`adapter: {type: lora}`), or set model.quantization: none",
    ),
    Rule(
        "pissa-needs-all-digits",
        ("adapter", "variant"),
        lambda job: job.model.quantization != "none" and _variant(job) == "pissa",
        lambda job: (
            "pissa moves the top singular components of each weight into the adapter and keeps the "
            f"rest as the base; a tool that loads the adapter quantizes ({job.model.quantization}) "
            "another base"
        ),
        "use variant: plain, dora or rslora, or set model.quantization: none",
    ),
    Rule(
        "fp8-computes-in-bf16",
        ("train", "precision"),
        lambda job: job.model.quantization == "fp8" and job.train.precision != "bf16",
        lambda job: (
            f"is {job.train.precision}, but matmuls with fp8 weights give bf16: GPUs' row-wise "
            "scaled FP8 matmul has no other output"
        ),
        "set train.precision: bf16, or model.quantization: none",
    ),
    Rule(
        "new-tokens-are-trained",
        ("model", "add_tokens"),
        lambda job: bool(job.model.add_tokens) and not _trains_modules(job),
        lambda job: (
            f"the embeddings of {', '.join(job.model.add_tokens)} would stay untrained: an adapter "
            f"({job.adapter.type}) alone doesn't train the embedding"
        ),
        "use adapter: {type: lora, modules_to_save: [embed_tokens, lm_head]}, or {type: none}",
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
        "checkpoint-interval",
        ("save", "every"),
        lambda job: job.train.steps is not None and job.save.every > job.train.steps,
        lambda job: f"a checkpoint every {job.save.every} steps of a run of {job.train.steps}",
        "save more often, or 0 to save at the end only",
    ),
)
