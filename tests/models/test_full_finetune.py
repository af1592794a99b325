"""Layers all of whose weights are trained, those with one input together: the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from shardtune.core.model import fused_families as families
from shardtune.kernels.swiglu import swiglu_backward
from shardtune.models.fused.full_finetune import (
    FullMLP,
    FullSharedInput,
    PackedTrainedWeights,
    SharedInputLinear,
    StackedLinearRoPE,
    fuse_full,
)
from shardtune.models.materialize import decoder_layers
from tests.models.exact import distance, some
from tests.models.test_fused_lora import IDS, SHAPE, kinds
from tests.models.test_fused_lora import base_of as model_of

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")
STATIC, DYNAMIC = DimDynamic.STATIC, DimDynamic.DYNAMIC
TOGETHER = {
    family: (FullSharedInput, FullSharedInput if family.startswith("gemma") else FullMLP)
    for family in families.SHARED_INPUT_FAMILIES
} | {"starcoder2": (FullSharedInput,), "phi3": (), "olmo": ()}
TOGETHER |= dict.fromkeys(("mixtral", "qwen3_moe", "olmoe", "gpt_oss"), (FullSharedInput,))


def prepared(model: Any) -> Any:
    for layer in decoder_layers(model):
        fuse_full(layer, model.config.model_type)
    return model


def joined(model: Any) -> Any:
    for module in prepared(model).modules():
        if isinstance(module, PackedTrainedWeights):
            module.pack_trained_weights()
    return model


def found(model: Any, **more: Any) -> dict[str, Tensor]:
    answer = model(input_ids=IDS, labels=IDS, use_cache=False, **more)
    names = [name for name, _ in model.named_parameters()]
    gradients = torch.autograd.grad(answer.loss, list(model.parameters()))
    return {"logits": answer.logits.detach(), **dict(zip(names, gradients, strict=True))}


@pytest.mark.parametrize("family", sorted(TOGETHER))
def test_every_family_computes_the_same(family: str) -> None:
    right = found(model_of(family))
    waiting = prepared(model_of(family))
    assert all(torch.equal(each, right[name]) for name, each in found(waiting).items())
    model = joined(model_of(family))
    ours = found(model)
    assert ours.keys() == right.keys()
    assert max(distance(each, right[name].double()) for name, each in ours.items()) < 1e-5
    assert (
        tuple(kinds(model, FullSharedInput, FullMLP))
        == TOGETHER[family] * SHAPE["num_hidden_layers"]
    )


def test_weights_stand_below_each_other_and_their_gradients_too() -> None:
    model = joined(model_of("llama"))
    attention = model.model.layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert all(isinstance(layer, SharedInputLinear) for layer in layers)
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    for kind in ("weight", "grad"):
        at = [layer.weight if kind == "weight" else layer.weight.grad for layer in layers]
        places = [each.data_ptr() for each in at if each is not None]
        sizes = [layer.weight.numel() * 4 for layer in layers]
        assert places[1:] == [places[0] + sizes[0], places[0] + sizes[0] + sizes[1]], kind


def test_generating_takes_the_same_way() -> None:
    told = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}
    right = model_of("llama").eval().generate(IDS, **told)
    assert torch.equal(joined(model_of("llama")).eval().generate(IDS, **told), right)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch tells of what its compiler does itself
@pytest.mark.parametrize(  # turned, with biases, with GELU
    "family",
    ["llama", *(pytest.param(each, marks=pytest.mark.long) for each in ("qwen2", "gemma"))],
)
def test_a_compiler_sees_one_graph(family: str) -> None:
    """With and without gradients: `fullgraph` refuses to go on in pieces."""
    torch._dynamo.reset()
    model = joined(model_of(family, num_hidden_layers=1))
    right = model(input_ids=IDS, use_cache=False).logits.detach()
    for layer in decoder_layers(model):
        layer.compile(backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert distance(model(input_ids=IDS, use_cache=False).logits, right.double()) < 1e-5
    assert found(model)
    torch._dynamo.reset()


def test_sizes_come_with_the_input_and_not_with_the_angles() -> None:
    """A compiler that knows neither would keep the joint product to ask it for them."""
    open_length = StatelessSymbolicContext([STATIC, DYNAMIC, STATIC])
    given = {name: torch.empty(2, 9, width) for name, width in (("x", 32), ("cos", 8), ("sin", 8))}
    with FakeTensorMode(shape_env=ShapeEnv(duck_shape=False)) as fake:
        x, cos, sin = (
            fake.from_tensor(each, symbolic_context=open_length, source=LocalSource(name))
            for name, each in given.items()
        )
        weights = [torch.empty(rows, 32) for rows in (32, 16, 16)]
        parts = StackedLinearRoPE.apply(x, cos, sin, (4, 2, 2), *weights)
    assert str(x.shape[1]) != str(cos.shape[1]), "nobody has told it that they are the same"
    assert [str(part.shape[:2]) for part in parts] == [str(x.shape[:2])] * 3


def test_in_bf16_the_activation_is_as_near_as_its_rounding() -> None:
    gradient, y = some((9, 40), 1).bfloat16(), some((9, 80), 2).bfloat16()
    back, active = swiglu_backward(gradient, y)
    assert_opened(back, active, gradient, y, near=0.004)


def assert_opened(back: Tensor, active: Tensor, gradient: Tensor, y: Tensor, near: float) -> None:
    given = y.double().requires_grad_()
    gate, up = given.chunk(2, dim=1)
    right = gate * torch.sigmoid(gate) * up
    (expected,) = torch.autograd.grad(right, given, gradient.double())
    assert distance(active, right.detach()) < near
    assert distance(back, expected) < near
