"""Evaluation: loss and token accuracy over held-out micro-batches of all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardtune.core.step import EvalResult, MicroBatch
from shardtune.core.world import World
from shardtune.engine.data_peers import Peers
from shardtune.engine.dtensor import reshard
from shardtune.engine.forward_pass import ForwardPass


@torch.no_grad()
def evaluate_loss(
    name: str,
    microbatches: Iterable[MicroBatch],
    forward_pass: ForwardPass,
    world: World,
    peers: Peers,
) -> EvalResult:
    """Scores this rank's micro-batches and sums over its peers; leaves the model in eval mode."""
    forward_pass.model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=torch.device(world.device))
    for batch in microbatches:
        world.heartbeat.enter("evaluate")
        with forward_pass.autocast():
            sums[:2] += forward_pass.score(batch)
        sums[2] += batch.labels
    reshard(forward_pass.model)
    peers.sum(sums)
    loss, correct, labels = sums.tolist()
    return EvalResult(name, loss, int(correct), int(labels))
