"""The dry run against real runs: what an engine holds, and what a step takes at its peak."""

from __future__ import annotations

from typing import Any

import pytest

from shardtune.core.schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup, Precision
from shardtune.core.world import World
from shardtune.errors import JobError
from shardtune.job import IA3, Adapter, LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.measure.dry_run import DryRun, dry_run, micro_batch, replay
from shardtune.models import tiny
from shardtune.models.blueprint import EmptyBlueprint, ModelBlueprint
from shardtune.strategies import DDP, FSDP, DeepSpeed, Strategy
from tests.ranks import on_ranks

GIB = 1 << 30
ROWS, LENGTH = 3, 128
CASES: dict[str, tuple[Adapter, str]] = {
    "full": (NoAdapter(), "none"),
    "lora": (LoRA(rank=4), "none"),
    "dora-saved": (LoRA(rank=4, variant="dora", modules_to_save=("embed_tokens",)), "none"),
    "ia3": (IA3(), "none"),
    "qlora": (LoRA(rank=4), "nf4"),
    "int8": (LoRA(rank=4), "int8"),
}


def setup(precision: Precision = "bf16") -> EngineSetup:
    # A norm of 2 is what a dry run sees; a real one is clipped at next to nothing, as surely.
    return EngineSetup(precision, OptimizerSetup("adamw"), Schedule("cosine", 1e-4, 0, 9), 1e-3, 0)


def train(checkpointing: str = "none") -> TrainSection:
    return TrainSection.model_validate(
        {"precision": "bf16", "gradient_checkpointing": checkpointing}
    )


def dry(
    strategy: Strategy, ranks: int, case: str, checkpointing: str = "none", **more: Any
) -> DryRun:
    adapter, quantization = CASES[case]
    section = ModelSection.model_validate({"name": "tiny", "quantization": quantization})
    blueprint = EmptyBlueprint.of(tiny.config(), section, adapter, train(checkpointing))
    return dry_run(
        blueprint,
        strategy,
        setup(),
        ranks=ranks,
        rows=ROWS,
        length=LENGTH,
        vocabulary=tiny.VOCABULARY,
        **more,
    )


def real(
    world: World,
    strategy: Strategy,
    case: str,
    checkpointing: str = "none",
    microbatches: int = 1,
    packed: bool = False,
) -> DryRun:
    adapter, quantization = CASES[case]
    section = ModelSection.model_validate({"name": "tiny", "quantization": quantization})
    blueprint = ModelBlueprint(section, adapter, train(checkpointing))
    batches = [micro_batch(ROWS, LENGTH, packed=packed)] * microbatches
    return replay(blueprint, strategy, setup(), world, batches, vocabulary=tiny.VOCABULARY)


def needs(case: str) -> None:
    if CASES[case][1] == "nf4":
        pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")


@pytest.mark.parametrize("case", CASES)
def test_one_process_takes_what_the_dry_run_says(case: str) -> None:
    needs(case)
    expected, found = real(World(), DDP(), case), dry(DDP(), 1, case)
    assert found.held == expected.held
    assert found.classes == expected.classes
    assert (found.peak, found.moment) == (expected.peak, expected.moment)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_so_it_does_however_the_step_is_made(
    checkpointing: str, packed: bool, microbatches: int
) -> None:
    expected = real(World(), DDP(), "full", checkpointing, microbatches, packed)
    found = dry(DDP(), 1, "full", checkpointing, packed=packed, microbatches=microbatches)
    assert found.classes == expected.classes
    for moment in ("forward", "backward", "optimizer"):
        assert found.moments[moment] == expected.moments[moment], moment


SPREAD = {
    "ddp": DDP(),
    "fsdp": FSDP(),
    "fsdp-kept": FSDP(reshard_after_forward=False),
    "hybrid": FSDP(sharding="hybrid", replicas=2),
    "offload": FSDP(offload="cpu"),
}
ROWS_OF_TABLE = [("fsdp", case) for case in CASES]
ROWS_OF_TABLE += [("ddp", "full"), ("ddp", "qlora")]
ROWS_OF_TABLE += [("fsdp-kept", "lora"), ("hybrid", "full"), ("offload", "lora")]


@pytest.mark.parametrize(("name", "case"), ROWS_OF_TABLE)
def test_four_ranks_hold_and_take_what_the_dry_run_says(name: str, case: str) -> None:
    needs(case)
    expected: DryRun = on_ranks(4, real, SPREAD[name], case)[0]
    found = dry(SPREAD[name], 4, case)
    assert found.held == expected.held
    assert found.classes == expected.classes
    assert (found.peak, found.moment) == (expected.peak, expected.moment)
