"""The mesh as process groups: who works on the same rows, the same layers, the same slices."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardtune.core.mesh import MODEL_AXES, Mesh
from shardtune.core.world import World
from shardtune.engine.data_peers import Peers
from shardtune.parallel.single_rank_group import ensure_process_group


def device_mesh(mesh: Mesh, world: World) -> DeviceMesh:
    """One process group for each line of ranks along each axis."""
    ensure_process_group(world)
    return init_device_mesh(
        torch.device(world.device).type,
        tuple(size for _, size in mesh.axes),
        mesh_dim_names=tuple(axis for axis, _ in mesh.axes),
    )


def peers(mesh: Mesh, groups: DeviceMesh, world: World) -> Peers:
    """The ranks that compute other rows, with the same part of the model."""
    return Peers(mesh.data_rank(world.rank), mesh.data_ranks, row_mesh(groups).get_group())


def row_mesh(groups: DeviceMesh) -> DeviceMesh:
    """All axes along which ranks compute other rows, as one."""
    axes = tuple(axis for axis in groups.mesh_dim_names or () if axis not in MODEL_AXES)
    return groups[axes[0]] if len(axes) == 1 else groups[axes]._flatten("rows")
