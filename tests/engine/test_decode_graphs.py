"""Which decoding steps are recorded, replayed and forgotten. A step here counts its runs."""

from __future__ import annotations

import pytest

from shardtune.engine.decode_graphs import DecodeGraphs, DecodeStep


class Recorded:
    """Notes how a step was run: as it is, recorded, or replayed."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def step(self) -> None:
        self.said.append("step")

    def record(self, step: DecodeStep) -> DecodeStep:
        self.said.append("record")
        return lambda: self.said.append("replay")

    def fail(self, step: DecodeStep) -> DecodeStep:
        raise RuntimeError("a layer waits for the GPU\nand more")


def test_a_shape_is_recorded_when_it_comes_again() -> None:
    heard = Recorded()
    graphs = DecodeGraphs(heard.record)
    for _ in range(3):
        graphs.run(("a", 1), heard.step)
    assert heard.said == ["step", "record", "replay", "replay"]


def test_without_a_recorder_steps_run_as_they_are() -> None:
    heard = Recorded()
    graphs = DecodeGraphs(None)
    graphs.run(1, heard.step)
    graphs.run(1, heard.step)
    assert heard.said == ["step", "step"]
    assert "GPU" in graphs.refused


def test_what_cannot_be_recorded_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    heard = Recorded()
    graphs = DecodeGraphs(heard.fail)
    for shape in (1, 1, 1, 2, 2):
        graphs.run(shape, heard.step)
    assert heard.said == ["step"] * 5
    assert graphs.refused == "a layer waits for the GPU"
    said = "no CUDA graphs for decoding: a layer waits for the GPU; tokens cost more time"
    assert capsys.readouterr().err.count(said) == 1


def test_the_shape_that_rested_longest_makes_room() -> None:
    heard = Recorded()
    graphs = DecodeGraphs(heard.record, most=2)
    for shape in (1, 1, 2, 2, 1, 3, 3):  # 2 has rested longest when 3 is recorded
        graphs.run(shape, heard.step)
    heard.said.clear()
    for shape in (1, 3, 2):
        graphs.run(shape, heard.step)
    assert heard.said == ["replay", "replay", "step"]


def test_only_an_owner_whose_tensors_moved_is_forgotten() -> None:
    heard = Recorded()
    graphs = DecodeGraphs(heard.record)
    for shape in (("a", 1), ("a", 1), ("b", 1), ("b", 1)):
        graphs.run(shape, heard.step)
    graphs.forget("a")
    heard.said.clear()
    graphs.run(("b", 1), heard.step)
    graphs.run(("a", 1), heard.step)
    assert heard.said == ["replay", "step"]
