"""The preflight: it finds what would fail later, and training doesn't notice it."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from rich.console import Console

from shardtune.checkpoint.async_saver import AsyncSaver
from shardtune.checkpoint.run_dir import RunDir
from shardtune.config.job import LoRA, ModelSection, TrainSection
from shardtune.core.lr_schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup
from shardtune.core.step import EvalResult, MicroBatch
from shardtune.core.world import World
from shardtune.data.dataset import PreparedData
from shardtune.data.loader import Loader
from shardtune.engine.fake import FakeEngine
from shardtune.engine.optim.build_optimizer import future_moments, make_optimizer, moment_tensors
from shardtune.errors import OutOfMemory, RunError
from shardtune.launch.process_group import JoinedWorld
from shardtune.models import tiny
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.parallel import Strategy
from shardtune.report.live import RunView
from shardtune.training.evaluation import Evaluator
from shardtune.training.preflight import preflight, require_writable
from shardtune.training.run import Run
from tests.ranks import on_ranks
from tests.synthetic import batch, make_job, numbered, prepared

LONG = numbered(1, length=40)
DATA = PreparedData(
    train=(prepared("d", [*numbered(6), *LONG]),), eval=(prepared("held", numbered(3)),)
)


class Watched(FakeEngine):
    """Remembers what was evaluated; runs out of memory beyond so many tokens."""

    def __init__(self, room: int = 1 << 20) -> None:
        super().__init__()
        self.room = room
        self.evaluated: list[int] = []

    def preflight(self, microbatches: Sequence[MicroBatch]) -> None:
        super().preflight(microbatches)
        if microbatches[0].input_ids.numel() > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def evaluate(self, name: str, microbatches: Iterable[MicroBatch]) -> EvalResult:
        batches = list(microbatches)
        self.evaluated.append(len(batches))
        return super().evaluate(name, batches)


def make_run(folder: Path, engine: Watched, **train: Any) -> tuple[Run, Loader]:
    job = make_job(str(folder), train=train, data={"packing": False})
    data = Loader(
        DATA, job.data, seed=0, global_batch=4, micro_batch=2, rank=0, ranks=1, pad_id=0
    )  # fmt: skip
    evaluator = Evaluator(
        engine, DATA.eval, data.evaluation, tiny.tokens(), frozenset(), job.evaluate
    )
    view = RunView(3, console=Console(file=io.StringIO()))
    saver = AsyncSaver(folder / "checkpoints", JoinedWorld(), keep=1, background=False)
    return Run(
        job,
        JoinedWorld(),
        ModelFiles(job.model),
        engine,
        evaluator,
        RunDir(folder),
        view,
        {},
        saver,
    ), data


def test_the_longest_document_is_in_the_preflight(tmp_path: Path) -> None:
    engine = Watched()
    preflight(*make_run(tmp_path, engine))
    # A step of 4 rows in micro-batches of 2; the only document of 40 tokens makes both rows wide.
    assert engine.preflighted == [(2, 40), (2, 40)]
    assert engine.evaluated == [1]
    assert list(tmp_path.iterdir()) == []  # what was written to try is gone


def test_it_can_be_left_out(tmp_path: Path) -> None:
    engine = Watched(room=0)
    preflight(*make_run(tmp_path, engine, preflight=False))
    assert engine.preflighted == []


def test_want_of_memory_names_the_batch_and_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="2 rows of up to 40 tokens") as caught:
        preflight(*make_run(tmp_path, Watched(room=79)))
    assert "before the first step" in str(caught.value)
    assert "set train.micro_batch: 1" in str(caught.value)
    preflight(*make_run(tmp_path, Watched(room=80)))


def test_an_error_of_another_kind_is_left_as_it_is(tmp_path: Path) -> None:
    class Broken(Watched):
        def preflight(self, microbatches: Sequence[MicroBatch]) -> None:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        preflight(*make_run(tmp_path, Broken()))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_closed_folder_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    with pytest.raises(RunError, match="can't be written to"):
        require_writable(folder)


def test_a_full_disk_is_called_full(small_disk: Path) -> None:
    with pytest.raises(RunError, match="No space left") as error:
        require_writable(small_disk)
    assert "make room there" in str(error.value)


def test_what_is_no_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="can't be written to"):
        require_writable(tmp_path / "file" / "run")


@pytest.mark.parametrize(
    "setup", [OptimizerSetup(), OptimizerSetup("sgd"), OptimizerSetup("sgd", momentum=0.9)]
)
def test_room_is_taken_for_what_the_optimizer_will_hold(setup: OptimizerSetup) -> None:
    weights = {"a": torch.nn.Parameter(torch.ones(3, 4)), "b": torch.nn.Parameter(torch.ones(5))}
    room = future_moments(weights.values(), setup)
    optimizer = make_optimizer(weights, setup, 0.1)
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert sum(each.nbytes for each in room) == sum(m.nbytes for m in moment_tensors(optimizer))


STRATEGIES = {
    "alone": ({"type": "ddp"}, 1),
    "ddp": ({"type": "ddp"}, 3),  # with three ranks the order of a sum shows
    "fsdp": ({"type": "fsdp"}, 2),
    "fsdp-keep": ({"type": "fsdp", "reshard_after_forward": False}, 2),
    "tensor": ({"type": "tensor", "degree": 2}, 2),
    "pipeline": ({"type": "pipeline", "stages": 2}, 2),
    "zero2": ({"type": "deepspeed", "zero_optimization": {"stage": 2}}, 2),
    "zero3": ({"type": "deepspeed", "zero_optimization": {"stage": 3}}, 2),
}


LONG = {"fsdp-keep", "pipeline", "zero2"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in STRATEGIES],
)
def test_training_does_not_notice_it(name: str) -> None:
    settings, ranks = STRATEGIES[name]
    if settings["type"] == "deepspeed":
        pytest.importorskip("deepspeed")
    for plain, with_preflight in on_ranks(ranks, both_ways, settings):
        assert plain == with_preflight


def both_ways(world: World, settings: dict[str, Any]) -> list[tuple[list[float], str]]:
    """Losses and weights of three steps, without a preflight and with one. To the bit."""
    return [_train(world, settings, tried=tried) for tried in (False, True)]


def _train(world: World, settings: dict[str, Any], *, tried: bool) -> tuple[list[float], str]:
    strategy: Strategy = TypeAdapter(Strategy).validate_python(settings)
    train = TrainSection(precision="fp32")
    builder = PretrainedModelBuilder(
        ModelFiles(ModelSection(name="tiny")), LoRA(rank=4, dropout=0.1), train
    )
    setup = EngineSetup(
        "fp32", OptimizerSetup(), Schedule("constant", 1e-2, 0, 9), 1.0, 0, 2, accumulation=2
    )
    losses = []
    row = strategy.mesh(world.size).data_rank(world.rank)
    with strategy.build(builder, setup, world) as engine:
        if tried:
            engine.preflight([batch(99, length=24)] * 2)
        for step in range(3):
            mine = [batch(100 * step + 10 * row + n) for n in range(2)]
            losses.append(engine.step(mine).loss)
        digest = hashlib.sha256()
        for name, weight in sorted(engine.trained_weights()):
            digest.update(name.encode() + weight.cpu().numpy().tobytes())
    return losses, digest.hexdigest()
