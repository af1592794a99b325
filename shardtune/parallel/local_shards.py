"""A rank's shards of single weights: how they are cut, where they lie, and how modules see them.

A weight becomes a DTensor, so that whoever saves, counts or shards it further knows the whole of
it. The computation itself is local: while a module runs, it sees what its rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardtune.core.model.parallel_plan import DimShard
from shardtune.core.tensor_shards import Region


def spread(parameter: nn.Parameter, spec: DimShard | None, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's shard of a whole weight; without a `spec` every rank keeps all of it."""
    mine, placement = parameter.detach(), cast(Placement, Replicate())
    if spec is not None:
        placement = Shard(spec.dim)
        parts = mine.chunk(spec.parts, spec.dim)
        shards = [part.chunk(mesh.size(), spec.dim)[mesh.get_local_rank()] for part in parts]
        mine = torch.cat(shards, spec.dim).contiguous()
        mine = mine.clone() if len(shards) == 1 else mine  # lets the whole go
    divided = DTensor.from_local(
        mine,
        mesh,
        [placement],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(divided, requires_grad=parameter.requires_grad)


def exchanged(tensor: Tensor, dim: int, outer: int, inner: int) -> Tensor:
    """Blocks that lie by `outer` and within each by `inner`, laid the other way round."""
    if outer == 1 or inner == 1:
        return tensor
    blocks = [part.chunk(inner, dim) for part in tensor.chunk(outer, dim)]
    return torch.cat([blocks[o][i] for i in range(inner) for o in range(outer)], dim)


def in_order(place: Region, spec: DimShard, ranks: int, length: int) -> list[Region]:
    """A region of the ranks' shards side by side, as regions of a weight that has parts."""
    unit = length // (spec.parts * ranks)  # one rank's shard of one part
    found, at, end = [], place.begin[spec.dim], place.begin[spec.dim] + place.extent[spec.dim]
    while at < end:
        (rank, part), inside = divmod(at // unit, spec.parts), at % unit
        begin, extent = list(place.begin), list(place.extent)
        begin[spec.dim] = (part * ranks + rank) * unit + inside
        extent[spec.dim] = min(unit - inside, end - at)
        found.append(Region(tuple(begin), tuple(extent)))
        at += extent[spec.dim]
    return found


def compute_locally(
    module: nn.Module, once: set[tuple[nn.Module, str]] | None = None, ranks: int = 1
) -> None:
    """While `module` runs, it and all inside see their weights as this rank holds them.

    What is to be added `once` is divided by the ranks that will add it.
    """
    see_local_weights(module, list(module.modules()), once or set(), ranks)


def see_local_weights(
    module: nn.Module, owners: Sequence[nn.Module], once: set[tuple[nn.Module, str]], ranks: int
) -> None:
    places = [(owner, leaf) for owner in owners for leaf, _ in _own(owner)]
    kept: list[nn.Parameter] = []

    def before(module: nn.Module, args: Any) -> None:
        for owner, leaf in places:
            spread = cast(DTensor, owner._parameters[leaf])
            kept.append(cast(nn.Parameter, spread))
            mine = spread.to_local()
            mine = mine / ranks if (owner, leaf) in once else mine
            owner._parameters[leaf] = cast(nn.Parameter, mine)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        for (owner, leaf), spread in zip(places, kept, strict=False):
            owner._parameters[leaf] = spread
        kept.clear()

    if not places:
        return
    module.register_forward_pre_hook(before)
    # Also when the forward pass is broken off, as it is when activations are computed again.
    module.register_forward_hook(after, always_call=True)


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False))
