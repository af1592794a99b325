"""What the kind of its model forbids a job: a table of rules, as in `rules.py`.

A job names its model; only the model's config.json tells its kind. Whoever has read that asks here:
`train` before any rank is started, the planner before it forecasts.
"""

from __future__ import annotations

from shardtune.config.job import Job
from shardtune.config.rule import Rule
from shardtune.config.strategy_rules import strategies_for
from shardtune.core.capabilities import Refusal
from shardtune.core.files.yaml_document import dotted
from shardtune.core.model.kind import ModelKind
from shardtune.errors import JobError

BOTH: ModelKind = "encoder_decoder"


def _refusal(job: Job) -> Refusal:
    only = f"strategy {job.strategy.type} takes decoder-only models"
    return job.strategy.capabilities.models.refusals.get(BOTH, Refusal(only))


def _as_written(setting: str) -> str:
    return f"{setting} is for decoder-only models; this is an encoder-decoder"


ENCODER_DECODER: tuple[Rule, ...] = (
    Rule(
        "strategy-takes-both-halves",
        ("strategy", "type"),
        lambda job: BOTH not in job.strategy.capabilities.models,
        lambda job: f"this model is an encoder-decoder, and {_refusal(job).fact}",
        lambda job: strategies_for(lambda each: BOTH in each.capabilities.models),
    ),
    Rule(
        "tasks-are-for-decoders",
        ("evaluate", "tasks"),
        lambda job: bool(job.evaluate.tasks),
        lambda job: _as_written("evaluate.tasks"),
        "leave evaluate.tasks out; evaluate.samples shows answers",
    ),
    Rule(
        "both-halves-of-one-pair",
        ("data", "packing"),
        lambda job: job.data.packing is True,
        lambda job: "is true, but source-target pairs can't be packed",
        "set data.packing: auto, or leave it out",
    ),
    Rule(
        "both-halves-as-written",
        ("train", "kernels"),
        lambda job: job.train.kernels == "compiled",
        lambda job: _as_written("kernels: compiled"),
        "set train.kernels: eager, or leave it out",
    ),
    Rule(
        "both-halves-plain-loss",
        ("train", "loss"),
        lambda job: job.train.loss == "fused",
        lambda job: _as_written("loss: fused"),
        "set train.loss: plain, or leave it out",
    ),
    Rule(
        "both-halves-recompute-all",
        ("train", "gradient_checkpointing"),
        lambda job: job.train.gradient_checkpointing in ("mlp", "most"),
        lambda job: _as_written(f"gradient_checkpointing: {job.train.gradient_checkpointing}"),
        "set train.gradient_checkpointing: none or full",
    ),
    Rule(
        "both-halves-not-in-four-bits",
        ("model", "quantization"),
        lambda job: job.model.quantization == "nf4",
        # transformers' T5 casts what goes into `wo` to the dtype of its weight, were it bytes.
        lambda job: "is nf4, but T5 casts activations to the dtype of its weights: to packed bytes",
        "set model.quantization: int8 or none",
    ),
    Rule(
        "both-halves-not-in-fp8",
        ("model", "quantization"),
        lambda job: job.model.quantization == "fp8",
        lambda job: _as_written("quantization: fp8"),
        "set model.quantization: int8 or none",
    ),
)
"""Of a model with an encoder and a decoder."""

DECODER: tuple[Rule, ...] = (
    Rule(
        "target-has-an-encoder",
        ("data", "target_length"),
        lambda job: job.data.target_length != "auto",
        lambda job: (
            f"is {job.data.target_length}, but this is a decoder-only model: source and target "
            "share one row"
        ),
        "leave it out; data.sequence_length limits the row",
    ),
)
"""Of a decoder alone."""


def check_model(job: Job, kind: ModelKind) -> None:
    """Raises JobError with every rule that the job breaks with a model of this kind."""
    rules = ENCODER_DECODER if kind == BOTH else DECODER
    problems = [rule.problem(job, dotted) for rule in rules if rule.broken(job)]
    if problems:
        raise JobError(problems)
