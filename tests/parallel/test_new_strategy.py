"""A strategy is one folder: a toy that a test writes goes through every command as built-ins do.

It is found as an installed package is, by an entry point, and nothing else is told of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardtune
from tests.jobs import write_job

STRATEGY = '''
"""A toy: whole copies of the model, as data parallelism has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from shardtune.core.capabilities import Capabilities, Refusal, Support
from shardtune.core.layout import AxisRule, Layout, Move
from shardtune.core.mesh import Mesh
from shardtune.core.strategy import Choice, Devices, StrategyBase


class Toy(StrategyBase):
    """Whole copies of the model; leaves a mark."""

    type: Literal["toy"] = "toy"
    mark: str = "toy.txt"
    """Where its engine leaves one."""

    def mesh(self, ranks: int) -> Mesh:
        return Mesh((("data", ranks),))

    def layout(self) -> Layout:
        return Layout((AxisRule("data", moves=(Move("all_reduce", "grads", "step"),)),))

    @property
    def capabilities(self) -> Capabilities:
        nf4 = Refusal("a toy has no block of 4-bit numbers")
        return Capabilities(quantizations=Support(("none", "int8"), {"nf4": nf4}))

    def build(self, builder, setup, world):
        from toy_strategy.engine import ToyEngine

        return ToyEngine(builder.whole(world.device), setup, world, self.mark)

    @classmethod
    def candidates(cls, shape, devices: Devices) -> Iterator[Choice]:
        yield Choice("toy", "toy", cls(), 5)
'''

ENGINE = """
from pathlib import Path

from shardtune.parallel.ddp.engine import DDPEngine


class ToyEngine(DDPEngine):
    def __init__(self, model, setup, world, mark):
        self._mark = Path(f"{mark}.{world.rank}")
        super().__init__(model, setup, world)

    def step(self, microbatches):
        with self._mark.open("a") as file:
            file.write("step\\n")
        return super().step(microbatches)
"""

TRAIN = "{steps: 3, global_batch: 4, precision: fp32, log_every: 1}"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages with one that brings a strategy, and a job beside it."""
    package, about = tmp_path / "site/toy_strategy", tmp_path / "site/toy_strategy-1.0.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    (package / "__init__.py").touch()
    (package / "strategy.py").write_text(STRATEGY, encoding="utf-8")
    (package / "engine.py").write_text(ENGINE, encoding="utf-8")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-strategy\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[shardtune.strategies]\ntoy = toy_strategy.strategy:Toy\n", encoding="utf-8"
    )
    rows = ({"text": f"{n} and {n} are {2 * n}."} for n in range(40))
    (tmp_path / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_job(tmp_path, strategy="{type: toy}", train=TRAIN, launch="{processes: 2}")
    return tmp_path


def shardtune_says(folder: Path, *words: str, fails: bool = False) -> str:
    """What a command prints, in a process that has the toy installed."""
    paths = (str(folder / "site"), str(Path(shardtune.__file__).parents[1]))
    done = subprocess.run(
        [sys.executable, "-m", "shardtune", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout


def losses(folder: Path, run: str) -> list[Any]:
    lines = (folder / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [line["loss"] for line in found if "loss" in line]


def test_it_is_shown_planned_estimated_and_looked_at(site: Path) -> None:
    assert "toy" in shardtune_says(site, "show", "job.yaml")
    assert '"mark"' in shardtune_says(site, "schema")
    ranked = shardtune_says(site, "plan", "job.yaml", "--cluster", "4xA40", "--json")
    names = {each["name"] for each in json.loads(ranked)["candidates"]}
    assert {"toy", "ddp", "fsdp"} <= names
    estimated = shardtune_says(site, "estimate", "job.yaml", "--cluster", "4xA40", "--json")
    assert json.loads(estimated)["strategy"] == "toy"
    shardtune_says(site, "doctor", "job.yaml")


@pytest.mark.slow
@pytest.mark.long
def test_it_trains_as_data_parallelism_does(site: Path) -> None:
    shardtune_says(site, "train", "job.yaml", "save.directory=toy")
    shardtune_says(site, "train", "job.yaml", "save.directory=ddp", "strategy={type: ddp}")
    for rank in range(2):
        assert (site / f"toy.txt.{rank}").read_text() == "step\n" * 3
    assert losses(site, "toy") == losses(site, "ddp")
    assert len(losses(site, "toy")) == 3


def test_what_it_can_not_do_is_refused_with_its_reason(site: Path) -> None:
    words = ["show", "job.yaml", "adapter={type: lora}", "model.quantization=nf4"]
    said = shardtune_says(site, *words, fails=True)
    assert "model.quantization: a toy has no block of 4-bit numbers" in said
    assert "set model.quantization: none or int8, or use strategy: {type: ddp}" in said


def test_it_is_offered_where_others_are_refused(site: Path) -> None:
    """It takes int8, and slices don't: whoever is refused is told of it."""
    sliced = ["strategy={type: tensor, degree: 2}", "adapter={type: lora}"]
    said = shardtune_says(site, "show", "job.yaml", *sliced, "model.quantization=int8", fails=True)
    assert "{type: fsdp} or {type: toy}" in said


def test_a_package_that_can_not_be_loaded_is_named(site: Path) -> None:
    (site / "site/toy_strategy/strategy.py").write_text("import nothing_of_this_name\n")
    said = shardtune_says(site, "show", "job.yaml", fails=True)
    assert "shardtune.strategies of toy-strategy" in said
    assert "No module named 'nothing_of_this_name'" in said
    assert "fix: update toy-strategy, or uninstall it" in said


def test_a_name_that_is_taken_is_refused(site: Path) -> None:
    path = site / "site/toy_strategy/strategy.py"
    path.write_text(path.read_text().replace('"toy"] = "toy"', '"ddp"] = "ddp"'))
    said = shardtune_says(site, "show", "job.yaml", fails=True)
    assert "toy_strategy.strategy:Toy calls itself 'ddp', as another strategy does" in said
