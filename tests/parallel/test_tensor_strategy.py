"""What tensor parallelism declares, alone and with FSDP, and which weights it slices how."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from transformers import BloomConfig, GPT2Config, LlamaConfig

from shardtune.core.footprint import ModelBytes, predict_held, predict_sent
from shardtune.core.mesh import Mesh
from shardtune.core.model.parallel_plan import (
    SHARDABLE_FAMILIES,
    DimShard,
    family_of,
    require_divisible,
    require_tensor_parallel,
)
from shardtune.core.pipeline_schedule import Pipelining
from shardtune.errors import ModelError
from shardtune.parallel.ddp.strategy import DDP
from shardtune.parallel.fsdp.strategy import FSDP
from shardtune.parallel.tensor.strategy import Tensor


def test_ranks_beyond_the_degree_have_rows_of_their_own() -> None:
    mesh = Tensor(degree=2).mesh(6)
    assert mesh.axes == (("data", 3), ("tensor", 2))
    assert mesh.data_ranks == 3
    assert [mesh.data_rank(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]


def test_with_fsdp_slices_are_neighbours() -> None:
    strategy = FSDP(tensor=2, sharding="hybrid", replicas=2)
    assert strategy.mesh(8).axes == (("replicate", 2), ("shard", 2), ("tensor", 2))
    assert FSDP().mesh(4).axes == (("shard", 4),)


def test_one_slice_is_data_parallelism() -> None:
    strategy = Tensor(degree=1)
    assert strategy.mesh(4) == DDP().mesh(4)
    assert strategy.layout().moves(strategy.mesh(4)) == DDP().layout().moves(DDP().mesh(4))
    with pytest.raises(ValidationError, match="degree"):
        Tensor(degree=0)


# By hand: a part of 100 bytes a rank has, 80 of them trained; 2 layers; 10 bytes flow between them.
PART = ModelBytes(
    params=100, trained=80, grads=80, optim=160, unsliced=8, hidden=10, embedded=10, scores=2,
    layers=2, returns=2, starts=1, ends=1,
)  # fmt: skip


def test_four_gathers_and_four_sums_a_layer() -> None:
    strategy = Tensor(degree=2)
    sent = predict_sent(strategy.layout(), strategy.mesh(2), PART, microbatches=3)
    assert sent == {
        "all_gather": 3 * (2 * 4 * 10 + 10 + 10),  # layers, the embedding's gradient, the head
        "reduce_scatter": 3 * (2 * 4 * 10 + 10),  # layers, the head
        "all_reduce": 3 * (10 + 3 * 2) + 8,  # looked up words, the loss; once what isn't sliced
    }


def test_a_frozen_embedding_asks_for_no_gradient() -> None:
    part = ModelBytes(
        params=100, trained=8, grads=8, optim=16, hidden=10, layers=2, returns=1, starts=1, ends=1
    )
    strategy = Tensor(degree=2)
    sent = predict_sent(strategy.layout(), strategy.mesh(2), part, microbatches=1)
    assert sent == {"all_gather": 2 * 4 * 10 + 10, "reduce_scatter": 7 * 10 + 10, "all_reduce": 10}


def test_data_ranks_add_gradients_once_a_step() -> None:
    strategy = Tensor(degree=2)
    alone = predict_sent(strategy.layout(), strategy.mesh(2), PART, microbatches=3)
    both = predict_sent(strategy.layout(), strategy.mesh(4), PART, microbatches=3)
    assert both == alone | {"all_reduce": alone["all_reduce"] + 80}


def test_fsdp_divides_slices_further() -> None:
    strategy = FSDP(tensor=2)
    layout, mesh = strategy.layout(), strategy.mesh(8)
    held = predict_held(layout, mesh, PART)
    assert {state: held.of(state) for state in ("params", "grads", "optim")} == {
        "params": 25,
        "grads": 20,
        "optim": 40,
    }
    alone = Tensor(degree=2)
    sliced = predict_sent(alone.layout(), alone.mesh(2), PART, microbatches=1)
    sent = predict_sent(layout, mesh, PART, microbatches=1)
    assert sent == {
        "all_gather": sliced["all_gather"] + 2 * 100,
        "reduce_scatter": sliced["reduce_scatter"] + 80,
        "all_reduce": sliced["all_reduce"] - 8 + 8 // 4,  # each rank adds its share of them
    }


ROW, COLUMN = "layers.3.self_attn.o_proj", "layers.3.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "shape", "cut"),
    [
        (f"model.{COLUMN}.weight", (8, 4), DimShard(0)),
        (f"model.{COLUMN}.bias", (8,), DimShard(0)),
        (f"base_model.model.model.{COLUMN}.base_layer.weight", (8, 4), DimShard(0)),
        (f"base_model.model.model.{COLUMN}.lora_A.default.weight", (2, 4), None),
        (f"base_model.model.model.{COLUMN}.lora_B.default.weight", (8, 2), DimShard(0)),
        (f"base_model.model.model.{COLUMN}.ia3_l.default", (8, 1), DimShard(0)),
        (f"model.{ROW}.weight", (4, 8), DimShard(1)),
        (f"model.{ROW}.bias", (4,), None),
        (f"base_model.model.model.{ROW}.lora_A.default.weight", (2, 8), DimShard(1)),
        (f"base_model.model.model.{ROW}.lora_B.default.weight", (4, 2), None),
        (f"base_model.model.model.{ROW}.ia3_l.default", (1, 8), DimShard(1)),
        (f"base_model.model.model.{ROW}.ia3_l.default", (4, 1), None),
        ("model.layers.3.input_layernorm.weight", (4,), None),
        ("model.layers.3.self_attn.q_norm.weight", (2,), None),
        ("model.embed_tokens.weight", (9, 4), DimShard(0)),
        ("lm_head.weight", (9, 4), DimShard(0)),
        ("base_model.model.lm_head.modules_to_save.default.weight", (9, 4), DimShard(0)),
        ("model.norm.weight", (4,), None),
        (f"model.{COLUMN}.modules_to_save.default.weight", (8, 4), DimShard(0)),
        ("model.layers.3.mlp.modules_to_save.default.up_proj.weight", (8, 4), DimShard(0)),
        ("model.layers.3.mlp.original_module.down_proj.weight", (4, 8), DimShard(1)),
    ],
)
def test_a_weight_is_sliced_by_its_name(
    name: str, shape: tuple[int, ...], cut: DimShard | None
) -> None:
    assert SHARDABLE_FAMILIES["llama"].dim_shard(name, shape) == cut


def test_gpt2_has_its_inputs_first_and_three_things_in_one() -> None:
    cut = SHARDABLE_FAMILIES["gpt2"].dim_shard
    assert cut("transformer.h.0.attn.c_attn.weight", (4, 12)) == DimShard(1, 3)
    assert cut("transformer.h.0.attn.c_attn.bias", (12,)) == DimShard(0, 3)
    assert cut("transformer.h.0.attn.c_attn.lora_B.default.weight", (12, 2)) == DimShard(0, 3)
    assert cut("transformer.h.0.attn.c_proj.weight", (4, 4)) == DimShard(0)
    assert cut("transformer.h.0.mlp.c_fc.weight", (4, 16)) == DimShard(1)
    assert cut("transformer.wpe.weight", (6, 4)) is None


def test_what_does_not_divide_is_refused_with_the_equation() -> None:
    config = LlamaConfig(
        num_attention_heads=32, num_key_value_heads=8, hidden_size=256, intermediate_size=600
    )
    with pytest.raises(ModelError) as error:
        require_tensor_parallel(config, 3)
    assert [problem.fact for problem in error.value.problems] == [
        "32 heads / tensor(3) = 10.67",
        "8 key-value heads / tensor(3) = 2.67",
    ]
    assert "over 1, 2, 4, 8 ranks" in error.value.problems[0].fix
    require_tensor_parallel(GPT2Config(), 4)  # 12 heads, an MLP of 4 x 768


def test_an_unknown_family_is_refused_with_its_name() -> None:
    with pytest.raises(ModelError, match="'bloom'"):
        family_of(BloomConfig())
    with pytest.raises(ModelError, match="'bloom'"):
        require_divisible(BloomConfig(), Mesh((("data", 1), ("tensor", 2))))
    require_divisible(BloomConfig(), Mesh((("data", 2),)))
    with pytest.raises(ModelError, match="'bloom'"):
        require_divisible(BloomConfig(), Mesh((("pipeline", 2), ("data", 1))), Pipelining("1f1b"))
