"""Stages of ordinary models: the same numbers as one process, whoever asks for them.

That steps are equal for every schedule and combination is shown by `tests/conformance`; here it is
the families, and what a step is surrounded by.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from shardtune.config.job import IA3, Adapter, LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.core.lr_schedule import Schedule
from shardtune.core.pipeline_schedule import Pipelining
from shardtune.core.setup import EngineSetup, OptimizerSetup, Precision
from shardtune.core.step import IGNORED, MicroBatch
from shardtune.core.world import World
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.parallel import Strategy
from shardtune.parallel.ddp.strategy import DDP
from tests.models.families import write
from tests.ranks import on_ranks

pytestmark = pytest.mark.long

STORIES = Path(__file__).parents[2] / "../shared/models/stories260K"
STEPS = 3
SAME = {"rtol": 1e-5, "atol": 1e-6}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "qwen2-tied": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gpt2-tied": ("gpt2", NO_DROPOUT),
    "gpt2": ("gpt2", NO_DROPOUT | {"tie_word_embeddings": False}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-tied": ("gpt_neox", {"tie_word_embeddings": True}),
}


@dataclass(frozen=True)
class Case:
    """What to train; `settings` of a strategy, or one process with nothing spread."""

    folder: str
    adapter: Adapter
    settings: dict[str, Any] | None = None
    precision: Precision = "fp32"
    checkpointing: str = "none"
    optimizer: str = "sgd"
    quantization: str = "none"


@dataclass(frozen=True)
class Seen:
    """What a rank saw. Everything in it can be sent between processes."""

    losses: list[float]
    norms: list[float]
    evaluation: tuple[float, int, int]
    logits: Any
    written: list[list[int]]
    weights: dict[str, Any]


def batch(seed: int, rows: int, length: int, words: int = 60) -> MicroBatch:
    """Two documents in each row; the last few positions aren't trained."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, words, (rows, length), generator=draw)
    targets = torch.roll(ids, -1, dims=1)
    targets[:, -3:] = IGNORED
    half = length // 2
    positions = torch.cat([torch.arange(half), torch.arange(length - half)]).expand(rows, length)
    return MicroBatch(ids, positions, targets, (), rows * length, int((targets >= 0).sum()))


def step(number: int) -> list[MicroBatch]:
    """Micro-batches of a step may differ in rows and in length, and one may have no labels."""
    shapes = [(2, 16), (1, 24), (2, 8), (3, 16), (2, 24)]
    found = [batch(10 * number + n, *shape) for n, shape in enumerate(shapes)]
    nothing = torch.full((1, 8), IGNORED)
    return [
        *found,
        MicroBatch(found[2].input_ids[:1], found[2].position_ids[:1], nothing, (), 8, 0),
    ]


def build(world: World, case: Case) -> Any:
    chosen: Any = TypeAdapter(Strategy).validate_json(
        json.dumps(case.settings or DDP().model_dump())
    )
    train = TrainSection(precision=case.precision, gradient_checkpointing=case.checkpointing)
    section = ModelSection(name=case.folder, quantization=case.quantization)
    plan = PretrainedModelBuilder(ModelFiles(section), case.adapter, train)
    update = OptimizerSetup(case.optimizer, momentum=0.9 if case.optimizer == "sgd" else 0.0)
    setup = EngineSetup(case.precision, update, Schedule("constant", 0.05, 0, 99), 1.0, 0)
    return chosen.build(plan, setup, world)


@torch.no_grad()
def look(engine: Any, results: list[Any]) -> Seen:
    evaluation = engine.evaluate("held out", [batch(7, 2, 16), batch(8, 1, 8)])
    model = engine.module().eval()
    probe = batch(9, 1, 12)
    logits = model(
        input_ids=probe.input_ids, position_ids=probe.position_ids, use_cache=False
    ).logits
    prompts = torch.tensor([[0, 0, 5, 9, 11], [4, 8, 15, 16, 23]])
    written = model.generate(
        input_ids=prompts,
        attention_mask=(prompts > 0).long(),
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=[66],
        pad_token_id=0,
        use_cache=True,
    )
    return Seen(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        (evaluation.loss_sum, evaluation.correct, evaluation.labels),
        logits.float().numpy(),
        written.tolist(),
        {name: weight.float().numpy() for name, weight in engine.trained_weights()},
    )


def run(world: World, case: Case) -> Seen:
    with build(world, case) as engine:
        return look(engine, [engine.step(step(number)) for number in range(STEPS)])


def compare(found: list[Seen], expected: Seen, **near: float) -> None:
    near = near or SAME
    for seen in found:
        np.testing.assert_allclose(seen.losses, expected.losses, **near)
        np.testing.assert_allclose(seen.norms, expected.norms, **near)
        np.testing.assert_allclose(seen.evaluation, expected.evaluation, **near)
        np.testing.assert_allclose(seen.logits, expected.logits, rtol=1e-4, atol=1e-4)
        assert seen.written == expected.written
        assert seen.weights.keys() == expected.weights.keys()
        for name, weight in expected.weights.items():
            np.testing.assert_allclose(seen.weights[name], weight, rtol=1e-4, atol=1e-5)


def pipeline(stages: int = 2, **settings: Any) -> dict[str, Any]:
    return {"type": "pipeline", "stages": stages, **settings}


def against_one_process(
    folder: str, adapter: Adapter, settings: dict[str, Any], ranks: int = 2, **more: Any
) -> None:
    (expected,) = on_ranks(1, run, Case(folder, adapter, **more))
    compare(on_ranks(ranks, run, Case(folder, adapter, settings, **more)), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_family_in_two_stages(name: str, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    write(tmp_path, family, **changes)
    against_one_process(str(tmp_path), NoAdapter(), pipeline())


@pytest.mark.skipif(not STORIES.exists(), reason="../shared/models/stories260K is not there")
@pytest.mark.parametrize("adapter", [NoAdapter(), LoRA(rank=4)], ids=["all", "lora"])
def test_stories260k_in_stages(adapter: Adapter) -> None:
    against_one_process(str(STORIES.resolve()), adapter, pipeline(schedule="interleaved"))


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_adapters_of_the_last_layer_only(schedule: str, tmp_path: Path) -> None:
    """The first stages have nothing to train, and no gradient wants to go there."""
    write(tmp_path, "llama", num_hidden_layers=4)
    adapter = LoRA(rank=4, targets=("3.self_attn.q_proj", "3.mlp.down_proj"))
    against_one_process(str(tmp_path), adapter, pipeline(schedule=schedule))


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_quantized_base(schedule: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    write(tmp_path, "llama", num_hidden_layers=4, hidden_size=64)
    adapter, settings = LoRA(rank=4), pipeline(schedule=schedule)
    against_one_process(str(tmp_path), adapter, settings, quantization="nf4")


def test_ia3_in_stages(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    against_one_process(str(tmp_path), IA3(), pipeline(schedule="gpipe"))


def test_a_trained_copy_of_a_tied_embedding(tmp_path: Path) -> None:
    write(tmp_path, "llama", tie_word_embeddings=True)
    adapter = LoRA(rank=4, modules_to_save=("embed_tokens", "lm_head"))
    against_one_process(str(tmp_path), adapter, pipeline())


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_checkpointing(schedule: str, tmp_path: Path) -> None:
    write(tmp_path, "llama", num_hidden_layers=4)
    against_one_process(
        str(tmp_path), LoRA(rank=4), pipeline(schedule=schedule), checkpointing="full"
    )


def test_dropout_draws_the_same_again(tmp_path: Path) -> None:
    write(tmp_path, "gpt2")
    case = Case(str(tmp_path), NoAdapter(), pipeline())
    once, again = on_ranks(2, run, case), on_ranks(2, run, case)
    assert once[0].losses == again[1].losses


def precise(world: World, case: Case) -> list[float]:
    with build(world, case) as engine:
        return [engine.step(step(0)).loss for _ in range(8)]


def test_16_bits_learn(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    for adapter in (NoAdapter(), LoRA(rank=4)):
        case = Case(str(tmp_path), adapter, pipeline(), precision="bf16", optimizer="adamw")
        one, two = on_ranks(2, precise, case)
        assert one == two
        assert one[-1] < 0.98 * one[0]


@pytest.mark.parametrize("saved", ["embed_tokens", "lm_head"])
def test_an_end_in_fp32_on_a_model_of_16_bits(saved: str, tmp_path: Path) -> None:
    """Every rank gets what the others found, in one precision, also outside of a step."""
    write(tmp_path, "llama")
    adapter = LoRA(rank=4, modules_to_save=(saved,))
    (expected,) = on_ranks(1, run, Case(str(tmp_path), adapter, precision="bf16"))
    one, two = on_ranks(2, run, Case(str(tmp_path), adapter, pipeline(), precision="bf16"))
    np.testing.assert_allclose(one.losses, expected.losses, rtol=1e-3)
    np.testing.assert_allclose(one.logits, expected.logits, atol=0.05)
    np.testing.assert_array_equal(one.logits, two.logits)
    assert one.written == two.written


def resume(world: World, case: Case, tensors: Any, numbers: Any) -> tuple[Seen, Any, Any]:
    """Two steps, from a state if there is one; what it looks like then, and the state."""
    with build(world, case) as engine:
        if tensors:
            engine.load_state({key: torch.tensor(value) for key, value in tensors.items()}, numbers)
        results = [engine.step(step(engine.taken)) for _ in range(2)]
        seen = look(engine, results)
        kept, numbers = engine.state()
    return seen, {key: value.numpy() for key, value in kept.items()}, numbers


def test_a_state_goes_to_other_stages_and_to_one_process(tmp_path: Path) -> None:
    write(tmp_path, "llama", tie_word_embeddings=True, num_hidden_layers=4)
    plain = Case(str(tmp_path), NoAdapter(), optimizer="adamw")
    two = Case(str(tmp_path), NoAdapter(), pipeline(), optimizer="adamw")
    four = Case(str(tmp_path), NoAdapter(), pipeline(4, schedule="gpipe"), optimizer="adamw")
    _, tensors, numbers = on_ranks(2, resume, two, {}, {})[1]
    ((expected, _, _),) = on_ranks(1, resume, plain, tensors, numbers)
    found = [seen for seen, _, _ in on_ranks(4, resume, four, tensors, numbers)]
    compare(found, expected, rtol=1e-4)


def poisoned(world: World, case: Case) -> tuple[bool, bool, bool]:
    """A gradient that isn't finite on one stage is left out on all."""
    with build(world, case) as engine:
        before = {name: weight.clone() for name, weight in engine.trained_weights()}
        if world.rank == 1:
            with torch.no_grad():
                engine.anatomy.norm.weight[0] = float("inf")
        poisoned = engine.step(step(0))
        after = dict(engine.trained_weights())
        same = [
            torch.equal(after[name], old) for name, old in before.items() if ".norm." not in name
        ]
        return poisoned.applied, all(same), bool(np.isfinite(poisoned.grad_norm))


def test_an_update_is_left_out_on_every_stage(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    case = Case(str(tmp_path), NoAdapter(), pipeline())
    assert on_ranks(2, poisoned, case) == [(False, True, False)] * 2


def test_more_stages_than_layers_are_refused_with_the_equation(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    case = Case(str(tmp_path), NoAdapter(), pipeline(schedule="interleaved"))
    with pytest.raises(AssertionError, match=r"stages\(2\) x chunks\(2\) = 4 > 3 layers"):
        on_ranks(2, run, case)


def busy(world: World, case: Case) -> float | None:
    with build(world, case) as engine:
        return engine.step(step(0)).busy


def test_ranks_say_how_long_they_computed(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    times = on_ranks(2, busy, Case(str(tmp_path), NoAdapter(), {"type": "layers", "stages": 2}))
    assert min(times) > 0


def test_empty_micro_batches_fill_the_rounds_of_the_interleaved_order() -> None:
    counts = [Pipelining("interleaved", 2).runs(4, count) for count in (1, 4, 7, 9, 10)]
    assert counts == [1, 4, 7, 10, 10]  # torch: a multiple of max(1, count // 4) rounds
