"""The ways that run on a CPU, on small batches of the same kinds."""

from __future__ import annotations

import pytest
import torch

from benchmarks.attention import NEAR, TINY, batches, exact, farthest, measure, tensors
from benchmarks.attention_ways import WAYS, buckets

CPU = torch.device("cpu")


@pytest.mark.parametrize("way", [way for way in WAYS if way.on_cpu], ids=lambda way: way.name)
def test_every_way_keeps_documents_apart_but_the_one_that_says_so(way):
    packed = batches(TINY, CPU, seed=1)["50 to 2,000"]
    given = tensors(TINY, CPU)
    distance = farthest(way.prepare(packed), given, exact(packed, given))
    assert (distance < NEAR) == way.isolates


@pytest.mark.long
def test_a_table_of_every_kind_and_every_way():
    *before, (rows, missing) = measure(TINY, CPU, without=["loop"])
    ways, kinds = sum(way.on_cpu for way in WAYS), len(batches(TINY, CPU))
    assert len(rows) == (ways - 1) * kinds + 1
    assert not missing
    assert [len(each) for each, _ in before] == list(range(2, len(rows) + 1))  # row by row
    assert before[0][1].startswith(f"Cut off: 0 of {kinds} ")
    assert before[-1][1].startswith(f"Cut off: {kinds - 1} of {kinds} ")
    assert rows[-1][1] == "left out of this run"
    assert all("not here" not in row[1] and "wrong" not in row[1] for row in rows)


def test_documents_are_padded_by_less_than_half():
    found = buckets((1, 64, 65, 96, 97, 500, 2048), widest=2048)
    # 64, 96, 128, 192, ... by hand
    assert found == {64: [0, 1], 96: [2, 3], 128: [4], 512: [5], 2048: [6]}
