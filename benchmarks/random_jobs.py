"""Random jobs on random clusters, for tests of what the planner says about them.

`draw` has few models and clusters, and many jobs that can't be had; `draw_wide` has all that the
catalogues know, and jobs as people write them.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardtune.config.job import Job
from shardtune.core.model.known_models import catalogue, known_model
from shardtune.core.model.shape import ModelShape
from shardtune.errors import JobError
from shardtune.plan.cluster import Cluster, known_gpus, parse_cluster

MODELS = (
    "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen3-8b", "llama-3.2-1b", "llama-3.1-8b", "llama-2-13b",
    "llama-2-70b", "gemma-2-9b", "mixtral-8x7b-v0.1",
)  # fmt: skip
CLUSTERS = (
    "1xRTX4090", "1xH200", "1xA100-80GB", "1xA40", "2xA100-80GB", "4xA40", "8xRTX3090:pcie",
    "8xA100-40GB", "8xH100-80GB", "2x8xA100-80GB@400Gbps", "2x4xA40@25Gbps",
    "4x8xH100-80GB@3200Gbps",
)  # fmt: skip

STRATEGIES: tuple[dict[str, Any], ...] = (
    {"type": "ddp"},
    {"type": "ddp"},
    {"type": "fsdp"},
    {"type": "fsdp", "offload": "cpu"},
    {"type": "fsdp", "tensor": 2},
    {"type": "fsdp", "sharding": "hybrid", "replicas": 2},
    {"type": "tensor", "degree": 2},
    {"type": "pipeline", "stages": 2, "schedule": "interleaved", "chunks": 2},
    {"type": "deepspeed", "zero_optimization": {"stage": 2}},
    {"type": "deepspeed", "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    {"type": "auto"},
)
ADAPTERS: tuple[dict[str, Any], ...] = (
    {"type": "none"},
    {"type": "lora", "rank": 16},
    {"type": "lora", "rank": 64, "dropout": 0.1, "variant": "dora"},
    {"type": "ia3"},
)
OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {"type": "adamw"},
    {"type": "adamw", "betas": [0.9, 0.99], "bits": 8},
    {"type": "adamw", "paged": True},
    {"type": "sgd", "momentum": 0.9},
)


@dataclass(frozen=True)
class Drawn:
    """A job as its file would say it, and where it is to run."""

    document: dict[str, Any]
    shape: ModelShape
    cluster: Cluster

    @property
    def job(self) -> Job:
        return Job.model_validate_json(json.dumps(self.document))

    def __str__(self) -> str:
        return f"{json.dumps(self.document)} on {self.cluster.name}"


def draw(seed: int) -> Iterator[Drawn]:
    """Jobs without end; the same ones for the same seed. Some of them can't be had at all."""
    dice = random.Random(seed)
    while True:
        name, spec = dice.choice(MODELS), dice.choice(CLUSTERS)
        cluster = parse_cluster(spec)
        adapter = dice.choice(ADAPTERS)
        model: dict[str, Any] = {"name": name}
        if adapter["type"] != "none":
            model["quantization"] = dice.choice(("none", "none", "nf4", "fp8"))
        train: dict[str, Any] = {
            "global_batch": cluster.gpus * dice.choice((1, 2, 4, 16)),
            "steps": 100,
            "micro_batch": dice.choice((1, 2, 4, 16, "auto")),
            "loss": dice.choice(("fused", "plain")),
            "kernels": dice.choice(("compiled", "eager")),
            "gradient_checkpointing": dice.choice(("none", "mlp", "full", "auto")),
            "optimizer": dice.choice(OPTIMIZERS),
        }
        if train["gradient_checkpointing"] == "mlp":
            train["keep_layers"] = dice.choice((0, 4))
        data = {
            "train": [{"path": "a.jsonl", "format": "chat"}],
            "sequence_length": dice.choice((512, 2048, 4096, 8192)),
        }
        sections = {"model": model, "data": data, "train": train, "adapter": adapter}
        strategy = dice.choice(STRATEGIES)
        yield Drawn({**sections, "strategy": strategy}, known_model(name), cluster)


# From all that the catalogues know ----------------------------------------------------------------

WIDE_STRATEGIES: tuple[dict[str, Any], ...] = (
    *STRATEGIES,
    {"type": "fsdp", "offload": "cpu", "tensor": 2},
    {"type": "fsdp", "pipeline": 2},
    {"type": "tensor", "degree": 4},
    {"type": "pipeline", "stages": 4},
    {"type": "pipeline", "stages": 2, "tensor": 2},
    {"type": "layers", "stages": 2},
    {"type": "deepspeed", "zero_optimization": {"stage": 1}},
    {"type": "deepspeed", "zero_optimization": {"stage": 3}},
    {
        "type": "deepspeed",
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    },
)
REACHES_INTO_LAYERS = ("tensor", "pipeline", "layers", "deepspeed")
"""Strategies under which layers aren't compiled, and are recomputed whole or not at all."""
SEQUENCES = (128, 512, 1000, 2048, 4096, 8192, 16384, 65536)


def draw_wide(seed: int) -> Iterator[Drawn]:
    """Jobs without end, the same ones for the same seed: every model and GPU of the catalogues.
    About one in five can't be had, as with people."""
    dice = random.Random(seed)
    models = [each.name for each in catalogue()]
    while True:
        cluster = _any_cluster(dice)
        if cluster is None:
            continue
        name = dice.choice(models)
        shape, strategy = known_model(name), dict(_any_strategy(dice, cluster))
        adapter = dict(dice.choice(ADAPTERS))
        model: dict[str, Any] = {"name": name}
        if adapter["type"] != "none":
            kinds = ("none", "none", "nf4", "nf4", "int8", "none" if len(strategy) > 1 else "fp8")
            model["quantization"] = dice.choice(kinds)
        lengths = [each for each in SEQUENCES if each <= (shape.max_positions or max(SEQUENCES))]
        rows = dice.choice((1, 2, 4, 16))
        plain = strategy["type"] in REACHES_INTO_LAYERS or len(strategy) > 1
        train: dict[str, Any] = {
            "global_batch": cluster.gpus * rows * dice.choice((1, 1, 2, 8)),
            "steps": 100,
            "micro_batch": dice.choice((rows, rows, 1, "auto")),
            "loss": "plain" if plain else dice.choice(("fused", "plain")),
            "kernels": "eager" if plain else dice.choice(("compiled", "eager")),
            "gradient_checkpointing": dice.choice(
                ("none", "full", "auto") if plain else ("none", "mlp", "full", "auto")
            ),
            "optimizer": dice.choice(OPTIMIZERS if dice.random() < 0.1 else OPTIMIZERS[:2]),
        }
        data = {
            "train": [{"path": "a.jsonl", "format": "chat"}],
            "sequence_length": dice.choice(lengths),
        }
        if shape.kind == "encoder_decoder":
            data["train"] = [{"path": "a.jsonl", "format": "source_target"}]
        sections = {"model": model, "data": data, "train": train, "adapter": adapter}
        yield Drawn({**sections, "strategy": strategy}, shape, cluster)


def _any_strategy(dice: random.Random, cluster: Cluster) -> dict[str, Any]:
    """Mostly one whose degrees there are GPUs for; whole layers half of the time, as not every
    family can be cut."""
    degrees = ("tensor", "degree", "stages", "replicas", "pipeline")
    while True:
        found = dice.choice(WIDE_STRATEGIES[: dice.choice((4, len(WIDE_STRATEGIES)))])
        wanted = math.prod(size for key, size in found.items() if key in degrees)
        if cluster.gpus % wanted == 0 or dice.random() < 0.05:
            return found


def _any_cluster(dice: random.Random) -> Cluster | None:
    """One to sixteen nodes of a GPU of the catalogue; None where its GPUs can't be linked so."""
    nodes, each = dice.choice((1, 1, 1, 2, 4, 16)), dice.choice((1, 2, 4, 8))
    link = dice.choice(("", "", ":pcie", ":nvlink"))
    network = dice.choice(("", "@25Gbps", "@400Gbps", "@3200Gbps")) if nodes > 1 else ""
    gpu = dice.choice(list(known_gpus()))
    try:
        return parse_cluster(f"{nodes}x{each}x{gpu}{link}{network}")
    except JobError:
        return None
