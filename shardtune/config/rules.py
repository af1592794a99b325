"""What no single section can check: a table of rules over the whole job.

A rule is a name, the key it speaks of, the test that must be false, and the fact and fix to print.
Whether a strategy can do what a job asks for is read from its capabilities; what is wrong with its
own fields it says itself. Rules are checked after `auto` values are resolved, all of them, so that
a person sees every problem at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from shardtune.config.job import AdamW, Job, LoRA, NoAdapter
from shardtune.core.capabilities import Can, Capabilities, Need, Refusal, Support
from shardtune.core.machine import Machine
from shardtune.core.one_cycle import OneCycle
from shardtune.core.strategy import Devices
from shardtune.core.yaml_document import KeyPath, dotted
from shardtune.errors import JobError, Problem
from shardtune.parallel import STRATEGIES, Strategy, strategies_that


@dataclass(frozen=True)
class Rule:
    """One row of the table. `fact` and `fix` may name numbers and strategies: they see the job."""

    name: str
    key: KeyPath
    broken: Callable[[Job], bool]
    fact: Callable[[Job], str]
    fix: str | Callable[[Job], str]

    def problem(self, job: Job, place: Callable[[KeyPath], str]) -> Problem:
        """What is told of a job that breaks it."""
        fix = self.fix if isinstance(self.fix, str) else self.fix(job)
        return Problem(place(self.key), self.fact(job), fix)


def _shared_names(job: Job) -> list[str]:
    """Names that two sets of one side bear. A training set may be called as an evaluation set."""
    sides = (job.data.train, job.data.eval_sources)
    counts = (Counter(source.name for source in side) for side in sides)
    return sorted({name for count in counts for name, times in count.items() if times > 1})


def _prefixed(job: Job) -> list[str]:
    """What is wrong with sets that have a prefix, and a format that has no source for it."""
    return [
        f"{each.label}: a prefix stands before sources, and format: {each.format} has none"
        for each in (*job.data.train, *job.data.eval_sources)
        if each.prefix and each.format != "source_target"
    ]


def _processes(job: Job) -> int:
    return job.launch.processes if isinstance(job.launch.processes, int) else 1


def _shares(job: Job) -> int:
    """Into how many shares the rows of a step go: ranks with parts of one model share theirs."""
    return job.strategy.mesh(_processes(job)).data_ranks


def _at_once(job: Job) -> int:
    micro_batch = job.train.micro_batch
    return micro_batch * _shares(job) if isinstance(micro_batch, int) else 0


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
    """What keeps one rank from training all weights with halves of them in CPU memory."""
    reasons = {
        f"an adapter ({job.adapter.type}) is trained": not isinstance(job.adapter, NoAdapter),
        f"precision is {job.train.precision}": job.train.precision != "bf16",
        f"moments have {_bits(job)} bits": _bits(job) != 32,
        f"strategy is {job.strategy.type}": not _can(job).split_weights,
        f"there are {_processes(job)} ranks": _processes(job) > 1,
    }
    return " and ".join(reason for reason, holds in reasons.items() if holds)


def _leaks(job: Job) -> list[str]:
    """What is named on both sides. Two splits of one data set may be."""
    held_out = {(source.path, source.config, source.split) for source in job.data.eval_sources}
    return [one.path for one in job.data.train if (one.path, one.config, one.split) in held_out]


# What a strategy can do ---------------------------------------------------------------------------


def _can(job: Job) -> Capabilities:
    return job.strategy.capabilities


def _asked(job: Job, key: KeyPath) -> str:
    """The value at a key; nothing where a job has no such key, or `auto`."""
    value: object = job
    for part in key:
        value = getattr(value, str(part), "")
    return "" if value == "auto" else str(value)


def _takes(name: str, key: KeyPath, support: Callable[[Capabilities], Support]) -> Rule:
    """A rule: the value at a key is one that the strategy takes."""

    def refusal(job: Job) -> Refusal:
        return support(_can(job)).refusals.get(_asked(job, key), Refusal(""))

    def fact(job: Job) -> str:
        asked, taken = _asked(job, key), _either(support(_can(job)).values)
        return refusal(job).fact or f"is {asked}, and strategy {job.strategy.type} takes {taken}"

    def fix(job: Job) -> str:
        asked = _asked(job, key)
        here = f"set {dotted(key)}: {_either(support(_can(job)).values)}"
        if refusal(job).fix:
            return f"{refusal(job).fix}, or {here}"
        return here + _or_use(lambda each: asked in support(each.capabilities))

    def broken(job: Job) -> bool:
        asked = _asked(job, key)
        return bool(asked) and asked not in support(_can(job))

    return Rule(name, key, broken, fact, fix)


def _allows(
    name: str,
    key: KeyPath,
    wanted: Callable[[Job], bool],
    can: Callable[[Capabilities], Can],
    unable: str,
    without: str,
) -> Rule:
    """A rule: what is asked for by a key is something that the strategy can do."""

    def fact(job: Job) -> str:
        found = can(_can(job))
        return (
            found.fact if isinstance(found, Refusal) else f"strategy {job.strategy.type} {unable}"
        )

    return Rule(
        name,
        key,
        lambda job: wanted(job) and not can(_can(job)),
        fact,
        lambda job: without + _or_use(lambda each: can(each.capabilities)),
    )


def _or_use(can: Callable[[Strategy], object]) -> str:
    """The end of a fix: strategies that can, if there are any."""
    named = strategies_for(can)
    return f", or {named}" if named else ""


def strategies_for(can: Callable[[Strategy], object]) -> str:
    """A fix: strategies that can, if there are any."""
    names = [each.written() for each in strategies_that(can)]
    return f"use strategy: {_either(names)}" if names else ""


def _offloading() -> str:
    """The end of a fix: what keeps optimizer states of several GPUs in CPU memory."""
    several = Devices(nodes=1, per_node=2, gpu=True)
    offered = [each for kind in STRATEGIES.values() for each in kind.remedies(several)]
    names = [each.written() for each in offered if "optim" in each.layout().home]
    return f"; with several GPUs use strategy: {_either(names)}" if names else ""


def _either(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


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
            f"{job.train.warmup_steps} steps of warmup, and schedule: one_cycle, which begins with "
            f"a rise over {job.train.one_cycle.pct_start:.0%} of the run"
        ),
        "leave warmup_steps out; train.one_cycle.pct_start says how long the rate rises",
    ),
    Rule(
        "one-cycle-is-the-schedule",
        ("train", "one_cycle"),
        lambda job: job.train.schedule != "one_cycle" and job.train.one_cycle != OneCycle(),
        lambda job: f"shapes a cycle, and schedule is {job.train.schedule}",
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
        "prefix-before-a-source",
        ("data",),
        lambda job: bool(_prefixed(job)),
        lambda job: ", ".join(_prefixed(job)),
        "leave prefix out, or use format: source_target",
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
        "new-tokens-are-trained",
        ("model", "add_tokens"),
        lambda job: bool(job.model.add_tokens) and not _trains_modules(job),
        lambda job: (
            f"{', '.join(job.model.add_tokens)} would never come to mean anything: an adapter "
            f"({job.adapter.type}) by itself doesn't train the embedding"
        ),
        "use adapter: {type: lora, modules_to_save: [embed_tokens, lm_head]}, or {type: none}",
    ),
    _takes("strategy-takes-precision", ("train", "precision"), lambda can: can.precisions),
    _takes("strategy-takes-quantization", ("model", "quantization"), lambda can: can.quantizations),
    _takes("strategy-takes-adapter", ("adapter", "type"), lambda can: can.adapters),
    _takes("strategy-takes-variant", ("adapter", "variant"), lambda can: can.variants),
    _takes("strategy-takes-bits", ("train", "optimizer", "bits"), lambda can: can.optimizer_bits),
    _takes(
        "strategy-takes-checkpointing",
        ("train", "gradient_checkpointing"),
        lambda can: can.checkpointing,
    ),
    Rule(
        "paged-where-one-gpu-trains-all",
        ("train", "optimizer", "paged"),
        lambda job: _paged(job) and not job.splits_weights(_processes(job)),
        lambda job: (
            "a GPU reads the update's memory over the bus where it alone trains all weights in "
            f"bf16; here {_not_all(job)}"
        ),
        lambda job: f"leave paged out{_offloading()}",
    ),
    _allows(
        "strategy-takes-compiled-layers",
        ("train", "kernels"),
        lambda job: job.train.kernels == "compiled",
        lambda can: can.compiled_layers,
        "computes layers as transformers writes them, not compiled ones",
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
    _allows(
        "strategy-offloads-activations",
        ("train", "offload_activations"),
        lambda job: job.train.offload_activations,
        lambda can: can.activation_offload,
        "keeps activations on the device",
        "leave it out: gradient_checkpointing: full saves most",
    ),
    _allows(
        "strategy-resumes",
        ("save", "every"),
        lambda job: job.save.every > 0,
        lambda can: can.resumes,
        "writes no checkpoints that a run could go on from",
        "set save.every: 0, which writes the result alone",
    ),
    _allows(
        "strategy-resumes-from-the-best",
        ("save", "best"),
        lambda job: job.save.best is not None,
        lambda can: can.resumes,
        "writes no checkpoints that a result could be written from",
        "leave save.best out, which writes the result from the last step",
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
    ranks = _processes(job)
    problems = [rule.problem(job, place) for rule in RULES if rule.broken(job)]
    found = job.strategy.problems(ranks)
    if machine is not None:
        found += _lacking(job, machine)
    problems += [
        Problem(place(tuple(each.place.split("."))), each.fact, each.fix) for each in found
    ]
    problems += _secrets_in_trackers(job, place)
    if problems:
        raise JobError(problems)


def _secrets_in_trackers(job: Job, place: Callable[[KeyPath], str]) -> list[Problem]:
    """The job is written to the run directory, and shown: a secret in it is, too."""
    fact = "has a password or a token in it, which would be written to the run directory"
    fix = "leave it out; set it in the environment, as docs/track.md says"
    return [
        Problem(place(("track", index, key)), fact, fix)
        for index, each in enumerate(job.track)
        for key in each.fields_with_secrets()
    ]


def _lacking(job: Job, machine: Machine) -> list[Problem]:
    """Packages that aren't installed, and what the strategy lacks besides."""
    quant = Need("bitsandbytes", "quant")
    needed = [
        *(("strategy.type", need) for need in _can(job).needs),
        *([("train.optimizer.bits", quant)] if _bits(job) == 8 else []),
        *([("model.quantization", quant)] if _packed(job) else []),
        *((f"track.{each.type}", need) for each in job.track for need in each.needs),
    ]
    problems = [
        Problem(place, f"{need.package} is not installed", need.command)
        for place, need in needed
        if find_spec(need.package) is None
    ]
    here = job.strategy.problems_here(gpu=machine.gpus > 0, precision=job.train.compute_precision)
    return [*problems, *here]
