"""Cuts of tensors: where they lie when the whole is laid out flat, and who saves what."""

from __future__ import annotations

import pytest
import torch

from shardtune.core.tensor_shards import Region, by_weight, part_of, round_robin


@pytest.mark.parametrize(
    ("cut", "shape", "expected"),
    [
        (Region((0, 0), (4, 3)), (4, 3), (0, 12)),
        (Region((1, 0), (2, 3)), (4, 3), (3, 9)),
        (Region((0, 1), (4, 1)), (4, 3), None),  # a column
        (Region((0, 1), (1, 2)), (1, 3), (1, 3)),  # the one row of a matrix, in part
        (Region((1, 1), (1, 2)), (4, 3), None),
        (Region((5,), (4,), flat=True), (4, 3), (5, 9)),
        (Region((), ()), (), (0, 1)),
        (Region((4, 0), (0, 3)), (4, 3), (12, 12)),  # the empty share of a rank too many
    ],
)
def test_stretches(cut: Region, shape: tuple[int, ...], expected: tuple[int, int] | None) -> None:
    assert cut.flat_range(shape) == expected
    if expected is not None and cut.size:
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        part = part_of({"x": whole}, "x", cut)  # torch's own indexing says the same
        assert part.flatten().tolist() == list(range(*expected))


@pytest.mark.parametrize(
    "cut",
    [
        Region((3, 0), (2, 3)),
        Region((-1, 0), (2, 3)),
        Region((0,), (4,)),
        Region((9,), (4,), flat=True),
    ],
)
def test_a_cut_outside_of_the_whole_does_not_fit(cut: Region) -> None:
    assert not cut.fits((4, 3))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_each_tensor_is_dealt_to_one_rank_and_the_bytes_evenly(ranks: int) -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 100, (40,), generator=draw).tolist()
    tensors = {f"weight.{n}": torch.zeros(size) for n, size in enumerate(sizes)}
    hands = [round_robin(tensors, rank, ranks) for rank in range(ranks)]
    assert sorted(piece.key for hand in hands for piece in hand) == sorted(tensors)
    loads = [sum(piece.bytes for piece in hand) for hand in hands]
    assert max(loads) - min(loads) <= 4 * max(sizes)  # the largest goes first


def test_the_state_is_sorted_by_weight_and_read_when_asked_for() -> None:
    class Reading(dict[str, torch.Tensor]):
        asked: list[str]

        def __getitem__(self, key: str) -> torch.Tensor:
            self.asked.append(key)
            return super().__getitem__(key)

    one = torch.ones(1)
    tensors = Reading({"weight.a.b": one, "exp_avg.a.b": one, "weight.c": one})
    tensors.asked = []
    found = by_weight(tensors)
    assert {name: list(kinds) for name, kinds in found.items()} == {
        "a.b": ["weight", "exp_avg"],
        "c": ["weight"],
    }
    assert "exp_avg" in found["a.b"]
    assert "exp_avg" not in found["c"]
    assert tensors.asked == []
    assert found["c"]["weight"] is one
    assert tensors.asked == ["weight.c"]
