"""Saved under one strategy, resumed under another: the same state, the same trajectory."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from shardtune.checkpoint.async_saver import AsyncSaver, CheckpointIdentity
from shardtune.checkpoint.digest import digest_tensors
from shardtune.checkpoint.latest import latest_checkpoint
from shardtune.checkpoint.reader import Reader
from shardtune.core.lr_schedule import Schedule
from shardtune.core.progress import Progress
from shardtune.core.setup import EngineSetup, OptimizerSetup
from shardtune.core.world import World
from shardtune.launch.process_group import JoinedWorld
from shardtune.parallel import Strategy
from tests.conformance.guarantees import MICRO_BATCH, builder, microbatches
from tests.conformance.table import STAGES, STRATEGIES
from tests.models import families
from tests.numerics.test_factorisations import loader
from tests.ranks import on_ranks

EACH = 2  # steps between two saves
PROMISED: tuple[tuple[str, int], ...] = (
    ("ddp", 1), ("ddp", 2), ("zero3", 4), ("fsdp", 2), ("zero1", 3), ("pipeline2-1f1b", 2),
    ("ddp", 1),
)  # fmt: skip
"""Strategy and ranks, in the order of the chain."""
SPREAD: tuple[tuple[str, int], ...] = (
    ("fsdp-hybrid", 4), ("tensor2-data2", 4), ("pipeline2-tensor2", 4), ("fsdp2-tensor2", 4),
    ("zero2", 2), ("fsdp2-pipeline2", 4), ("ddp", 1),
)  # fmt: skip
"""Shares, slices and stages, and those of each other. GPT-2 has weights of three parts."""
SAME = 1e-6  # relative, fp32: rounding in another order


def hop(world: World, model: str, strategy: str, folder: str, steps: int) -> dict[str, Any]:
    """Goes on from the newest checkpoint for some steps, and saves."""
    settings = (STRATEGIES | STAGES)[strategy][0]
    chosen = TypeAdapter(Strategy).validate_json(json.dumps(settings))
    mesh = chosen.mesh(world.size)
    ranks = JoinedWorld(world.rank, world.size, world.rank)
    # A small eps: Adam would divide by the rounding of gradients that are almost nothing.
    rule = OptimizerSetup("adamw", eps=1e-3, weight_decay=0.1)
    schedule = Schedule("cosine", 1e-2, 2, 16)
    accumulation = microbatches(mesh.data_ranks)
    setup = EngineSetup("fp32", rule, schedule, 0.4, 0, MICRO_BATCH, accumulation)
    data = loader(True, mesh.data_rank(world.rank), mesh.data_ranks, MICRO_BATCH)
    found = latest_checkpoint(Path(folder), "run", ranks).checkpoint
    with chosen.build(builder(model, "full"), setup, world) as engine:
        begin, before, loaded = 0, "", ""
        if found is not None:
            state = Reader(*found)
            begin, before = state.manifest.step, digest_tensors(state)
            engine.load_state(state, state.manifest.numbers)
            loaded = digest_tensors(engine.state()[0])
        steps += begin
        results = [engine.step(given) for given in data.steps(begin, steps)]
        saver = AsyncSaver(Path(folder), ranks, keep=2, background=True)
        saver.save(CheckpointIdentity("run", steps, strategy, ""), *engine.shards(), Progress())
        saver.wait()
        return {
            "read": before,
            "loaded": loaded,
            "saved": digest_tensors(engine.state()[0]),
            "losses": [result.loss for result in results],
            "norms": [result.grad_norm for result in results],
            "samples": [data.samples(step) for step in range(begin, steps)],
        }


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs shardtune[deepspeed]")
@pytest.mark.parametrize(
    ("model", "hops"),
    [("tiny", PROMISED), pytest.param("gpt2", SPREAD, marks=pytest.mark.long)],
)
def test_the_chain_follows_one_process(
    model: str, hops: tuple[tuple[str, int], ...], tmp_path: Path
) -> None:
    if model != "tiny":
        dropouts = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}  # each rank has its own
        families.write(tmp_path / "model", model, vocab_size=260, n_positions=128, **dropouts)
        model = str(tmp_path / "model")
    whole = on_ranks(1, hop, model, "ddp", str(tmp_path / "whole"), EACH * len(hops))[0]
    saved = ""
    for number, (strategy, ranks) in enumerate(hops):
        found = on_ranks(ranks, hop, model, strategy, str(tmp_path / "chain"), EACH)
        here = slice(EACH * number, EACH * (number + 1))
        for each in found:
            assert each["read"] == each["loaded"] == saved, "the same state, to the bit"
            assert each["losses"] == pytest.approx(whole["losses"][here], rel=SAME)
            assert each["norms"] == pytest.approx(whole["norms"][here], rel=10 * SAME)
            assert each["samples"] == whole["samples"][here]
        (saved,) = {each["saved"] for each in found}
