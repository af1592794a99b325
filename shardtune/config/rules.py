"""What no single section can check: the rules over the whole job, and what this machine lacks.

Rules are checked after `auto` values are resolved, all of them, so that a person sees every problem
at once. What is wrong with a strategy's own fields it says itself.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from shardtune.config.job import Job
from shardtune.config.rule import Rule, moment_bits, rank_count
from shardtune.config.strategy_rules import STRATEGY_RULES
from shardtune.config.value_rules import VALUE_RULES
from shardtune.core.capabilities import Need
from shardtune.core.files.yaml_document import KeyPath
from shardtune.core.host.machine import Machine
from shardtune.errors import JobError, Problem

RULES: tuple[Rule, ...] = (*VALUE_RULES, *STRATEGY_RULES)


def check(job: Job, place: Callable[[KeyPath], str], machine: Machine | None = None) -> None:
    """Raises JobError with every rule that the job breaks. Where it is to run on `machine`, which
    is this one, also with what it lacks."""
    ranks = rank_count(job)
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
    packed = job.model.quantization in ("nf4", "int8")  # in blocks, restored for each matmul
    needed = [
        *(("strategy.type", need) for need in job.strategy.capabilities.needs),
        *([("train.optimizer.bits", quant)] if moment_bits(job) == 8 else []),
        *([("model.quantization", quant)] if packed else []),
        *((f"track.{each.type}", need) for each in job.track for need in each.needs),
    ]
    problems = [
        Problem(place, f"{need.package} is not installed", need.command)
        for place, need in needed
        if find_spec(need.package) is None
    ]
    here = job.strategy.problems_here(gpu=machine.gpus > 0, precision=job.train.compute_precision)
    return [*problems, *here]
