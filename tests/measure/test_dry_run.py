"""The dry run against real runs: what an engine holds, and what a step takes at its peak."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest
import torch

from shardtune.config.job import IA3, Adapter, LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.core.lr_schedule import Schedule
from shardtune.core.setup import EngineSetup, Loss, OptimizerSetup
from shardtune.core.world import World
from shardtune.errors import JobError
from shardtune.measure.dry_run import DryRun, dry_run, micro_batch, replay
from shardtune.models import tiny
from shardtune.models.builder import MetaModelBuilder, PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.parallel import Strategy
from shardtune.parallel.ddp.strategy import DDP
from shardtune.parallel.deepspeed.strategy import DeepSpeed
from shardtune.parallel.fsdp.strategy import FSDP
from tests.ranks import on_ranks

pytestmark = pytest.mark.long

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


def setup(loss: Loss = "plain", *, split_fp32: bool = False) -> EngineSetup:
    # A norm of 2 is what a dry run sees; a real one is clipped at next to nothing, as surely.
    schedule = Schedule("cosine", 1e-4, 0, 9)
    rule = OptimizerSetup("adamw")
    return EngineSetup("bf16", rule, schedule, 1e-3, 0, loss=loss, split_fp32=split_fp32)


def alone(strategy: Strategy, ranks: int, case: str) -> bool:
    """Whether a job of this case has its weights in halves."""
    return (strategy, ranks, case) == (DDP(), 1, "full")


def train(checkpointing: str = "none") -> TrainSection:
    return TrainSection.model_validate(
        {"precision": "bf16", "gradient_checkpointing": checkpointing}
    )


def dry(
    strategy: Strategy,
    ranks: int,
    case: str,
    checkpointing: str = "none",
    loss: Loss = "plain",
    **more: Any,
) -> DryRun:
    adapter, quantization = CASES[case]
    section = ModelSection.model_validate({"name": "tiny", "quantization": quantization})
    builder = MetaModelBuilder.of(tiny.config(), section, adapter, train(checkpointing))
    return dry_run(
        builder,
        strategy,
        setup(loss, split_fp32=alone(strategy, ranks, case)),
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
    loss: Loss = "plain",
    microbatches: int = 1,
    packed: bool = False,
) -> DryRun:
    needs(case)
    adapter, quantization = CASES[case]
    section = ModelSection.model_validate({"name": "tiny", "quantization": quantization})
    builder = PretrainedModelBuilder(ModelFiles(section), adapter, train(checkpointing))
    batches = [micro_batch(ROWS, LENGTH, packed=packed)] * microbatches
    told = setup(loss, split_fp32=alone(strategy, world.size, case))
    return replay(builder, strategy, told, world, batches, vocabulary=tiny.VOCABULARY)


def needs(case: str) -> None:
    """Skips what can't run, and lets peft and bitsandbytes make tensors that they keep for good:
    nothing of a step, and only the first in a process would count them."""
    import peft  # noqa: F401

    if CASES[case][1] == "nf4":
        library = pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
        library.functional.quantize_4bit(torch.ones(64, 64), compress_statistics=True)


@pytest.mark.parametrize("case", CASES)
def test_one_process_takes_what_the_dry_run_says(case: str) -> None:
    needs(case)
    expected, found = real(World(), DDP(), case), dry(DDP(), 1, case)
    assert found.held == expected.held
    assert found.classes == expected.classes
    assert (found.peak, found.moment) == (expected.peak, expected.moment)


@pytest.mark.parametrize("case", ["full", "lora"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("loss", ["plain", "fused"])
def test_so_it_does_with_checkpoints_and_either_loss(
    case: str, checkpointing: str, loss: Loss
) -> None:
    expected = real(World(), DDP(), case, checkpointing, loss)
    found = dry(DDP(), 1, case, checkpointing, loss)
    assert found.classes == expected.classes
    for moment in ("forward", "backward", "optimizer"):
        assert found.moments[moment] == expected.moments[moment], moment


def test_so_it_does_with_packed_rows_and_two_micro_batches() -> None:
    expected = real(World(), DDP(), "full", microbatches=2, packed=True)
    found = dry(DDP(), 1, "full", microbatches=5, packed=True)
    assert found.classes == expected.classes
    assert found.moments["forward"] == expected.moments["forward"]
    # The first micro-batch's gradients are there, and a mask with a byte for each pair of tokens.
    plain = dry(DDP(), 1, "full")
    assert found.moments["forward"] > plain.moments["forward"] + ROWS * LENGTH**2


SPREAD = {
    "ddp": DDP(),
    "fsdp": FSDP(),
    "fsdp-kept": FSDP(reshard_after_forward=False),
    "hybrid": FSDP(sharding="hybrid", replicas=2),
    "offload": FSDP(offload="cpu"),
}
SPREAD_CASES = [("fsdp", case) for case in ("full", "lora", "dora-saved", "qlora")]
BLOCK = 512  # bytes
SPREAD_CASES += [("ddp", "full"), ("fsdp-kept", "lora"), ("hybrid", "full"), ("offload", "lora")]


@pytest.mark.parametrize(("name", "case"), SPREAD_CASES)
def test_four_ranks_hold_and_take_what_the_dry_run_says(name: str, case: str) -> None:
    needs(case)
    loss: Loss = "fused" if case == "lora" else "plain"  # both, in as few rows
    expected: DryRun = on_ranks(4, real, SPREAD[name], case, "none", loss)[0]
    found = dry(SPREAD[name], 4, case, loss=loss)
    assert found.held == expected.held
    # At the peak one number more or less may be alive, which takes a block of the allocator.
    apart = {key: abs(found.classes[key] - size) for key, size in expected.classes.items()}
    assert found.classes.keys() == expected.classes.keys()
    assert apart.pop("buffers", 0) <= BLOCK
    assert set(apart.values()) <= {0}
    assert abs(found.peak - expected.peak) <= BLOCK
    assert found.moment == expected.moment


@pytest.mark.slow
def test_eight_billion_parameters_take_seconds_and_no_memory(capsys: Any) -> None:
    from transformers import LlamaConfig

    vocabulary, length, parameters = 128_256, 4096, 8_030_261_248  # Llama-3.1-8B's own count
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    builder = MetaModelBuilder.of(config, ModelSection(name="8b"), NoAdapter(), train("full"))
    found = dry_run(
        builder, FSDP(), setup(), ranks=64, rows=1, length=length, vocabulary=vocabulary
    )
    seconds = time.process_time() - begun
    with capsys.disabled():
        print(f"\n8 B, FSDP over 64 ranks: {found.peak / GIB:.2f} GiB ({found.moment})", end=", ")
        print(f"{seconds:.0f} s of processor time")
    assert seconds < 60  # 15 to 20 seen on two cores with seven others at work
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 600 * 1024  # KiB: Python objects, where the weights alone would be 30 GiB
    share = parameters * 4 // 64  # every matrix and norm of this model can be divided by 64
    assert [found.held.of(state) for state in ("params", "grads", "optim")] == [
        share,
        share,
        2 * share,
    ]
    # In the plain loss's backward pass, in fp32: the logarithms, their gradient and the gradient
    # behind the softmax. The last token has no target.
    logits = (length - 1) * vocabulary
    assert found.moment == "backward"
    assert found.classes["logits"] == pytest.approx(3 * 4 * logits, rel=1e-6)
    # States, the layers' inputs in 16 bits, little else: the gradients aren't there yet.
    inputs = 32 * length * 4096 * 2
    assert found.peak == pytest.approx(12 * logits + 3 * share + inputs, rel=0.03)


def test_no_layer_is_left_out_by_chance() -> None:
    """OPT drops whole layers in training, each with the probability `layerdrop`."""
    from transformers import OPTConfig

    sizes = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128, "vocab_size": 100}
    kept = []
    for probability in (0.0, 0.9):
        config = OPTConfig(
            **sizes, num_hidden_layers=4, num_attention_heads=4, layerdrop=probability
        )
        builder = MetaModelBuilder.of(config, ModelSection(name="opt"), NoAdapter(), train())
        found = dry_run(builder, DDP(), setup(), ranks=1, rows=ROWS, length=LENGTH, vocabulary=100)
        kept.append(found.kept)
    assert kept[0] == kept[1] > 4 * ROWS * LENGTH * (64 * 6 + 128) * 2


def test_a_dry_run_of_deepspeed_is_refused_with_the_way_out() -> None:
    with pytest.raises(JobError, match=r"without --dry-run; or set strategy.type: fsdp"):
        dry(DeepSpeed(), 4, "full")


def test_the_process_is_left_as_it_was() -> None:
    dry(FSDP(), 8, "lora")
    assert not torch.distributed.is_initialized()
    assert torch.ones(3).sum().item() == 3  # a fake tensor would answer otherwise
