"""Reads a DeepSpeed JSON file as people write it, and turns it into our fields.

DeepSpeed ignores keys that it doesn't know at the top level, so a misspelt one does nothing,
silently: here every key of every level is checked. What the job decides (batch, precision,
optimizer, schedule, clipping) may be `"auto"` or repeat the job's value; another value is an error,
because one of the two would be ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from shardtune.core.files.regular_file import open_regular
from shardtune.core.files.yaml_document import KeyPath, dotted, parse_document
from shardtune.core.setup import Precision
from shardtune.core.strategy import JobFacts, ToldValue
from shardtune.errors import JobError, Problem, did_you_mean
from shardtune.parallel.deepspeed.deepspeed_fields import DeepSpeedFields
from shardtune.parallel.deepspeed.json_keys import (
    KNOWN,
    NOT_FIELDS,
    OLD_NAMES,
    Known,
    LeftOutKey,
    section_of,
    switched_off,
)
from shardtune.parallel.deepspeed.json_values import (
    MISSING,
    OPTIMIZERS,
    SCHEDULERS,
    at,
    file_precision,
    told_values,
    two_precisions,
)

Chosen = TypeVar("Chosen", bound=DeepSpeedFields)
AUTO = "auto"
LARGEST_FILE = 1 << 18


@dataclass(frozen=True)
class Read(Generic[Chosen]):
    """The file as a strategy, and why each `auto` is what it is."""

    strategy: Chosen
    reasons: dict[KeyPath, str]
    """By the job's key, such as `train.learning_rate` or `strategy.zero_optimization.stage`."""
    notes: tuple[str, ...] = ()
    """What is left out, and why."""


def read(strategy: Chosen, facts: JobFacts) -> Read[Chosen]:
    """The strategy that `strategy.config` describes. Raises JobError with every problem of it."""
    assert strategy.config is not None
    others = sorted(strategy.model_fields_set - {"type", "config"})
    if others:
        fact = f"both a file ({strategy.config}) and {', '.join(others)} are given"
        raise JobError(Problem("strategy.config", fact, "keep one; the file takes the same keys"))
    return _Reader(type(strategy), Path(strategy.config), facts).read()


def micro_batch(strategy: DeepSpeedFields, global_batch: int, ranks: int) -> tuple[int, str] | None:
    """The rows of a forward pass that the file asks for, and the reason; None where it leaves them
    open. A job that leaves them open as well takes the file's."""
    assert strategy.config is not None
    path = Path(strategy.config)
    value, lines = _parse(path)
    rows, steps = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    if _is_count(value.get(rows)):
        return value[rows], f"{path.name}:{lines[rows,]}"
    if _is_count(value.get(steps)):
        share = f"global_batch({global_batch}) / ({steps}({value[steps]}) x ranks({ranks}))"
        found = max(1, math.ceil(global_batch / (value[steps] * ranks)))
        return found, f"{path.name}:{lines[steps,]}: {share}"
    return None


def told(strategy: DeepSpeedFields, ranks: int) -> dict[KeyPath, ToldValue]:
    """What the file says of the job's section `train`."""
    assert strategy.config is not None
    path = Path(strategy.config)
    return told_values(*_parse(path), path.name, ranks)


def precision(strategy: DeepSpeedFields) -> tuple[Precision, str] | None:
    """The precision that the file switches on, and the reason; None where it leaves it open."""
    assert strategy.config is not None
    path = Path(strategy.config)
    value, lines = _parse(path)
    found = file_precision(value)
    return found and (found[0], f"{path.name}:{lines[found[1]]}: {dotted(found[1])}")


# What the job decides ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Owned:
    """A key whose value is the job's."""

    value: Any
    key: str
    """The job's key that decides."""
    shown: str = ""
    """Where the value is computed: how."""


def _owned(facts: JobFacts) -> dict[KeyPath, _Owned]:
    rows, ranks, accumulation = facts.micro_batch, facts.ranks, facts.accumulation
    optimizer = facts.optimizer
    return {
        ("train_batch_size",): _Owned(facts.global_batch, "train.global_batch"),
        ("train_micro_batch_size_per_gpu",): _Owned(rows, "train.micro_batch"),
        ("gradient_accumulation_steps",): _Owned(
            accumulation,
            "train.global_batch",
            f"global_batch({facts.global_batch}) / (micro_batch({rows}) x ranks({ranks}))",
        ),
        ("gradient_clipping",): _Owned(facts.max_grad_norm or 0.0, "train.max_grad_norm"),
        ("bf16", "enabled"): _Owned(facts.precision == "bf16", "train.precision"),
        ("bfloat16", "enabled"): _Owned(facts.precision == "bf16", "train.precision"),
        ("fp16", "enabled"): _Owned(facts.precision == "fp16", "train.precision"),
        ("optimizer", "params", "lr"): _Owned(facts.learning_rate, "train.learning_rate"),
        ("optimizer", "params", "betas"): _Owned(list(optimizer.betas), "train.optimizer.betas"),
        ("optimizer", "params", "eps"): _Owned(optimizer.eps, "train.optimizer.eps"),
        ("optimizer", "params", "momentum"): _Owned(optimizer.momentum, "train.optimizer.momentum"),
        ("optimizer", "params", "weight_decay"): _Owned(
            optimizer.weight_decay, "train.optimizer.weight_decay"
        ),
        ("scheduler", "params", "warmup_min_lr"): _Owned(0.0, "train.schedule"),
        ("scheduler", "params", "warmup_max_lr"): _Owned(
            facts.learning_rate, "train.learning_rate"
        ),
        ("scheduler", "params", "warmup_num_steps"): _Owned(
            facts.warmup_steps, "train.warmup_steps"
        ),
        ("scheduler", "params", "total_num_steps"): _Owned(facts.steps, "train.steps"),
        ("scheduler", "params", "warmup_type"): _Owned("linear", "train.schedule"),
        ("scheduler", "params", "warmup_min_ratio"): _Owned(0.0, "train.schedule"),
        ("scheduler", "params", "cos_min_ratio"): _Owned(0.0, "train.schedule"),
    }


def _sized(facts: JobFacts) -> dict[KeyPath, tuple[int | None, str]]:
    """`auto` sizes of ZeRO-3, by the rules of Hugging Face's Trainer, whose word `auto` is."""
    width = facts.hidden_size
    rules: dict[str, tuple[int | None, str]] = {
        "reduce_bucket_size": (width and width * width, "hidden_size squared"),
        "stage3_prefetch_bucket_size": (
            width and 9 * width * width // 10,
            "0.9 x hidden_size squared",
        ),
        "stage3_param_persistence_threshold": (width and 10 * width, "10 x hidden_size"),
    }
    return {("zero_optimization", key): rule for key, rule in rules.items()}


class _Reader(Generic[Chosen]):
    def __init__(self, kind: type[Chosen], path: Path, facts: JobFacts) -> None:
        self.kind = kind
        self.path = path
        self.facts = facts
        self.problems: list[Problem] = []
        self.reasons: dict[KeyPath, str] = {}
        self.notes: list[str] = []
        self.lines: dict[KeyPath, int] = {}

    def read(self) -> Read[Chosen]:
        value, self.lines = _parse(self.path)
        self._check_keys(value, KNOWN, ())
        if not self.problems:
            self._check_rules(value)
            self._check_owned(value)
        self._stop()
        strategy = self._strategy(value)
        self._stop()
        return Read(strategy, self.reasons, tuple(self.notes))

    # Steps ------------------------------------------------------------------------------------

    def _check_keys(self, value: Mapping[str, Any], known: Known, path: KeyPath) -> None:
        for key, child in value.items():
            here = (*path, key)
            if key not in known:
                near = did_you_mean(key, known)
                elsewhere = section_of(key)
                fix = f"did you mean {near!r}?" if near else ""
                if not near and elsewhere:
                    fix = (
                        f"it belongs into {elsewhere}" if elsewhere != "." else "move it to the top"
                    )
                self._problem(here, "is no key of DeepSpeed's here", fix or "remove it")
            elif isinstance(known[key], LeftOutKey):
                if not switched_off(child):
                    place = f"{self.path.name}:{self.lines[here]}: {dotted(here)}"
                    self.notes.append(f"{place} is left out: {known[key].reason}")
            elif isinstance(known[key], str) and switched_off(child):
                continue
            elif isinstance(known[key], str):
                self._problem(here, f"is not used: {known[key]}", "remove it from the file")
            elif isinstance(known[key], Mapping):
                if isinstance(child, dict):
                    self._check_keys(child, known[key], here)
                else:
                    self._problem(here, f"is {json.dumps(child)}", "give an object: {...}")

    def _check_rules(self, value: Mapping[str, Any]) -> None:
        """What the job decides by a word, not by a number."""
        kind = value.get("optimizer", {}).get("type", AUTO)
        rule = self.facts.optimizer.type
        if kind != AUTO and OPTIMIZERS.get(str(kind).lower()) != rule:
            self._contradiction(("optimizer", "type"), kind, "train.optimizer.type", rule)
        kind = value.get("scheduler", {}).get("type", AUTO)
        curve = self.facts.schedule
        if kind != AUTO and str(kind) not in SCHEDULERS:
            fact = f"is {json.dumps(kind)}; of DeepSpeed's there are {', '.join(SCHEDULERS)} here"
            fix = "remove the block and set train.schedule, which has torch's one_cycle, too"
            self._problem(("scheduler", "type"), fact, fix)
        elif kind != AUTO and SCHEDULERS[kind] != curve:
            self._contradiction(("scheduler", "type"), kind, "train.schedule", curve)
        if two_precisions(value):
            fact = "bf16 is enabled as well, and one of them has to go"
            self._problem(("fp16", "enabled"), fact, 'set one of them to false or "auto"')
        summed = at(value, ("data_types", "grad_accum_dtype"))
        if summed not in (MISSING, None, AUTO, "fp32"):
            fact = f"is {json.dumps(summed)}, but gradients are accumulated in fp32"
            self._problem(("data_types", "grad_accum_dtype"), fact, "remove it")

    def _check_owned(self, value: dict[str, Any]) -> None:
        for path, owned in _owned(self.facts).items():
            given = at(value, path)
            if given == AUTO:
                how = f" = {owned.shown}" if owned.shown else ""
                self._reason(tuple(owned.key.split(".")), f"{dotted(path)}{how}")
            elif given is MISSING or owned.value is None:  # steps of so many epochs
                continue
            elif not _same(given, owned.value):
                self._contradiction(path, given, owned.key, owned.value, owned.shown)
        for path, (size, rule) in _sized(self.facts).items():
            if size is not None and at(value, path) == AUTO:
                value["zero_optimization"][path[-1]] = size
                key: KeyPath = ("strategy", *path)
                self.reasons[key] = f"{rule}, which is {self.facts.hidden_size}"

    def _strategy(self, value: Mapping[str, Any]) -> Chosen:
        fields = {
            key: child
            for key, child in value.items()
            if key not in NOT_FIELDS and not isinstance(KNOWN[key], str | LeftOutKey)
        }
        zero = fields.get("zero_optimization", {})
        of_zero = KNOWN["zero_optimization"]
        fields["zero_optimization"] = {
            key: child
            for key, child in zero.items()
            if not isinstance(of_zero[key], str | LeftOutKey)
        }
        if "fp16" in fields:
            fields["fp16"] = {k: v for k, v in fields["fp16"].items() if k != "enabled"}
        fields.setdefault("zero_optimization", {}).setdefault("stage", 0)  # DeepSpeed's default
        fields = self._without_auto(fields, ())
        try:
            return self.kind.model_validate_json(json.dumps(fields))
        except ValidationError as error:
            for item in error.errors(include_url=False):
                fact = f"is {json.dumps(item['input'])}: {item['msg']}"
                self._problem(item["loc"], fact, "DeepSpeed's documentation says what it takes")
            raise JobError(self.problems) from None

    def _without_auto(self, value: Mapping[str, Any], path: KeyPath) -> dict[str, Any]:
        """Leaves out what is still `auto`; says of each value where it comes from."""
        kept: dict[str, Any] = {}
        for key, child in value.items():
            here = (*path, key)
            if isinstance(child, dict):
                kept[key] = self._without_auto(child, here)
            elif child == AUTO:
                where: KeyPath = ("strategy", *here)
                self.reasons[where] = f"{self.path.name} leaves it open: the default"
            else:
                kept[key] = child
                line = self.lines.get(here)
                reason = f"{self.path.name}:{line}" if line else "DeepSpeed's default"
                self.reasons.setdefault(("strategy", *here), reason)
        return kept

    # Small parts ------------------------------------------------------------------------------

    def _reason(self, key: KeyPath, what: str) -> None:
        """One value of the job may stand for several keys of the file."""
        before = self.reasons.get(key)
        self.reasons[key] = f"{before}, {what}" if before else f"{self.path.name}: {what}"

    def _contradiction(
        self, path: KeyPath, given: Any, key: str, wanted: Any, shown: str = ""
    ) -> None:
        how = f" ({shown})" if shown else ""
        fact = f"is {json.dumps(given)}, but the job's {key} makes it {json.dumps(wanted)}{how}"
        self._problem(path, fact, f'write "auto" there, or change {key} in the job')

    def _problem(self, path: KeyPath, fact: str, fix: str) -> None:
        nearest = next(path[:end] for end in range(len(path), -1, -1) if path[:end] in self.lines)
        place = f"{self.path}:{self.lines[nearest]}: {dotted(path)}"
        self.problems.append(Problem(place, fact, fix))

    def _stop(self) -> None:
        if self.problems:
            raise JobError(self.problems)


def _parse(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The file's content, and the line of each key."""
    try:
        with open_regular(path) as file:
            text = file.read(LARGEST_FILE).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        fix = "name a DeepSpeed JSON file, relative to the folder that you start in"
        raise JobError(Problem("strategy.config", f"{path} can't be read: {reason}", fix)) from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise JobError(_not_json(path, text, error)) from None
    if not isinstance(value, dict):
        fix = 'it looks like {"zero_optimization": {"stage": 2}}'
        raise JobError(Problem(str(path), "is not a JSON object", fix))
    lines = dict(parse_document(text, str(path)).lines)  # also finds keys written twice
    return _with_names_of_today(value, lines), lines


def _with_names_of_today(value: dict[str, Any], lines: dict[KeyPath, int]) -> dict[str, Any]:
    """The file with DeepSpeed's older and second names replaced; `lines` is told of them."""
    zero = value.get("zero_optimization")
    if not isinstance(zero, dict):
        return value
    named = dict(zero)
    for old, (new, meaning) in OLD_NAMES.items():
        if old in named:
            meant = meaning(named.pop(old))
            named.setdefault(new, meant)
            lines.setdefault(("zero_optimization", new), lines["zero_optimization", old])
            for key in meant if isinstance(meant, dict) else ():
                inner: KeyPath = ("zero_optimization", new, key)
                lines.setdefault(inner, lines["zero_optimization", old])
    return {**value, "zero_optimization": named}


def _not_json(path: Path, text: str, error: ValueError) -> Problem:
    if not isinstance(error, json.JSONDecodeError):
        return Problem(str(path), str(error), "write a finite number")
    place = f"{path}:{error.lineno}"
    rest = text.splitlines()[error.lineno - 1][error.colno - 1 :].lstrip() if text else ""
    if rest.startswith(("//", "/*", "#")):
        return Problem(place, "has a comment, and JSON has none", "remove the comment")
    return Problem(place, f"is not JSON: {error.msg}", "correct the line, or the one before")


def _same(given: Any, wanted: Any) -> bool:
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(_same, given, wanted))
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, int | float) and isinstance(wanted, int | float):
        return math.isclose(given, wanted, rel_tol=1e-9)
    return bool(given == wanted)


def _is_count(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given > 0


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number that JSON knows")
