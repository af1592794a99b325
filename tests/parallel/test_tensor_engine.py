"""Slices of every family give what the whole model gives: loss, gradients, logits, texts, states.

The reference is the same engine seam in one process, with nothing sliced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from shardtune.checkpoint.export import probe_logits
from shardtune.config.job import IA3, LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.core.lr_schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup
from shardtune.core.step import IGNORED, MicroBatch
from shardtune.core.world import World
from shardtune.engine.dtensor import local
from shardtune.errors import ModelError
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.parallel import Strategy
from shardtune.parallel.ddp.strategy import DDP
from tests.models import families
from tests.ranks import on_ranks

pytestmark = pytest.mark.long

STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260K"
STEPS = 3
WORDS = 67  # odd: the ranks' runs of the vocabulary differ in length
QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # GPT-2 drops out by default
UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-untied": ("llama", UNTIED),
    "llama-tied": ("llama", TIED),
    "mistral": ("mistral", UNTIED),
    "qwen2-untied": ("qwen2", UNTIED),
    "qwen2-tied": ("qwen2", TIED),
    "qwen3": ("qwen3", UNTIED),
    "gpt2-untied": ("gpt2", UNTIED | QUIET),
    "gpt2-tied": ("gpt2", TIED | QUIET),
    "gpt_neox-untied": ("gpt_neox", UNTIED),
    "gpt_neox-tied": ("gpt_neox", TIED | {"use_parallel_residual": False}),
}
TENSOR = {"type": "tensor", "degree": 2}
BOTH = {"type": "fsdp", "tensor": 2}


def batches(words: int = WORDS) -> Iterator[list[MicroBatch]]:
    """Two micro-batches a step, of two documents a row and of lengths that two doesn't divide."""
    draw = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        step = []
        for width in (11, 6):
            ids = torch.randint(0, words, (2, width), generator=draw)
            targets = ids.roll(-1, 1)
            targets[:, -1] = IGNORED
            targets[0, :4] = IGNORED
            positions = torch.cat([torch.arange(4), torch.arange(width - 4)]).expand(2, width)
            labels = int((targets != IGNORED).sum())
            step.append(MicroBatch(ids, positions, targets, ("a", "b"), ids.numel(), labels))
        yield step


def setup(kind: str = "sgd", precision: str = "fp32") -> EngineSetup:
    # A bias of keys has no gradient but rounding, which a small eps would turn into full steps.
    momentum = 0.9 if kind == "sgd" else 0.0
    optimizer = OptimizerSetup(kind, eps=1e-3, momentum=momentum, weight_decay=0.01)
    rate = 0.05 if kind == "sgd" else 1e-3
    return EngineSetup(precision, optimizer, Schedule("constant", rate, 0, STEPS), 2.0, 0)


def engine_for(world: World, name: str, strategy: dict[str, Any] | None, **options: Any) -> Any:
    chosen: Any = TypeAdapter(Strategy).validate_json(json.dumps(strategy)) if strategy else DDP()
    train = TrainSection(
        precision=options.get("precision", "fp32"),
        gradient_checkpointing=options.get("checkpointing", "none"),
    )
    builder = PretrainedModelBuilder(
        ModelFiles(ModelSection(name=name)), options.get("adapter", NoAdapter()), train
    )
    wanted = setup(options.get("optimizer", "sgd"), options.get("precision", "fp32"))
    return chosen.build(builder, wanted, world)


def trained(
    world: World, name: str, strategy: dict[str, Any] | None, words: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Everything that a run looks at, of a few steps."""
    with engine_for(world, name, strategy, **options) as engine:
        results = [engine.step(given) for given in batches(words)]
        found = engine.evaluate("d", [batch for given in batches(words) for batch in given])
        probe = next(batches(words))[0]
        model = engine.module()
        model.eval()
        text = model.generate(
            input_ids=probe.input_ids[:, :5], max_new_tokens=6, do_sample=False, pad_token_id=0,
            eos_token_id=words + 1,
        )  # fmt: skip
        tensors, _ = engine.state()
        return {
            "losses": [result.loss for result in results],
            "norms": [result.grad_norm for result in results],
            "evaluation": [found.loss, found.accuracy],
            "logits": probe_logits(model, probe).numpy(),
            "text": text.numpy(),
            "state": {key: value.float().numpy() for key, value in tensors.items()},
        }


def several(
    world: World, names: dict[str, str], strategy: dict[str, Any] | None, options: dict[str, Any]
) -> dict[str, Any]:
    return {key: trained(world, name, strategy, WORDS, options) for key, name in names.items()}


def same(found: dict[str, Any], expected: dict[str, Any], case: str) -> None:
    for key in ("losses", "norms", "evaluation"):
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-5, err_msg=f"{case} {key}")
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=1e-4, err_msg=case)
    np.testing.assert_array_equal(found["text"], expected["text"], err_msg=case)
    assert found["state"].keys() == expected["state"].keys()
    for key, value in expected["state"].items():
        np.testing.assert_allclose(found["state"][key], value, atol=1e-5, err_msg=f"{case} {key}")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("families")
    for key, (family, changes) in MODELS.items():
        families.write(root / key, family, **changes)
    return {key: str(root / key) for key in MODELS}


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [NoAdapter(), LoRA(rank=4)], ids=["full", "lora"])
def test_every_family_in_two_slices(folders: dict[str, str], adapter: Any) -> None:
    options = {"adapter": adapter}
    expected = on_ranks(1, several, folders, None, options)[0]
    for found in on_ranks(2, several, folders, TENSOR, options):
        for key in folders:
            same(found[key], expected[key], key)


ENDS = LoRA(rank=4, modules_to_save=("embed_tokens", "lm_head"))
HEAD = LoRA(rank=4, variant="rslora", targets=("lm_head", "q_proj"))
BLOCK = LoRA(rank=4, targets=("q_proj",), modules_to_save=("mlp",))
GPT2_BLOCK = LoRA(rank=4, targets=("c_fc",), modules_to_save=("attn",))
ASKED = {
    "adamw": ("gpt2-tied", {"optimizer": "adamw"}),
    "trained-ends": ("llama-untied", {"adapter": ENDS}),
    "trained-tied-ends": ("qwen2-tied", {"adapter": ENDS}),
    "a-trained-block": ("llama-untied", {"adapter": BLOCK}),
    "a-trained-block-of-gpt2": ("gpt2-untied", {"adapter": GPT2_BLOCK}),
    "rslora-on-the-head": ("llama-untied", {"adapter": HEAD}),
    "ia3": ("gpt2-tied", {"adapter": IA3()}),
    "pissa": ("llama-tied", {"adapter": LoRA(rank=4, variant="pissa")}),
    "checkpointing": ("llama-tied", {"checkpointing": "full"}),
}


@pytest.mark.slow
def test_what_else_a_job_may_ask_for(folders: dict[str, str]) -> None:
    expected = on_ranks(1, asked, folders, None)[0]
    for found in on_ranks(2, asked, folders, TENSOR):
        for key in ASKED:
            same(found[key], expected[key], key)


def asked(world: World, names: dict[str, str], strategy: dict[str, Any] | None) -> dict[str, Any]:
    return {
        key: trained(world, names[model], strategy, WORDS, options)
        for key, (model, options) in ASKED.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"optimizer": "adamw"}], ids=["sgd", "adamw"])
def test_shares_of_slices(folders: dict[str, str], options: dict[str, Any]) -> None:
    few = {key: folders[key] for key in ("qwen2-tied", "gpt2-untied")}
    expected = on_ranks(1, several, few, None, options)[0]
    for found in on_ranks(4, both_rows_alike, few, options):
        for key in few:
            same(found[key], expected[key], key)


def both_rows_alike(world: World, names: dict[str, str], options: dict[str, Any]) -> Any:
    """Both data ranks get the same rows, so that the mean over ranks is that of one process."""
    return several(world, names, BOTH, options)


@pytest.mark.skipif(not STORIES.is_dir(), reason="../shared/models/stories260K is not here")
def test_stories() -> None:
    expected = on_ranks(1, trained, str(STORIES), None, 512, {})[0]
    for found in on_ranks(2, trained, str(STORIES), TENSOR, 512, {}):
        same(found, expected, "stories")


def resumed(world: World, name: str, strategy: dict[str, Any] | None, state: Any) -> list[float]:
    tensors, numbers = state
    with engine_for(world, name, strategy, optimizer="adamw") as engine:
        engine.load_state({key: torch.from_numpy(v) for key, v in tensors.items()}, numbers)
        return [engine.step(given).loss for given in batches()]


def halfway(world: World, name: str, strategy: dict[str, Any] | None) -> Any:
    with engine_for(world, name, strategy, optimizer="adamw") as engine:
        engine.step(next(batches()))
        tensors, numbers = engine.state()
        kept = {key: value.clone().numpy() for key, value in tensors.items()}
        after = [engine.step(given).loss for given in batches()]
    return (kept, numbers), after


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_state_goes_on_in_one_process_and_back(folders: dict[str, str], ranks: int) -> None:
    """GPT-2's fused queries, keys and values lie otherwise in slices than in the file."""
    name, strategy = folders["gpt2-tied"], TENSOR if ranks == 2 else BOTH
    state, after = on_ranks(ranks, halfway, name, strategy)[0]
    np.testing.assert_allclose(on_ranks(1, resumed, name, None, state)[0], after, rtol=1e-5)
    np.testing.assert_allclose(on_ranks(ranks, resumed, name, strategy, state)[0], after, rtol=1e-6)


def shapes(world: World, name: str) -> dict[str, tuple[int, ...]]:
    with engine_for(world, name, TENSOR) as engine:
        return {n: tuple(local(p).shape) for n, p in engine.module().named_parameters()}


def test_a_rank_holds_its_slices_and_no_more(folders: dict[str, str]) -> None:
    """By hand: 32 wide, 4 heads of 8, 2 key-value heads, 48 MLP columns, 67 words."""
    first, second = on_ranks(2, shapes, folders["llama-untied"])
    layer = "model.layers.0"
    assert first[f"{layer}.self_attn.q_proj.weight"] == (16, 32)
    assert first[f"{layer}.self_attn.k_proj.weight"] == (8, 32)
    assert first[f"{layer}.self_attn.o_proj.weight"] == (32, 16)
    assert first[f"{layer}.mlp.up_proj.weight"] == (24, 32)
    assert first[f"{layer}.mlp.down_proj.weight"] == (32, 24)
    assert first[f"{layer}.input_layernorm.weight"] == (32,)
    assert (first["lm_head.weight"], second["lm_head.weight"]) == ((34, 32), (33, 32))


def bf16_losses(world: World, name: str, strategy: dict[str, Any] | None) -> list[float]:
    with engine_for(world, name, strategy, precision="bf16") as engine:
        return [engine.step(given).loss for given in batches()]


def test_bf16_tracks_one_process(folders: dict[str, str]) -> None:
    name = folders["llama-tied"]
    expected = on_ranks(1, bf16_losses, name, None)[0]
    np.testing.assert_allclose(on_ranks(2, bf16_losses, name, TENSOR)[0], expected, rtol=2e-2)


def dropped(world: World, name: str) -> dict[str, list[Any]]:
    """What dropout drops in a step, of the embedded words and of what attention gives."""
    found: dict[str, list[Any]] = {"words": [], "attention": []}
    with engine_for(world, name, TENSOR, checkpointing="full") as engine:
        model = engine.module().transformer
        for key, module in (("words", model.drop), ("attention", model.h[0].attn.resid_dropout)):
            module.register_forward_hook(
                lambda module, args, out, key=key: found[key].append((out == 0).numpy())
            )
        engine.step(next(batches())[1:])  # six tokens, which two ranks divide
    return found


def test_ranks_drop_alike_what_all_have_and_apart_what_each_has(tmp_path: Path) -> None:
    families.write(tmp_path, "gpt2", resid_pdrop=0.5, embd_pdrop=0.5)
    one, two = on_ranks(2, dropped, str(tmp_path))
    np.testing.assert_array_equal(one["words"], two["words"])
    for rank in (one, two):  # in the forward pass, and again for the backward pass
        np.testing.assert_array_equal(*rank["attention"])
        assert 0.3 < np.mean(rank["attention"]) < 0.7
    assert np.mean(one["attention"][0] != two["attention"][0]) > 0.3  # half, if drawn apart


def refused(world: World, name: str, degree: int) -> str:
    with pytest.raises(ModelError) as error:
        engine_for(world, name, TENSOR | {"degree": degree})
    return str(error.value)


def test_heads_that_do_not_divide_are_refused_with_the_equation(folders: dict[str, str]) -> None:
    text = on_ranks(3, refused, folders["llama-untied"], 3)[0]
    assert "4 heads / tensor(3) = 1.33" in text
    assert "2 key-value heads / tensor(3) = 0.67" in text
    assert "over 1, 2 ranks" in text
    assert "MLP" not in text  # 48 / 3 = 16
