"""A step asks the device for no number. `tests/gpu/test_waiting.py` looks at a GPU itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from shardtune.config.job import LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.core.lr_schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup, Precision
from shardtune.core.world import World
from shardtune.engine.native import NativeEngine
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.parallel.ddp.engine import native_engine
from tests.engine.test_native import batch

ADAPTERS = {"all": NoAdapter(), "lora": LoRA(rank=4)}
UNASKED = "sdpa_without_mask"
ASKING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
}


def make(
    device: str,
    adapter: LoRA | NoAdapter,
    *,
    precision: Precision = "bf16",
    kernels: str = "eager",
    loss: str = "fused",
    optimizer: str = "adamw",
    attention: str = UNASKED,
) -> NativeEngine:
    """The native engine on a model that makes no mask: transformers asks whether rows are packed
    before it makes one, once in each forward pass. Rows of one document need none."""
    train = TrainSection.model_validate({"precision": precision, "kernels": kernels})
    model = PretrainedModelBuilder(ModelFiles(ModelSection(name="tiny")), adapter, train).whole(
        device
    )
    AttentionInterface.register(UNASKED, sdpa_attention_forward)
    getattr(model, "get_base_model", lambda: model)().set_attn_implementation(attention)
    setup = EngineSetup(
        precision,
        OptimizerSetup(optimizer, momentum=0.9 if optimizer == "sgd" else 0.0),
        Schedule("constant", 1e-2, 0, 100),
        1.0,
        0,
        loss=loss,
        split_fp32=(type(adapter), precision, optimizer) == (NoAdapter, "bf16", "adamw"),
    )
    return native_engine(model, setup, World(device=device))


class Asked(TorchDispatchMode):
    """Notes operations that hand a tensor's number to the program."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in ASKING:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_asks_for_no_number(adapter: str, optimizer: str, precision: Precision) -> None:
    engine = make("cpu", ADAPTERS[adapter], optimizer=optimizer, precision=precision)
    with Asked() as asked:
        for number in range(3):
            engine.step([batch(number), batch(number + 10)])
    assert asked.seen == []


def test_the_count_sees_a_question() -> None:
    engine = make("cpu", NoAdapter(), attention="sdpa")
    with Asked() as asked:
        engine.step([batch(1), batch(2)])
    assert len(asked.seen) == 2  # transformers', whether rows are packed: one a micro-batch
