"""What a job asks of its strategy, and the strategy can't do: a table of rules.

Each reads the strategy's capabilities, and names in its fix the strategies that have what is asked
for. No strategy is known here by its name.
"""

from __future__ import annotations

from collections.abc import Callable

from shardtune.config.job import AdamW, Job, NoAdapter
from shardtune.config.rule import Rule, moment_bits, rank_count
from shardtune.core.capabilities import Can, Capabilities, Refusal, Support
from shardtune.core.files.yaml_document import KeyPath, dotted
from shardtune.core.strategy import Devices
from shardtune.errors import either
from shardtune.parallel import STRATEGIES, Strategy, strategies_that


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
        asked, taken = _asked(job, key), either(support(_can(job)).values)
        return refusal(job).fact or f"is {asked}, and strategy {job.strategy.type} takes {taken}"

    def fix(job: Job) -> str:
        asked = _asked(job, key)
        here = f"set {dotted(key)}: {either(support(_can(job)).values)}"
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
    return f"use strategy: {either(names)}" if names else ""


def _offloading() -> str:
    """The end of a fix: what keeps optimizer states of several GPUs in CPU memory."""
    several = Devices(nodes=1, per_node=2, gpu=True)
    offered = [each for kind in STRATEGIES.values() for each in kind.remedies(several)]
    names = [each.written() for each in offered if "optim" in each.layout().home]
    return f"; with several GPUs use strategy: {either(names)}" if names else ""


def _paged(job: Job) -> bool:
    return isinstance(job.train.optimizer, AdamW) and job.train.optimizer.paged


def _not_all(job: Job) -> str:
    """What keeps one rank from training all weights with halves of them in CPU memory."""
    reasons = {
        f"an adapter ({job.adapter.type}) is trained": not isinstance(job.adapter, NoAdapter),
        f"precision is {job.train.precision}": job.train.precision != "bf16",
        f"moments have {moment_bits(job)} bits": moment_bits(job) != 32,
        f"strategy is {job.strategy.type}": not _can(job).split_weights,
        f"there are {rank_count(job)} ranks": rank_count(job) > 1,
    }
    return " and ".join(reason for reason, holds in reasons.items() if holds)


STRATEGY_RULES: tuple[Rule, ...] = (
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
        lambda job: _paged(job) and not job.splits_weights(rank_count(job)),
        lambda job: (
            f"needs a full fine-tune on one GPU, in bf16 with 32-bit moments; here {_not_all(job)}"
        ),
        lambda job: f"leave paged out{_offloading()}",
    ),
    _allows(
        "strategy-takes-compiled-layers",
        ("train", "kernels"),
        lambda job: job.train.kernels == "compiled",
        lambda can: can.compiled_layers,
        "doesn't support compiled layers",
        "set train.kernels: eager",
    ),
    _allows(
        "strategy-offloads-activations",
        ("train", "offload_activations"),
        lambda job: job.train.offload_activations,
        lambda can: can.activation_offload,
        "doesn't offload activations",
        "leave it out: gradient_checkpointing: full saves most",
    ),
    _allows(
        "strategy-has-router-losses",
        ("train", "router_aux_loss_coef"),
        lambda job: bool(job.train.balances_experts or job.train.router_z_loss_coef),
        lambda can: can.router_losses,
        "doesn't support router losses",
        "set train.router_aux_loss_coef: 0 and train.router_z_loss_coef: 0",
    ),
    _allows(
        "strategy-resumes",
        ("save", "every"),
        lambda job: job.save.every > 0,
        lambda can: can.resumes,
        "writes no checkpoints to resume from",
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
)
