"""Where the time of a step went, on each rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardtune.core.host.heartbeat import Heartbeat
from shardtune.core.host.stop_request import StopRequest
from shardtune.core.runs.metrics import StepMetrics
from shardtune.core.runs.step_parts import ACCOUNT, PARTS, DeviceParts, StepParts, total_parts
from shardtune.core.step import LateResult, MicroBatch, StepResult
from shardtune.core.world import World
from shardtune.data.loader import LoadingTime
from shardtune.engine.fake import FakeEngine
from shardtune.train import fit
from shardtune.training.meter import Meter
from shardtune.training.part_recorder import PartRecorder
from shardtune.training.pending_steps import PendingSteps
from tests.jobs import make_job
from tests.synthetic import batch
from tests.test_train import STEPS, make_run, metrics

NAP = 0.02


class Slow(FakeEngine):
    """Computes and updates for a while, and says so."""

    heartbeat = Heartbeat()

    def step(self, microbatches: Sequence[MicroBatch]) -> StepResult:
        self.heartbeat.forward(1, 1)
        time.sleep(NAP)
        self.heartbeat.enter("backward")
        time.sleep(2 * NAP)
        self.heartbeat.enter("update")
        time.sleep(NAP)
        return super().step(microbatches)


def test_the_metrics_tell_where_the_time_went(tmp_path: Path) -> None:
    engine = Slow()
    run, data = make_run(tmp_path, engine, evaluate={"every": 2})
    engine.heartbeat = run.world.heartbeat
    fit(run, data, run.begin(), STEPS)
    told = [StepMetrics.model_validate(line) for line in metrics(tmp_path, "step")]
    found = [line.parts for line in told if line.parts is not None]
    assert found, "the first line has them"
    (rank,) = found[0].ranks
    assert found[0].steps == 1
    assert rank.compute >= 3 * NAP
    assert rank.optimizer >= NAP
    assert rank.communication == rank.transfer == 0.0
    assert rank.positions > 0
    assert sum(found[0].shares().values()) == pytest.approx(1.0)
    assert len(found) < STEPS, "one a second is enough"


def recorder(device: str = "cpu", **strategy: object) -> PartRecorder:
    job = make_job(strategy={"type": "ddp", **strategy}, launch={"processes": 2})
    return PartRecorder(job, World(size=2, device=device))


def taken(
    found: PartRecorder,
    results: Sequence[StepResult] = (),
    loaded: LoadingTime = LoadingTime(),  # noqa: B008
) -> dict[str, float]:
    return dict(zip(ACCOUNT, found.take(results, loaded), strict=True))


SPENT = {"data": 1.0, "forward": 2.0, "backward": 4.0, "collective": 8.0, "update": 16.0,
         "evaluate": 32.0, "save": 64.0, "log": 128.0}  # fmt: skip


def told(found: PartRecorder) -> None:
    """As if each phase had taken so long, half of it at work."""
    for phase, seconds in SPENT.items():
        found._clock.spent[phase] = seconds
        found._clock.worked[phase] = seconds / 2


def test_a_processor_that_does_not_work_waits_for_others() -> None:
    found = recorder()
    told(found)
    parts = taken(found)
    assert parts.pop("queued") < 10.0, "real time"
    assert parts == {
        "data": 1.0, "transfer": 0.0,
        "compute": 2.0 + 2.0,  # nothing is sent in a forward pass of data parallelism
        "communication": 8.0 + 2.0 + 8.0, "optimizer": 8.0, "save": 64.0, "evaluation": 32.0,
        "logging": 128.0, "other": 0.0, "positions": 0.0, "loading": 0.0, "loading_work": 0.0,
    }  # fmt: skip
    found.close()


def test_a_sharded_model_waits_in_the_forward_pass_too() -> None:
    found = recorder(type="fsdp")
    told(found)
    parts = taken(found)
    assert parts["compute"] == 1.0 + 2.0
    assert parts["communication"] == 8.0 + 1.0 + 2.0 + 8.0
    found.close()


def test_a_gpu_that_stands_still_waits_for_data_first() -> None:
    found = recorder("cuda:0")
    found._clock.spent.update(data=0.5, log=0.25, save=2.0, forward=100.0)
    device = DeviceParts(transfer=0.25, compute=4.0, communication=0.5, optimizer=1.0)
    result = StepResult(1.0, 1.0, 1e-3, 1, 1, busy=4.25, since_last=9.0, on_device=device)
    parts = taken(found, [result])
    assert parts["compute"] == 4.0
    assert parts["data"] == 0.5
    assert parts["logging"] == 0.25
    assert parts["other"] == 9.0 - 5.75 - 2.0 - 0.75
    assert sum(parts[name] for name in PARTS) == pytest.approx(9.0)
    found.close()


def test_a_flush_that_reads_no_step_books_no_time(tmp_path: Path) -> None:
    """An evaluation before it would count twice: by the host's clock and by the device's."""
    run, data = make_run(tmp_path, FakeEngine())
    device = DeviceParts(transfer=0.0, compute=1.0, communication=0.0, optimizer=0.0)
    result = StepResult(1.0, 1.0, 1e-3, 1, 1, since_last=11.0, on_device=device)
    with PendingSteps(run, data, Meter(STEPS, "cpu"), run.begin()) as pending:
        pending._parts.close()
        pending._parts = PartRecorder(run.job, World(size=1, device="cuda:0"))
        pending._parts._clock.spent["evaluate"] = 10.0
        for _ in range(2):
            pending.add(LateResult(lambda: result), [])
            pending.flush(StopRequest.NONE, whole=False)
    (line,) = (StepMetrics.model_validate(line) for line in metrics(tmp_path, "step"))
    assert line.parts is not None
    (rank,) = line.parts.ranks
    assert (rank.compute, rank.evaluation, rank.other) == (1.0, 10.0, 0.0)


def test_positions_count_padding() -> None:
    found = recorder()
    found.count([batch(0, rows=2, length=5), batch(1, rows=1, length=7)])
    assert taken(found)["positions"] == 17
    assert taken(found)["positions"] == 0
    found.close()


def test_accounts_are_averages_and_come_when_it_is_time() -> None:
    found = recorder()
    row = [float(number) for number in range(len(PARTS))]
    one, two = [*row, 0.0, 3.0, 1.0, 10.0], [*(2 * each for each in row), 0.0, 3.0, 1.0, 30.0]
    first = found.put_together([one, two], steps=2)
    assert isinstance(first, StepParts)
    assert first.steps == 2
    assert [rank.positions for rank in first.ranks] == [5, 15]
    assert first.ranks[0].seconds() == [each / 2 for each in row]
    assert (first.ranks[0].loading, first.ranks[0].loading_work) == (1.5, 0.5)
    assert first.imbalance == 1.5, "30 of 20 on average"
    assert found.put_together([one, two], steps=2) is None, "it was told a moment ago"
    found._written -= 1.0
    second = found.put_together([one, two], steps=2)
    assert second is not None
    assert second.steps == 4
    assert second.ranks == first.ranks
    assert total_parts([first, second]) == second.model_copy(update={"steps": 6})
    found.close()


def test_the_loaders_own_time_is_told_beside() -> None:
    found = recorder()
    taken(found, loaded=LoadingTime(2.0, 1.0))
    parts = taken(found, loaded=LoadingTime(5.0, 1.5))
    assert (parts["loading"], parts["loading_work"]) == (3.0, 0.5)
    found.close()
