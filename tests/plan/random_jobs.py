"""Random jobs on random clusters, for tests of what the planner says about them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardtune.config.job import Job
from shardtune.core.model.known_models import known_model
from shardtune.core.model.shape import ModelShape
from shardtune.plan.cluster import Cluster, parse_cluster

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
