"""Our own figure beside a published estimator's: what states of a full fine-tune take."""

from __future__ import annotations

import json
from dataclasses import dataclass

from shardtune.config.job import Job
from shardtune.core.model.shape import ModelShape
from shardtune.core.states_table import StatesRow
from shardtune.plan.cluster import Cluster
from shardtune.plan.forecast import forecast

ROW = 512
"""Tokens of the one row that is in work: states don't depend on it."""


@dataclass(frozen=True)
class OurStates:
    """Bytes of states alone, as the published tables count them."""

    cpu: float
    """Of a node, while the model is loaded or in training, whichever is more."""
    gpu: float
    """Of one GPU, in the update: weights, gradients, optimizer states, and what these need."""


def our_states(row: StatesRow, shape: ModelShape, model: str, cluster: Cluster) -> OurStates:
    """What the planner says of the row's strategy, with all weights trained by Adam."""
    precision = "bf16" if cluster.gpu.bf16_tflops else "fp16"  # both are 16 bits
    document = {
        "model": {"name": model},
        "data": {"train": [{"path": "none.jsonl", "format": "chat"}], "sequence_length": ROW},
        "train": {
            "global_batch": cluster.gpus, "micro_batch": 1, "steps": 1, "precision": precision,
            "kernels": "eager", "loss": "plain", "gradient_checkpointing": "full",
        },
        "adapter": {"type": "none"},
    }  # fmt: skip
    job = Job.model_validate_json(json.dumps(document))
    job = job.model_copy(
        update={"strategy": row.strategy, "launch": job.launch.with_processes(cluster.gpus)}
    )
    memory = forecast(job, shape, cluster).memory
    loading = memory.host_building_whole if row.loads_whole else memory.host_building
    return OurStates(
        cpu=max(memory.host, loading) * cluster.gpus_per_node,
        gpu=max(memory.moments["optimizer"], memory.moments["save"]),
    )
