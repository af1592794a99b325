"""Which decoding steps are recorded, replayed and forgotten. A step here counts its runs."""

from __future__ import annotations

import pytest

from shardtune.engine.decode_graphs import PATIENCE, Bucket, DecodeGraphs, DecodeStep


class Recorded:
    """Notes how steps were run: as they are, recorded, or replayed."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._bucket = (0, 0)

    def step(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.said.append(f"step {bucket[0]}")

    def record(self, step: DecodeStep) -> DecodeStep:
        step()
        rows = self._bucket[0]
        self.said[-1] = f"record {rows}"
        return lambda: self.said.append(f"replay {rows}")

    def fail(self, step: DecodeStep) -> DecodeStep:
        raise RuntimeError("a layer waits for the GPU\nand more")


def test_a_shape_is_recorded_when_it_comes_again() -> None:
    heard = Recorded()
    graphs = DecodeGraphs(heard.record)
    for _ in range(3):
        graphs.run("a", (1, 128), heard.step)
    assert heard.said == ["step 1", "record 1", "replay 1", "replay 1"]


def test_a_shape_takes_a_larger_one_for_a_while() -> None:
    heard = Recorded()
    graphs = DecodeGraphs(heard.record)
    for rows in (8, 8, 16, 16):
        graphs.run("a", (rows, 128), heard.step)
    heard.said.clear()
    for _ in range(PATIENCE + 2):
        graphs.run("a", (4, 128), heard.step)
    assert heard.said == ["replay 8"] * PATIENCE + ["step 4", "record 4", "replay 4"]
    heard.said.clear()
    graphs.run("a", (4, 256), heard.step)  # none has so many columns
    graphs.run("b", (4, 128), heard.step)  # whose tensors are others
    assert heard.said == ["step 4", "step 4"]


def test_without_a_recorder_steps_run_as_they_are() -> None:
    heard = Recorded()
    graphs = DecodeGraphs(None)
    graphs.run("a", (1, 128), heard.step)
    graphs.run("a", (1, 128), heard.step)
    assert heard.said == ["step 1", "step 1"]
    assert "GPU" in graphs.refused


def test_what_cannot_be_recorded_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    heard = Recorded()
    graphs = DecodeGraphs(heard.fail)
    for rows in (1, 1, 1, 2, 2):
        graphs.run("a", (rows, 128), heard.step)
    assert heard.said == ["step 1"] * 3 + ["step 2"] * 2
    assert graphs.refused == "a layer waits for the GPU"
    said = "no CUDA graphs for decoding: a layer waits for the GPU; tokens cost more time"
    assert capsys.readouterr().err.count(said) == 1


def test_the_shape_that_rested_longest_makes_room() -> None:
    heard = Recorded()
    graphs = DecodeGraphs(heard.record, most=2)
    for rows in (1, 1, 2, 2, 1, 3, 3):  # 2 has rested longest when 3 is recorded
        graphs.run("a", (rows, 128), heard.step)
    heard.said.clear()
    for rows in (1, 3, 2):
        graphs.run("a", (rows, 128), heard.step)
    assert heard.said == ["replay 1", "replay 3", "replay 3"]


def test_only_an_owner_whose_tensors_moved_is_forgotten() -> None:
    heard = Recorded()
    graphs = DecodeGraphs(heard.record)
    for owner in ("a", "a", "b", "b"):
        graphs.run(owner, (1, 128), heard.step)
    graphs.forget("a")
    heard.said.clear()
    graphs.run("b", (1, 128), heard.step)
    graphs.run("a", (1, 128), heard.step)
    assert heard.said == ["replay 1", "step 1"]
