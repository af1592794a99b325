"""`estimate --sweep` and the pictures of forecasts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardtune.cli.main import main
from shardtune.core.units import GIB
from shardtune.errors import JobError
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.search import rank
from shardtune.plan.sweep import SweptKey, parse_sweep
from shardtune.report.plan_plots import MEMORY_CLASSES, classes_of, ranking_drawings
from tests.plan.test_search import LORA, job, known_model

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: {name: llama-3.2-1b}\nadapter: {type: lora}\n"
        "data: {train: [{path: a.jsonl, format: chat}], sequence_length: 1024}\n"
        "train: {global_batch: 8, micro_batch: 1, steps: 10}\n"
    )
    return path


def test_values_are_listed_or_doubled() -> None:
    found = parse_sweep(["train.micro_batch=1,2", "data.sequence_length=512..5000"])
    assert found == (
        SweptKey("train.micro_batch", ("1", "2")),
        SweptKey("data.sequence_length", ("512", "1024", "2048", "4096")),
    )


@pytest.mark.parametrize("word", ["a", "a=", "=1", "a=1,,2", "a=" + ",".join("1" * 401)])
def test_what_is_no_sweep_is_refused(word: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_sweep([word])
    assert caught.value.problems[0].fix


def test_a_sweep_is_the_forecasts_of_its_points(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["estimate", str(file), "--cluster", "1xRTX4090", "--json"]
    assert main([*words, "--sweep", "train.micro_batch=1,8", "data.sequence_length=1024,2048"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert len(points) == 4
    main([*words, "train.micro_batch=8", "data.sequence_length=2048"])
    alone = json.loads(capsys.readouterr().out)
    last = points[-1]
    assert last["values"] == {"train.micro_batch": "8", "data.sequence_length": "2048"}
    assert last["required_gib"] == pytest.approx(alone["gpu_gib"]["required"])
    assert sum(last["gpu_gib"].values()) == pytest.approx(last["required_gib"])
    assert last["verdict"] == alone["verdict"]


def test_a_point_that_cannot_be_had_says_why(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["estimate", str(file), "--cluster", "1xH200"]
    assert main([*words, "--sweep", "data.sequence_length=65536..262144"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "data.sequence_length: 262144 tokens a row, but the model has positions" in told
    assert main([*words, "--sweep", "data.sequence_length=200000,300000"]) == 2
    told = capsys.readouterr().err
    assert "none of 2 jobs can be had; the first: data.sequence_length: 200000 tokens" in told
    assert "fix: set data.sequence_length to at most 131072" in told
    assert main([*words, "--sweep", "train.batch=1,2"]) == 2
    assert "train.batch: unknown key" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_a_sweep_is_drawn(
    file: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / f"out{suffix}"
    words = ["estimate", str(file), "--cluster", "1xRTX4090", "--plot", str(target)]
    assert main([*words, "--sweep", "train.micro_batch=1,2", "data.sequence_length=512..8192"]) == 0
    text = target.read_text()
    assert "wrote" in capsys.readouterr().err
    for word in (
        "activations",
        "RTX4090: 24 GiB",
        "8192",
        "Tokens a second",
        "train.micro_batch=2",
    ):
        assert word in text
    if suffix == ".svg":
        root = ElementTree.fromstring(text)
        assert len(root.findall(f"{SVG}svg")) == 3  # two of memory, one of tokens a second


def test_a_ranking_is_drawn(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.svg"
    words = ["plan", str(file), "--cluster", "4xA40", "--plot", str(target)]
    assert main(words) == 0
    panels = ElementTree.fromstring(target.read_text()).findall(f"{SVG}svg")
    assert len(panels) == 2
    assert "fits with" in target.read_text()


def test_bars_are_as_long_as_what_they_stand_for() -> None:
    ranking = rank(
        job("llama-3.1-8b", adapter=LORA), known_model("llama-3.1-8b"), parse_cluster("4xA40")
    )
    (memory, _), notes = ranking_drawings(ranking)
    assert len(notes) == len(ranking.candidates)
    pieces = re.findall(
        r"<title>([^,]+(?:, [a-z A-Z]+ in CPU memory)?), (\w+): ", "".join(memory.shapes)
    )
    assert {name for _, name in pieces} <= set(MEMORY_CLASSES)
    lengths = [float(x) for x in re.findall(r'width="([\d.]+)"', "".join(memory.shapes))]
    best = ranking.best
    assert best is not None
    assert best.found is not None
    assert sum(classes_of(best.found).values()) * GIB == pytest.approx(best.found.memory.required)
    shown = len([name for name in MEMORY_CLASSES if any(n == name for _, n in pieces)])
    scale = sum(lengths[:shown]) / best.found.memory.required
    second = next(each.found for each in ranking.candidates[1:] if each.found)
    assert sum(lengths[shown : 2 * shown]) / second.memory.required == pytest.approx(
        scale, rel=0.02
    )


@pytest.mark.parametrize("name", ["out.pdf", "out"])
def test_other_pictures_are_refused_before_anything_is_computed(
    file: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(file), "--cluster", "1xH200", "--plot", str(tmp_path / name)]
    for command in (["plan", *words], ["estimate", *words, "--sweep", "train.micro_batch=1,2"]):
        assert main(command) == 2
        assert "write out.svg" in capsys.readouterr().err
    assert main(["estimate", *words[:-1], "out.svg"]) == 2
    assert "one forecast is no picture" in capsys.readouterr().err
