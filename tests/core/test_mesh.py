"""The grid of ranks."""

from __future__ import annotations

import pytest

from shardtune.core.mesh import Mesh
from shardtune.errors import JobError


def test_the_axes_multiply() -> None:
    mesh = Mesh((("replicate", 2), ("shard", 4)))
    assert mesh.size == 8
    assert (mesh.size_of("replicate"), mesh.size_of("shard")) == (2, 4)


def test_an_axis_that_is_not_there_has_size_one() -> None:
    assert Mesh((("data", 3),)).size_of("tensor") == 1
    assert Mesh(()).size == 1


def test_a_mesh_takes_exactly_its_ranks() -> None:
    mesh = Mesh((("replicate", 2), ("shard", 4)))
    mesh.require(8)
    with pytest.raises(JobError) as caught:
        mesh.require(6)
    (problem,) = caught.value.problems
    assert problem.place == "strategy"
    assert problem.fact == "replicate(2) x shard(4) = 8 != 6 ranks"
    assert problem.fix == "start 8 processes, or change an axis"
