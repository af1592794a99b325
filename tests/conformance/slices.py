"""What a rank with a slice of a stage holds and sends, counted from names and shapes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from shardtune.core.footprint import ExpertBytes, ModelBytes
from shardtune.core.mesh import Mesh
from shardtune.core.model.parallel_plan import SHARDABLE_FAMILIES
from shardtune.core.step import IGNORED
from shardtune.measure.collective_counter import CONTROL_BYTES
from tests.conformance.stages import Place
from tests.conformance.table import LISTENED, MICRO_BATCH
from tests.numerics.test_factorisations import LENGTH, loader

FAMILY = SHARDABLE_FAMILIES["llama"]
FP32 = 4
CHOICES = 2
"""Experts that a token of `MIXTURES` meets."""


def sliced(
    stored: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
    trained: Collection[str],
    mesh: Mesh,
    place: Place,
    rank: int,
) -> ModelBytes:
    """The part of a model that one slice has, and what flows through it. `stored` are the bytes of
    the whole weights; those that are divided are in fp32."""
    norm = next(shape for name, shape in shapes.items() if name.endswith("model.norm.weight"))
    learns = any(name.endswith("embed_tokens.weight") for name in trained)
    degree = mesh.size_of("tensor")
    sizes = {
        name: slice_of(name, shapes[name], degree) if degree > 1 else stored[name]
        for name in place.names
    }
    trained = place.names & set(trained)
    grads = sum(sizes[name] for name in trained)
    whole = [name for name in trained if FAMILY.dim_shard(name, shapes[name]) is None]
    layers = len({n.split("layers.")[1].split(".")[0] for n in place.names if "layers." in n})
    hidden = MICRO_BATCH * LENGTH * norm[0] * FP32
    return ModelBytes(
        params=sum(sizes.values()),
        trained=grads,
        grads=grads,
        optim=grads,
        idle=_alone(sizes, place) if not learns else 0,
        unsliced=sum(sizes[name] for name in whole),
        tied=place.tied // degree,
        hidden=hidden,
        embedded=hidden if learns else 0,
        scores=heard_scores(mesh, rank),
        layers=layers,
        returns=layers if learns or not place.starts else layers - 1,
        starts=int(place.starts),
        ends=int(place.ends),
        borders=place.borders,
    )


def routed_part(
    stored: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
    trained: Collection[str],
    mesh: Mesh,
    rank: int,
) -> ModelBytes:
    """The part of a mixture that one rank has: its experts, and all else. `stored` are the bytes of
    the whole weights; what is trained is in fp32."""
    ranks = mesh.size_of("expert")
    routed = {name: size // ranks for name, size in stored.items() if ".experts." in name}
    sizes = {**stored, **routed}
    grads = sum(sizes[name] for name in trained)
    expert_grads = sum(routed.get(name, 0) for name in trained)
    norm = next(shape for name, shape in shapes.items() if name.endswith("model.norm.weight"))
    layers = {name.split("layers.")[1].split(".")[0] for name in routed}
    return ModelBytes(
        params=sum(sizes.values()),
        trained=grads,
        grads=grads,
        optim=grads,
        experts=ExpertBytes(sum(routed.values()), expert_grads, expert_grads, expert_grads),
        routed=CHOICES * heard_tokens(mesh, rank) * norm[0] * FP32,
        mixtures=len(layers),
    )


def heard_tokens(mesh: Mesh, rank: int) -> int:
    """Positions of a micro-batch, on average."""
    data = loader(True, mesh.data_rank(rank), mesh.data_ranks, MICRO_BATCH)
    *_, given = data.steps(0, LISTENED + 1)
    return sum(batch.input_ids.numel() for batch in given) // len(given)


def _alone(sizes: Mapping[str, int], place: Place) -> int:
    """An embedding is gathered by itself where it lies on another stage than the head."""
    if not place.starts or place.ends:
        return 0
    return sum(size for name, size in sizes.items() if "embed_tokens" in name)


def slice_of(name: str, shape: tuple[int, ...], degree: int) -> int:
    """Bytes of the first slice, which is the longest where a vocabulary doesn't divide."""
    cut = FAMILY.dim_shard(name, shape)
    count = math.prod(shape)
    return FP32 * (count if cut is None else count // shape[cut.dim] * -(-shape[cut.dim] // degree))


def heard_scores(mesh: Mesh, rank: int) -> float:
    """A micro-batch's numbers for the loss, on average; messages that the probe doesn't count left
    out. Ranks agree on one number of each position, then add up two."""
    data = loader(True, mesh.data_rank(rank), mesh.data_ranks, MICRO_BATCH)
    *_, given = data.steps(0, LISTENED + 1)
    total = 0
    for batch in given:
        kept = max(1, int((batch.targets != IGNORED).any(0).sum())) * MICRO_BATCH
        total += sum(size for size in (kept * FP32, 2 * kept * FP32) if size > CONTROL_BYTES)
    return total / 3 / len(given)
