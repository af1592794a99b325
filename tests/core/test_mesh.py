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


def test_one_axis_takes_up_what_the_others_leave() -> None:
    mesh = Mesh.around({"tensor": 2, "pipeline": 2}, "shard", 8)
    assert mesh.axes == (("pipeline", 2), ("shard", 2), ("tensor", 2))
    assert Mesh.around({"tensor": 1}, "data", 3).axes == (("data", 3),)


def test_ranks_that_share_rows_have_one_data_rank() -> None:
    mesh = Mesh.around({"tensor": 2, "pipeline": 2}, "shard", 8)
    assert mesh.data_ranks == 2
    assert [mesh.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert mesh.coordinates(6) == {"pipeline": 1, "shard": 1, "tensor": 0}


def test_the_equation_that_fails_is_printed_with_what_would_do() -> None:
    with pytest.raises(JobError) as caught:
        Mesh.around({"tensor": 2, "pipeline": 2}, "shard", 6).require(6)
    (problem,) = caught.value.problems
    assert problem.fact == "pipeline(2) x shard(2) x tensor(2) = 8 != 6 ranks"
    assert problem.fix == (
        "start 4 or 8 processes, or, on 6, use pipeline(2) x shard(3) x tensor(1)"
    )


def test_a_mesh_takes_exactly_its_ranks() -> None:
    mesh = Mesh((("replicate", 2), ("shard", 4)))
    mesh.require(8)
    with pytest.raises(JobError) as caught:
        mesh.require(6)
    (problem,) = caught.value.problems
    assert problem.place == "strategy"
    assert problem.fact == "replicate(2) x shard(4) = 8 != 6 ranks"
    assert problem.fix == "start 8 processes, or, on 6, use replicate(2) x shard(3)"
