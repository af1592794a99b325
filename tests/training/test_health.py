"""What is said about numbers that go wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardtune.config.job import TrainSection
from shardtune.core.step import MicroBatch, StepResult
from shardtune.core.world import World
from shardtune.engine.fake import FakeEngine
from shardtune.errors import BrokenWeights, OutOfMemory, RunError
from shardtune.train import fit
from shardtune.training.health import explain_oom
from tests.synthetic import batch
from tests.test_train import STEPS, make_run, metrics


class Troubled(FakeEngine):
    """Its third gradient isn't finite; then its weights may not be either."""

    def __init__(self, weights: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.weights = weights

    def step(self, microbatches: Sequence[MicroBatch]) -> StepResult:
        result = super().step(microbatches)
        if len(self.seen) == 3:
            return replace(result, applied=False, grad_norm=float("inf"), loss=float("nan"))
        return result

    def nonfinite_weights(self) -> tuple[str, ...]:
        return self.weights


def test_a_step_that_is_left_out_is_told_with_its_samples(tmp_path: Path) -> None:
    engine = Troubled()
    run, data = make_run(tmp_path, engine)
    progress = fit(run, data, run.begin(), STEPS)
    assert (progress.step, progress.skipped) == (STEPS, 1)
    (note,) = metrics(tmp_path, "not_finite")
    assert note["step"] == 3
    assert note["ranks"] == {"0": list(engine.seen[2])}
    assert engine.seen[2][0] in note["fact"]
    assert metrics(tmp_path, "step")[2]["loss"] is None


def test_or_ends_the_run(tmp_path: Path) -> None:
    run, data = make_run(tmp_path, Troubled(), train={"on_nan": "stop", "micro_batch": 2})
    with pytest.raises(RunError, match="step 3: the gradient is not finite"):
        fit(run, data, run.begin(), STEPS)


def test_it_is_told_at_the_next_look(tmp_path: Path) -> None:
    engine = Troubled()
    run, data = make_run(tmp_path, engine, train={"log_every": 4})
    progress = fit(run, data, run.begin(), STEPS)
    assert (progress.step, progress.skipped) == (STEPS, 1)
    (note,) = metrics(tmp_path, "not_finite")
    assert (note["step"], note["ranks"]) == (3, {"0": list(engine.seen[2])})


def test_and_ends_the_run_there(tmp_path: Path) -> None:
    engine = Troubled()
    run, data = make_run(tmp_path, engine, train={"on_nan": "stop", "log_every": 4})
    with pytest.raises(RunError, match="step 3: the gradient is not finite"):
        fit(run, data, run.begin(), STEPS)
    assert len(engine.seen) == 4
    assert [line["step"] for line in metrics(tmp_path, "step")] == [1, 2, 3, 4]
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_weights_that_are_no_numbers_are_never_saved(tmp_path: Path) -> None:
    run, data = make_run(tmp_path, Troubled(weights=("layer.0", "layer.1")), save={"every": 1})
    with pytest.raises(BrokenWeights, match=r"rank 0: at step 3 2 weights .*layer\.0"):
        fit(run, data, run.begin(), STEPS)
    run.saver.wait()
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert kept[-1] == "step-000002"


class Spiky(FakeEngine):
    def step(self, microbatches: Sequence[MicroBatch]) -> StepResult:
        result = super().step(microbatches)
        return replace(result, loss=150.0 if len(self.seen) == 12 else 3.0)


def test_a_spike_is_told_with_the_ids_of_its_batch(tmp_path: Path) -> None:
    engine = Spiky()
    run, data = make_run(tmp_path, engine)
    fit(run, data, run.begin(), 14)
    (note,) = metrics(tmp_path, "spike")
    assert note["step"] == 12
    assert sorted(note["samples"]) == sorted(engine.seen[11])
    assert "50 times the usual 3" in note["fact"]
    assert json.dumps(note)


NO_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=["python", "gpu", "cpu"])
def test_want_of_memory_names_rank_step_and_batch(error: Exception) -> None:
    given = [batch(1, rows=2, length=16), batch(2, rows=3, length=40)]
    with (
        pytest.raises(OutOfMemory) as caught,
        explain_oom(World(rank=3), "at step 7", given, TrainSection(micro_batch=4)),
    ):
        raise error
    (problem,) = caught.value.problems
    assert problem.place == "rank 3"
    assert "out of memory at step 7" in problem.fact
    assert "3 rows of up to 40 tokens" in problem.fact
    assert "train.micro_batch: 2" in problem.fix


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"micro_batch": 1}, "gradient_checkpointing: full"),
        ({"micro_batch": 1, "gradient_checkpointing": "most"}, "gradient_checkpointing: full"),
        ({"micro_batch": 1, "kernels": "compiled"}, "gradient_checkpointing: mlp"),
        (
            {"micro_batch": 1, "gradient_checkpointing": "mlp", "keep_layers": 9},
            "keep_layers: 4",
        ),
        ({"micro_batch": 1, "gradient_checkpointing": "full"}, "divide more over the ranks"),
    ],
)
def test_the_next_cheapest_change(settings: dict[str, object], fix: str) -> None:
    section = TrainSection.model_validate(settings)
    with (
        pytest.raises(OutOfMemory) as caught,
        explain_oom(World(), "at step 1", [batch(1)], section),
    ):
        raise MemoryError
    assert fix in caught.value.problems[0].fix


def test_other_errors_are_left_alone() -> None:
    with (
        pytest.raises(RuntimeError, match="shape"),
        explain_oom(World(), "at step 1", [batch(1)], TrainSection()),
    ):
        raise RuntimeError("a wrong shape")
