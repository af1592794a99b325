"""Steps as CUDA graphs: to the bit what the same steps are without them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.gpu_run import engine_of
from shardtune.config.job import Job
from shardtune.core.step import IGNORED, MicroBatch
from shardtune.engine.graph_pool import GraphPool
from shardtune.engine.native import NativeEngine
from tests.synthetic import batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # torch.compile warns of what it meets on its way
]
JOBS: dict[str, dict[str, Any]] = {
    "dropout": {"adapter": {"type": "lora", "rank": 64, "dropout": 0.1}},
    "eager": {"train": {"kernels": "eager"}},
    "recomputed": {
        "adapter": {"type": "lora", "rank": 16, "dropout": 0.1},
        "train": {"gradient_checkpointing": "most"},
    },
    "nf4": {"model": {"quantization": "nf4"}},
    "fp8": {"model": {"quantization": "fp8"}},
}


def make(extra: dict[str, Any], *, graphs: bool = True) -> NativeEngine:
    from transformers import LlamaConfig

    train = {
        "micro_batch": 2, "global_batch": 4, "precision": "bf16", "steps": 100, "warmup_steps": 5,
        "schedule": "cosine", "loss": "fused", "kernels": "compiled", "learning_rate": 1e-3,
    }  # fmt: skip
    job = {
        "launch": {"processes": 1},
        "adapter": {"type": "lora", "rank": 16},
        **extra,
        "model": {"name": "meta-llama/Llama-3.2-1B"} | extra.get("model", {}),
        "data": {"train": [{"path": "-", "format": "chat"}], "sequence_length": 512},
        "train": train | extra.get("train", {}),
    }
    config = LlamaConfig(
        hidden_size=1024, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=128, intermediate_size=2048, vocab_size=1024, use_cache=False,
    )  # fmt: skip
    made = engine_of(Job.model_validate_json(json.dumps(job)), config, "cuda", told="cuda")
    assert isinstance(made, NativeEngine)
    assert made.graphs is not None
    if not graphs:
        made.graphs._refused = "a test wants to see"
    return made


def micro_batch(seed: int, length: int = 256, *, packed: bool = False) -> MicroBatch:
    made = batch(seed, rows=2, length=length)
    made.targets[:, : length // 3] = IGNORED
    made = replace(made, labels=int((made.targets != IGNORED).sum()))
    return replace(made, position_ids=made.position_ids % (length // 3)) if packed else made


def steps(count: int) -> list[list[MicroBatch]]:
    """Two shapes that take turns, packed rows, a width between two, and a step of one part."""
    return [
        [micro_batch(2 * n, 248 + 8 * (n % 2)), micro_batch(2 * n + 1, 384 + n, packed=n % 3 == 0)]
        [: 1 + (n % 4 > 0)]
        for n in range(count)
    ]  # fmt: skip


def run(engine: NativeEngine, given: list[list[MicroBatch]]) -> list[tuple[float, float]]:
    found = [engine.step(engine.stage(each)) for each in given]
    return [(each.loss, each.grad_norm) for each in found]


@pytest.mark.parametrize("name", JOBS)
def test_graphs_change_nothing(name: str) -> None:
    given = steps(10)
    # What is compiled for a first shape may round otherwise than what is compiled for all later:
    # one engine before them lets both begin alike.
    run(make(JOBS[name], graphs=False), given)
    with_graphs, without = make(JOBS[name]), make(JOBS[name], graphs=False)
    assert run(with_graphs, given) == run(without, given)
    assert with_graphs.graphs is not None
    assert with_graphs.graphs.refused == ""
    assert len(with_graphs.graphs._passes) >= 3
    ours, theirs = (engine.state()[0] for engine in (with_graphs, without))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_all_weights() -> None:
    """Steps of one micro-batch are recorded, and what is added up in fp32 isn't."""
    extra = {"adapter": {"type": "none"}}
    given = [[micro_batch(n, 256 + 128 * (n % 2))] for n in range(8)] + steps(4)
    run(make(extra, graphs=False), given)
    with_graphs, without = make(extra), make(extra, graphs=False)
    assert run(with_graphs, given) == run(without, given)
    assert with_graphs.graphs is not None
    assert with_graphs.graphs.refused == ""
    assert len(with_graphs.graphs._passes) >= 2
    ours, theirs = (dict(engine.trained_weights()) for engine in (with_graphs, without))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_resumed_run_is_the_same_to_the_bit() -> None:
    """It records at other steps, and an evaluation is between two of them."""
    given = [[micro_batch(2 * n), micro_batch(2 * n + 1)] for n in range(12)]
    whole = make(JOBS["dropout"])
    first = run(whole, given[:7])
    tensors, numbers = whole.state()
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    rest = run(whole, given[7:])
    resumed = make(JOBS["dropout"])
    run(resumed, given[:2])
    resumed.load_state(saved, numbers)
    scores = [resumed.evaluate("held out", given[0]).loss for _ in range(2)]
    assert scores[0] == scores[1]
    assert run(resumed, given[7:]) == rest
    assert len({loss for loss, _ in first + rest}) == 12


def test_a_gradient_that_is_not_finite_is_not_applied() -> None:
    engine = make({})
    run(engine, steps(6))
    name, weight = next(iter(engine.trained.items()))
    with torch.no_grad():
        kept = weight.clone()
        weight[0, 0] = float("inf")
    before = {key: tensor.clone() for key, tensor in engine.state()[0].items()}
    assert not engine.step(engine.stage(steps(1)[0])).applied
    after = engine.state()[0]
    assert all(torch.equal(after[key], old) for key, old in before.items()), name
    with torch.no_grad():
        weight.copy_(kept)
    assert engine.step(engine.stage(steps(1)[0])).applied


def test_a_recorded_step_never_waits() -> None:
    engine = make({})
    run(engine, steps(8) + steps(8))  # all shapes are recorded then
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [engine.step(engine.stage(given)) for given in steps(8)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(result.loss > 0 for result in results)


def test_a_pool_that_has_lost_all_graphs_takes_another() -> None:
    """torch gives up such a pool although what a graph has left in it is still there."""
    pool, left = GraphPool(), []
    for value in (1.0, 2.0):
        graph = torch.cuda.CUDAGraph()
        with pool.capture(graph):
            left.append(torch.full((8,), value, device="cuda"))
        graph.replay()
        torch.cuda.synchronize()
        assert left[-1].eq(value).all()
        del graph


def test_an_update_that_cannot_be_recorded_is_launched_kernel_by_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = steps(8)
    run(make({}, graphs=False), given)  # compiled for all shapes from here on
    plain, broken = make({}), make({})
    assert broken.graphs is not None
    update = broken.graphs._update
    apply = update.apply

    def waiting(rate: Any) -> Any:
        torch.cuda.current_stream().synchronize()  # what a capture refuses
        return apply(rate)

    monkeypatch.setattr(update, "apply", waiting)
    assert run(broken, given) == run(plain, given)
    assert broken.graphs.refused
