"""Expert parallelism: what it saves is what every other strategy saves, and the other way round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from shardtune.core.mesh import Mesh
from shardtune.core.model.parallel_plan import require_divisible
from shardtune.core.world import World
from shardtune.errors import ModelError
from shardtune.parallel import Strategy
from tests.conformance.guarantees import builder, setup, whole_rows
from tests.conformance.table import MIXTURES
from tests.models.families import config, write
from tests.ranks import on_ranks

DIVIDED: dict[str, tuple[dict[str, Any], int]] = {
    "expert": ({"type": "expert", "degree": 2}, 2),
    "fsdp-expert": ({"type": "fsdp", "expert": 2}, 4),
}
"""Settings and ranks."""
ONE: dict[str, Any] = {"type": "ddp"}
State = tuple[dict[str, np.ndarray[Any, Any]], dict[str, float]]


def go_on(
    world: World, settings: dict[str, Any], folder: str, first: int, state: State | None
) -> tuple[State, list[float]]:
    """Two steps from the step `first` on; the state after them, and their losses."""
    chosen: Any = TypeAdapter(Strategy).validate_python(settings)
    mesh = chosen.mesh(world.size)
    told = replace(setup(mesh.data_ranks), loss="fused")
    with chosen.build(builder(folder, "lora"), told, world) as engine:
        if state is not None:
            tensors, numbers = state
            engine.load_state({key: torch.from_numpy(v) for key, v in tensors.items()}, numbers)
        rows = whole_rows(mesh.data_rank(world.rank), mesh.data_ranks).steps(first, first + 2)
        losses = [engine.step(given).loss for given in rows]
        tensors, numbers = engine.state()
        for shard in engine.shards()[0]:  # a rank's shards are those parts of the whole
            corners = zip(shard.region.begin, shard.region.extent, strict=True)
            place = tuple(slice(begin, begin + extent) for begin, extent in corners)
            assert torch.equal(tensors[shard.key][place], shard.value()), shard.key
    return ({key: value.clone().numpy() for key, value in tensors.items()}, numbers), losses


@pytest.mark.process
@pytest.mark.parametrize("name", ["expert", pytest.param("fsdp-expert", marks=pytest.mark.long)])
def test_checkpoints_move_to_one_process_and_back(name: str, tmp_path: Path) -> None:
    settings, ranks = DIVIDED[name]
    write(tmp_path, "qwen3_moe", **MIXTURES["qwen3_moe"])
    folder = str(tmp_path)
    middle, _ = on_ranks(1, go_on, ONE, folder, 0, None)[0]
    end, expected = on_ranks(1, go_on, ONE, folder, 2, middle)[0]
    divided, _ = on_ranks(ranks, go_on, settings, folder, 0, None)[0]
    assert divided[0].keys() == middle[0].keys()
    for key, value in middle[0].items():
        assert np.allclose(divided[0][key], value, atol=1e-6), key
    _, back = on_ranks(1, go_on, ONE, folder, 2, divided)[0]
    last, there = on_ranks(ranks, go_on, settings, folder, 2, middle)[0]
    assert back == pytest.approx(expected, rel=1e-5)
    assert there == pytest.approx(expected, rel=1e-5)
    for key, value in end[0].items():
        assert np.allclose(last[0][key], value, atol=1e-5), key


def test_what_cannot_be_divided_is_refused_with_the_equation() -> None:
    three = Mesh((("data", 1), ("expert", 3)))
    with pytest.raises(ModelError, match=r"4 experts / expert\(3\) = 1.33"):
        require_divisible(config("qwen3_moe"), three)
    with pytest.raises(ModelError, match="this model has none"):
        require_divisible(config("llama"), three)


def test_experts_that_have_no_equal_shares_are_refused_with_what_would_do() -> None:
    """Two experts of a rank, each 32 x 24, over three shards and over four."""
    with pytest.raises(ModelError) as refused:
        require_divisible(config("qwen3_moe"), Mesh((("shard", 3), ("expert", 2))))
    (problem,) = refused.value.problems
    assert problem.fact == "shard(3) divides neither the 2 experts of a rank nor their 32 x 24"
    assert problem.fix == "start 2 or 4 processes"
    require_divisible(config("qwen3_moe"), Mesh((("shard", 4), ("expert", 2))))
