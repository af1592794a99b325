"""The training loop, without a model and without processes; and a run with both, in this one."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from shardtune.checkpoint.async_saver import AsyncSaver
from shardtune.checkpoint.extension import continued
from shardtune.checkpoint.manifest import read_manifest
from shardtune.checkpoint.run_dir import RunDir, with_control_tokens
from shardtune.checkpoint.run_guards import require_same_job
from shardtune.config.auto import ResolvedJob
from shardtune.config.job import Job
from shardtune.config.job_file import load_job
from shardtune.core.engine import Engine
from shardtune.core.host.machine import Machine
from shardtune.core.progress import Progress
from shardtune.core.runs.run_history import read_events
from shardtune.core.runs.run_report import RunReport
from shardtune.core.step import LateResult, MicroBatch, StepResult
from shardtune.data.dataset import PreparedData
from shardtune.data.formats import make_format
from shardtune.data.loader import Loader
from shardtune.data.prepared_cache import fingerprint
from shardtune.data.sources import open_source
from shardtune.engine.fake import FakeEngine
from shardtune.errors import OutOfMemory, RunError
from shardtune.launch.process_group import JoinedWorld
from shardtune.models import tiny
from shardtune.models.hf_folder import write_folder
from shardtune.models.model_files import ModelFiles
from shardtune.plan.run_forecast import RunForecast
from shardtune.plan.this_machine import forecast_here
from shardtune.report.live import RunView
from shardtune.train import fit, train
from shardtune.training.evaluation import Evaluator
from shardtune.training.health import MOST_SKIPPED_IN_A_ROW
from shardtune.training.run import Run
from shardtune.training.scheduled_tasks import due
from tests.reports import make_report
from tests.synthetic import make_job, numbered, prepared

STEPS = 6
DATA = PreparedData(train=(prepared("d", numbered(10)),), eval=(prepared("held", numbered(3)),))


class Interrupted(FakeEngine):
    """Somebody presses Ctrl-C while the step `at` is computed."""

    def __init__(self, world: JoinedWorld, at: int) -> None:
        super().__init__()
        self.world, self.at = world, at

    def step(self, microbatches: Sequence[MicroBatch]) -> StepResult:
        result = super().step(microbatches)
        if len(self.seen) == self.at:
            self.world.stop_signals.on_signal(2, None)
        return result


def loader(job: Job) -> Loader:
    return Loader(
        DATA,
        job.data,
        seed=0,
        global_batch=job.train.global_batch,
        micro_batch=2,
        rank=0,
        ranks=1,
        pad_id=0,
    )


def make_run(folder: Path, engine: Engine, **sections: dict[str, Any]) -> tuple[Run, Loader]:
    job = make_job(str(folder), **sections)
    data = loader(job)
    evaluator = Evaluator(
        engine, DATA.eval, data.evaluation, tiny.tokens(), frozenset(), job.evaluate
    )
    view = RunView(STEPS, console=Console(file=io.StringIO()))
    files, world = RunDir(folder), JoinedWorld()
    saver = AsyncSaver(
        files.checkpoints,
        world,
        keep=job.save.keep,
        background=job.save.background,
        committed=files.mark_saved,
    )
    return Run(
        job,
        world,
        ModelFiles(job.model),
        engine,
        evaluator,
        files,
        view,
        {"train/d": "digest"},
        saver,
    ), data


def metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [found for line in lines if (found := json.loads(line))["kind"] == kind]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_every_sample_of_every_step_reaches_the_engine_in_order(tmp_path: Path) -> None:
    engine = FakeEngine()
    run, data = make_run(tmp_path, engine, data={"packing": False, "shuffle": False})
    progress = fit(run, data, run.begin(), STEPS)
    # 10 documents in the order of their file, 4 a step, begun again when they are through.
    expected = [f"d:{n % 10}" for n in range(4 * STEPS)]
    assert [sample for step in engine.seen for sample in step] == expected
    assert progress.step == STEPS
    assert progress.tokens == 8 * 4 * STEPS
    assert not progress.stopped


def test_each_step_is_a_line_of_the_metrics(tmp_path: Path) -> None:
    engine = FakeEngine()
    run, data = make_run(tmp_path, engine, data={"packing": False, "shuffle": False})
    progress = fit(run, data, run.begin(), STEPS)
    found = metrics(tmp_path, "step")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in found] == [1 / n for n in range(1, 7)]  # the fake's figure
    assert [line["labels"] for line in found] == [24] * 6  # 4 documents with 6 trained tokens
    assert [line["epoch"] for line in found] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.4])
    for line, samples in zip(found, engine.seen, strict=True):
        assert line["samples_sha256"] == hashlib.sha256("\n".join(samples).encode()).hexdigest()
        assert line["seconds"] > 0
        assert line["tokens_per_second"] > 0
    assert (progress.first_loss, progress.last_loss) == (1.0, 1 / 6)


@pytest.mark.parametrize(("step", "every", "expected"), [
    (4, 2, True), (5, 2, False), (1, 1, True), (7, 0, False), (0, 0, False),
])  # fmt: skip
def test_due(step: int, every: int, expected: bool) -> None:
    assert due(step, every) is expected


def test_saves_and_evaluations_when_due(tmp_path: Path) -> None:
    engine = FakeEngine()
    run, data = make_run(tmp_path, engine, save={"every": 2, "keep": 9}, evaluate={"every": 3})
    fit(run, data, run.begin(), STEPS)
    assert checkpoints(tmp_path) == ["step-000002", "step-000004", "step-000006"]
    # Before the first step and after the third; the one after the last belongs to `finish`.
    assert [(line["step"], line["set"]) for line in metrics(tmp_path, "evaluation")] == [
        (0, "held"),
        (3, "held"),
    ]


def test_only_the_end_is_saved_unless_asked_for(tmp_path: Path) -> None:
    run, data = make_run(tmp_path, FakeEngine())
    fit(run, data, run.begin(), STEPS)
    assert checkpoints(tmp_path) == [f"step-{STEPS:06d}"]
    assert [line["step"] for line in metrics(tmp_path, "evaluation")] == [0]


def test_a_wish_to_stop_ends_the_run_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    world = JoinedWorld()
    engine = Interrupted(world, at=3)
    run, data = make_run(tmp_path, engine, evaluate={"every": 1})
    progress = fit(replace(run, world=world), data, run.begin(), STEPS)
    assert progress.stopped
    assert progress.step == len(engine.seen) == 3
    assert checkpoints(tmp_path) == ["step-000003"]
    # None after the third step: who wants to stop doesn't want to wait for an evaluation.
    assert [line["step"] for line in metrics(tmp_path, "evaluation")] == [0, 1, 2]


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = FakeEngine()
    run, data = make_run(tmp_path / "whole", whole)
    fit(run, data, run.begin(), STEPS)

    world = JoinedWorld()
    run, data = make_run(tmp_path / "parts", Interrupted(world, at=2))
    stopped = fit(replace(run, world=world), data, run.begin(), STEPS)
    engine = FakeEngine()
    run, data = make_run(tmp_path / "parts", engine)
    resumed = run.resume()
    assert (resumed.step, resumed.tokens, resumed.first_loss) == (2, stopped.tokens, 1.0)
    assert resumed.seconds == pytest.approx(stopped.seconds)
    progress = fit(run, data, resumed, STEPS)
    assert engine.seen[2:] == whole.seen[2:]
    assert progress.step == STEPS
    assert progress.first_loss == 1.0
    assert not progress.stopped
    kept = ("step", "loss", "labels", "epoch", "samples_sha256")
    one, other = (
        [{key: line[key] for key in kept} for line in metrics(tmp_path / name, "step")]
        for name in ("whole", "parts")
    )
    assert one == other


class Failing(FakeEngine):
    """Loses its power in the step after `last`."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def step(self, microbatches: Sequence[MicroBatch]) -> StepResult:
        if len(self.seen) == self.last:
            raise OSError("no power")
        return super().step(microbatches)


def test_a_run_without_a_checkpoint_is_resumed_from_its_beginning(tmp_path: Path) -> None:
    run, data = make_run(tmp_path, Failing(last=2))
    with pytest.raises(OSError, match="no power"):
        fit(run, data, run.begin(), STEPS)
    engine = FakeEngine()
    run, data = make_run(tmp_path, engine)
    assert run.resume() == Progress()
    fit(run, data, Progress(), STEPS)
    assert [line["step"] for line in metrics(tmp_path, "step")] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in metrics(tmp_path, "evaluation")] == [0]


def test_steps_after_the_checkpoint_are_taken_again_and_written_once(tmp_path: Path) -> None:
    run, data = make_run(tmp_path, Failing(last=3), save={"every": 2}, evaluate={"every": 1})
    with pytest.raises(OSError, match="no power"):
        fit(run, data, run.begin(), STEPS)  # the third step is after the last checkpoint
    run.files.write_report(make_report())
    run, data = make_run(tmp_path, FakeEngine(), save={"every": 2}, evaluate={"every": 1})
    fit(run, data, run.resume(), STEPS)
    assert [line["step"] for line in metrics(tmp_path, "step")] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in metrics(tmp_path, "evaluation")] == [0, 1, 2, 3, 4, 5]
    assert run.files.read_report() is None, "it told of the run as it was before"


def test_a_checkpoint_holds_the_engine_and_the_progress(tmp_path: Path) -> None:
    run, data = make_run(tmp_path, FakeEngine(), save={"every": 6})
    progress = fit(run, data, run.begin(), STEPS)
    manifest = read_manifest(tmp_path / "checkpoints" / "step-000006")
    assert manifest.step == 6
    assert manifest.tensors.keys() == {"weight.weight"}
    assert manifest.numbers == {"taken": 6.0}
    assert manifest.progress == progress
    assert (manifest.run, manifest.ranks) == (run.files.run_id(), 1)


# The whole story, with the tiny model ------------------------------------------------------------


def data_file(path: Path, count: int, first: int = 0) -> str:
    rows = [
        {"instruction": f"Say {n}.", "output": f"It is {n}."} for n in range(first, first + count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def train_here(job: Job) -> RunReport:
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    found = forecast_here(job, Machine.here())
    report = train(job, predicted=RunForecast.of(found) if found is not None else None)
    torch.set_num_threads(threads)
    assert signal.getsignal(signal.SIGINT) is handler
    assert report is not None
    return report


@pytest.mark.slow
@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("held_out", [True, False], ids=["eval", "no-eval"])
def test_train_in_this_process(tmp_path: Path, held_out: bool) -> None:
    source = {"format": "instruction", "path": data_file(tmp_path / "d.jsonl", 20), "name": "d"}
    judged = {"format": "instruction", "path": data_file(tmp_path / "e.jsonl", 4, 50), "name": "e"}
    job = make_job(
        str(tmp_path / "run"),
        data={"train": [source], "eval": [judged] if held_out else [], "sequence_length": 64},
        train={"steps": 3, "global_batch": 2, "precision": "fp32", "learning_rate": 1e-3},
        evaluate={"every": 0, "samples": 2, "max_new_tokens": 4},
        adapter={"type": "lora", "rank": 2},
    )
    report = train_here(job)
    assert report == RunDir(tmp_path / "run").read_report()
    assert report.finished
    assert report.training.step == 3
    assert report.result.largest_difference == 0.0
    assert report.forecast is not None
    held = report.forecast.held_bytes  # on a processor nothing else can be measured
    assert [pair.error for pair in (held.params, held.grads, held.optim)] == [0, 0, 0]
    assert list(report.evaluation) == (["e"] if held_out else [])
    assert len(report.samples) == (2 if held_out else 0)
    if not held_out:  # a result that was lost is written again, from the last checkpoint
        weights = (tmp_path / "run" / "result" / "adapter_model.safetensors").read_bytes()
        shutil.rmtree(tmp_path / "run" / "result")
        again = train(job, resume=True)
        assert again is not None
        assert again.finished
        assert (tmp_path / "run/result/adapter_model.safetensors").read_bytes() == weights
    if held_out:
        assert report.samples[0].prompt == "Say 50."
        assert report.samples[0].reference == "It is 50."
        before, after = report.evaluation["e"].before, report.evaluation["e"].after
        assert before is not None
        assert (after.loss or 0.0) < (before.loss or 0.0)


@pytest.mark.long
@pytest.mark.usefixtures("no_cache")
def test_8_bit_frozen_weights_from_the_start_to_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = {"format": "instruction", "path": data_file(tmp_path / "d.jsonl", 20), "name": "d"}
    job = make_job(
        str(tmp_path / "run"),
        data={"train": [source], "sequence_length": 64},
        train={"steps": 4, "global_batch": 2, "precision": "bf16", "learning_rate": 1e-3},
        adapter={"type": "lora", "rank": 2},
        model={"quantization": "fp8"},
        save={"directory": str(tmp_path / "run"), "every": 2, "keep": 3},
    )
    report = train_here(job)
    assert "stored in fp8, multiplied in bf16" in capsys.readouterr().out.replace("\n", " ")
    assert report.finished
    assert report.result.kind == "lora"
    result = tmp_path / "run" / "result" / "adapter_model.safetensors"
    losses, weights = computed(tmp_path / "run"), result.read_bytes()
    # As if it had been killed in its third step.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / checkpoints(tmp_path / "run")[-1])
    again = train(job, resume=True)
    assert again is not None
    assert again.finished
    assert computed(tmp_path / "run") == losses
    assert result.read_bytes() == weights


@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_weights_of_a_16_bit_model(tmp_path: Path, precision: str) -> None:
    """Updated in fp32, and found again as written: in 16 bits after computing in 16."""
    config = tiny.config()
    config.dtype = torch.bfloat16
    weights = {name: tensor.bfloat16() for name, tensor in tiny.weights().items()}
    (tmp_path / "model").mkdir()
    write_folder(tmp_path / "model", config, weights, tiny.tokens())
    source = {"format": "instruction", "path": data_file(tmp_path / "d.jsonl", 20), "name": "d"}
    job = make_job(
        str(tmp_path / "run"),
        model={"name": str(tmp_path / "model")},
        data={"train": [source], "sequence_length": 64},
        train={"steps": 2, "global_batch": 2, "precision": precision, "learning_rate": 1e-3},
    )
    report = train_here(job)
    assert report.result.kind == "full fine-tune"
    difference = report.result.largest_difference
    assert difference == 0 if precision == "fp32" else 0 < difference < 0.1
    found = load_file(tmp_path / "run" / "result" / "model.safetensors")
    assert found.keys() == weights.keys()
    written = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    assert {tensor.dtype for tensor in found.values()} == {written}
    assert any(not torch.equal(found[name].bfloat16(), weights[name]) for name in weights)


def extendable(folder: Path, name: str, *, packing: bool = True, **train: Any) -> Job:
    source = {"format": "instruction", "path": data_file(folder / "d.jsonl", 20), "name": "d"}
    return make_job(
        str(folder / name),
        data={"train": [source], "sequence_length": 64, "packing": packing},
        train={"global_batch": 2, "precision": "fp32", "learning_rate": 1e-3, **train},
        adapter={"type": "lora", "rank": 2, "dropout": 0.1},
        save={"directory": str(folder / name), "trace": True},
    )


@pytest.mark.slow
@pytest.mark.usefixtures("no_cache")
def test_an_extended_run_is_a_run_of_that_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the schedule doesn't depend on the length, to the bit, from the first step on."""
    rate: dict[str, Any] = {"schedule": "constant", "warmup_steps": 2}
    train_here(extendable(tmp_path, "parts", steps=3, **rate))
    longer = extendable(tmp_path, "parts", steps=6, **rate)
    require_same_job(RunDir(tmp_path / "parts"), longer)
    capsys.readouterr()
    train(longer, resume=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "was begun with 3 steps and has 6 steps now" in said
    assert "the schedule (constant) goes on as in a run of 6 steps" in said
    (event,) = read_events(tmp_path / "parts")
    assert (event.kind, event.step) == ("resume", 3)
    train_here(extendable(tmp_path, "whole", steps=6, **rate))
    parts, whole = (tmp_path / name / "trace.jsonl" for name in ("parts", "whole"))
    assert parts.read_text() == whole.read_text()
    found = RunDir(tmp_path / "parts").read_job()
    assert found is not None
    assert found.train.steps == 6, "what is resumed from now on is the longer run"


@pytest.mark.slow
@pytest.mark.usefixtures("no_cache")
def test_a_schedule_can_begin_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_here(extendable(tmp_path, "run", epochs=0.3, schedule="linear"))
    at = RunDir(tmp_path / "run").read_report()
    assert at is not None
    done = at.training.step
    anew: dict[str, Any] = {"schedule": "linear", "schedule_start": done, "warmup_steps": 1}
    train(extendable(tmp_path, "run", steps=done + 4, **anew), resume=True)
    said = " ".join(capsys.readouterr().out.split())
    assert f"the schedule (linear) begins anew after step {done}" in said
    rates = [line["learning_rate"] for line in metrics(tmp_path / "run", "step")[-4:]]
    assert rates == pytest.approx([0.0, 1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    with pytest.raises(RunError, match=f"has done {done + 4} steps already; this job has 1"):
        train(extendable(tmp_path, "run", steps=1, schedule="linear"), resume=True)


@pytest.mark.long
@pytest.mark.usefixtures("no_cache")
def test_epochs_that_are_added_are_whole(tmp_path: Path) -> None:
    """The short step at the first end doesn't cost rows of the next epoch."""
    once, twice = (
        extendable(tmp_path, "run", epochs=epochs, global_batch=8, packing=False)
        for epochs in (1.0, 2.0)
    )
    assert train_here(once).training.step == 3  # of 20 rows
    run = RunDir(tmp_path / "run")
    longer = continued(ResolvedJob(twice, {}), run).job
    require_same_job(run, longer)
    train(longer, resume=True)
    steps = metrics(tmp_path / "run", "step")
    assert [line["epoch"] for line in steps] == pytest.approx([0.4, 0.8, 1.0, 1.4, 1.8, 2.0])
    found = run.read_job()
    assert found is not None
    assert found.train.earlier_ends == (1.0,)


@pytest.mark.parametrize("gone", ["folder", "content"])
def test_a_run_whose_checkpoints_are_out_of_sight_does_not_start_over(
    tmp_path: Path, gone: str
) -> None:
    run, data = make_run(tmp_path / "run", FakeEngine())
    fit(run, data, run.begin(), STEPS)
    folder = run.files.checkpoints
    folder.rename(tmp_path / "unmounted")
    if gone == "content":
        folder.mkdir()
    before = run.files.run_id()
    with pytest.raises(RunError, match="but checkpoints/ is empty or not there") as told:
        run.resume()
    assert "--overwrite" not in str(told.value)
    (tmp_path / "unmounted" / "step-000006").rename(tmp_path / "step-000006")
    if gone == "content":
        folder.rmdir()
    (tmp_path / "unmounted").rename(folder)
    (tmp_path / "step-000006").rename(folder / "step-000006")
    assert run.files.run_id() == before
    assert run.resume().step == STEPS


def test_a_run_that_never_saved_starts_from_its_first_step(tmp_path: Path) -> None:
    run, data = make_run(tmp_path / "run", FakeEngine())
    other, others_data = make_run(tmp_path / "other", FakeEngine())
    fit(other, others_data, other.begin(), STEPS)
    run.begin()
    shutil.copytree(other.files.checkpoints, run.files.checkpoints)
    assert run.resume().step == 0
    fit(run, data, run.resume(), STEPS)
    assert checkpoints(tmp_path / "run") == ["step-000006", "step-000006.of-another-run"]


def test_a_run_is_not_resumed_on_other_rows(tmp_path: Path) -> None:
    run, data = make_run(tmp_path, FakeEngine())
    fit(run, data, run.begin(), STEPS)
    other = replace(run, data={"train/d": "another digest"})
    with pytest.raises(RunError, match="train/d: the rows are others"):
        other.resume()


def as_before_control_tokens(run: RunDir) -> None:
    """The run directory as the version before `data.control_tokens` wrote it: no marker, no such
    key, and the key of its cache for a digest."""
    document = run.job.read_text(encoding="utf-8")
    assert "\n  control_tokens: token\n" in document
    run.job.write_text(document.replace("\n  control_tokens: token\n", "\n"), encoding="utf-8")
    job = load_job(run.job).job
    (source,) = job.data.train
    tokenizer = ModelFiles(job.model).tokenizer
    facts = [
        4,
        open_source(source).digest,
        make_format(source, tokenizer).settings,
        source.overflow,
        job.data.sequence_length,
        fingerprint(tokenizer),
    ]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    environment = run.path / "environment.json"
    noted = json.loads(environment.read_text(encoding="utf-8"))
    environment.write_text(json.dumps(noted | {"data": {"train/d": digest}}), encoding="utf-8")
    (run.path / "run.json").unlink()


@pytest.mark.slow
@pytest.mark.usefixtures("no_cache")
def test_a_run_of_an_earlier_version_is_resumed(tmp_path: Path) -> None:
    job = extendable(tmp_path, "run", steps=2)
    run = RunDir(tmp_path / "run")
    train_here(with_control_tokens(job))
    as_before_control_tokens(run)
    for steps in (3, 4):  # it stays one when it is extended
        longer = continued(ResolvedJob(extendable(tmp_path, "run", steps=steps), {}), run)
        assert longer.reasons["data", "control_tokens"].startswith("as the run was begun")
        require_same_job(run, longer.job)
        train(longer.job, resume=True)
        assert [line["step"] for line in metrics(run.path, "step")] == list(range(1, steps + 1))
    begun = run.read_job()
    assert begun is not None
    assert begun.data.control_tokens == "token"


def test_digests_of_other_versions_are_known(tmp_path: Path) -> None:
    run, data = make_run(tmp_path, FakeEngine())
    fit(run, data, run.begin(), STEPS)
    (trained,) = DATA.train
    now = replace(trained, digest="of now", other_digests=("digest",))
    sets = replace(DATA, train=(now,), eval=())
    assert replace(run, data=sets.digests(), sets=sets).resume().step == STEPS


def test_a_run_that_learns_nothing_does_not_end_well(tmp_path: Path) -> None:
    class Broken(FakeEngine):
        def step(self, microbatches: Sequence[MicroBatch]) -> StepResult:
            return replace(super().step(microbatches), applied=False, grad_norm=float("nan"))

    run, data = make_run(tmp_path, Broken())
    with pytest.raises(
        RunError, match=f"the last {MOST_SKIPPED_IN_A_ROW} gradients were not finite"
    ):
        fit(run, data, run.begin(), 2 * MOST_SKIPPED_IN_A_ROW)
    assert metrics(tmp_path, "step")[-1]["grad_norm"] is None  # JSON has no NaN


# Looks ------------------------------------------------------------------------------------------

MEASURED = {
    "seconds", "tokens_per_second", "seconds_left", "memory_gib", "busy", "utilisation", "parts"
}  # fmt: skip


class Late(FakeEngine):
    """Knows what came out of a step only when somebody looks, and notes when that is."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[tuple[int, int]] = []
        """A step, and how many had been taken when it was looked at."""

    def step(self, microbatches: Sequence[MicroBatch]) -> StepResult:
        result = super().step(microbatches)
        number = len(self.seen)

        def wait() -> StepResult:
            self.looks.append((number, len(self.seen)))
            return result

        return LateResult(wait)


def computed(folder: Path) -> list[dict[str, Any]]:
    """All lines of the metrics, without what a clock said."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in MEASURED}
        for line in lines
    ]


def test_a_look_reads_every_step_since_the_last(tmp_path: Path) -> None:
    engine = Late()
    run, data = make_run(tmp_path, engine, train={"log_every": 4})
    progress = fit(run, data, run.begin(), 10)
    # After the first step, every fourth, each time up to the one before, and at the end.
    assert engine.looks == [
        (1, 1), (2, 4), (3, 4), (4, 8), (5, 8), (6, 8), (7, 8), (8, 10), (9, 10), (10, 10),
    ]  # fmt: skip
    assert (progress.step, progress.last_loss) == (10, 1 / 10)


def test_a_device_has_a_step_to_compute_while_one_is_read(tmp_path: Path) -> None:
    engine = Late()
    run, data = make_run(tmp_path, engine)
    progress = fit(run, data, run.begin(), 6)
    assert engine.looks == [(1, 1), (2, 3), (3, 4), (4, 5), (5, 6), (6, 6)]
    assert [line["step"] for line in metrics(tmp_path, "step")] == [1, 2, 3, 4, 5, 6]
    assert progress.step == 6


def test_a_step_takes_what_a_device_says_that_it_took(tmp_path: Path) -> None:
    class Clocked(Late):
        def step(self, microbatches: Sequence[MicroBatch]) -> StepResult:
            result, first = super().step(microbatches), len(self.seen) == 1
            own = None if first else 100.0 + len(self.seen)
            return LateResult(lambda: replace(result.read(), since_last=own))

    run, data = make_run(tmp_path, Clocked())
    fit(run, data, run.begin(), 4)
    first, *others = metrics(tmp_path, "step")
    assert first["seconds"] < 100
    assert [line["seconds"] for line in others] == pytest.approx([102, 103, 104], abs=0.5)
    assert not any("since_last" in line for line in others)


@pytest.mark.parametrize("every", [1, 6])
def test_what_a_device_says_late_is_said_of_its_own_step(tmp_path: Path, every: int) -> None:
    class Broken(Late):
        def step(self, microbatches: Sequence[MicroBatch]) -> StepResult:
            result, bad = super().step(microbatches), len(self.seen) == 3
            change = {"applied": False, "grad_norm": float("nan")} if bad else {}
            return LateResult(lambda: replace(result.read(), **change))

    engine = Broken()
    settings = {"on_nan": "stop", "log_every": every}
    run, data = make_run(tmp_path, engine, train=settings)
    with pytest.raises(RunError, match="step 3: the gradient is not finite"):
        fit(run, data, run.begin(), 8)
    assert len(engine.seen) == max(4, every)  # as many had been given to the device
    lines = metrics(tmp_path, "step")
    taken = range(1, len(engine.seen) + 1)
    assert [(line["step"], line["loss"]) for line in lines] == [(n, 1 / n) for n in taken]


@pytest.mark.parametrize("every", [1, 4])
def test_what_a_device_has_done_is_logged_when_the_next_step_fails(
    tmp_path: Path, every: int
) -> None:
    class Full(Late):
        def step(self, microbatches: Sequence[MicroBatch]) -> StepResult:
            if len(self.seen) == 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().step(microbatches)

    run, data = make_run(tmp_path, Full(), train={"log_every": every})
    with pytest.raises(OutOfMemory, match="out of memory at step 4"):
        fit(run, data, run.begin(), 6)
    assert [line["step"] for line in metrics(tmp_path, "step")] == [1, 2, 3]


def test_nobody_waits_for_a_step_that_may_never_be_done(tmp_path: Path) -> None:
    class Stuck(Late):
        def step(self, microbatches: Sequence[MicroBatch]) -> StepResult:
            if len(self.seen) == 4:
                raise ConnectionError("a peer is gone")
            result, number = super().step(microbatches), len(self.seen)
            assert isinstance(result, LateResult)
            return LateResult(result.read, lambda: number < 4)

    engine = Stuck()
    run, data = make_run(tmp_path, engine, train={"log_every": 9})
    with pytest.raises(ConnectionError):
        fit(run, data, run.begin(), 6)
    assert [line["step"] for line in metrics(tmp_path, "step")] == [1, 2, 3]
    assert [step for step, _ in engine.looks] == [1, 2, 3]


def test_a_device_that_can_say_nothing_hides_no_failure(tmp_path: Path) -> None:
    class Dead(Late):
        def step(self, microbatches: Sequence[MicroBatch]) -> StepResult:
            result = super().step(microbatches)
            if len(self.seen) == 4:
                raise RuntimeError("the device is lost")
            if len(self.seen) < 3:
                return result

            def wait() -> StepResult:
                raise RuntimeError("nor can it be asked")

            return LateResult(wait)

    run, data = make_run(tmp_path, Dead())
    with pytest.raises(RuntimeError, match="the device is lost"):
        fit(run, data, run.begin(), 6)
    assert [line["step"] for line in metrics(tmp_path, "step")] == [1, 2]


def test_evaluations_and_checkpoints_are_looks(tmp_path: Path) -> None:
    engine = Late()
    sections = {"save": {"every": 3}, "evaluate": {"every": 5}, "train": {"log_every": 100}}
    run, data = make_run(tmp_path, engine, **sections)
    fit(run, data, run.begin(), 8)
    assert [(a, b) for a, b in engine.looks if a == b] == [(1, 1), (3, 3), (5, 5), (6, 6), (8, 8)]
    assert [a for a, _ in engine.looks] == list(range(1, 9))


def test_a_trace_is_taken_after_each_step(tmp_path: Path) -> None:
    engine = Late()
    run, data = make_run(tmp_path, engine, train={"log_every": 4}, save={"trace": True})
    fit(run, data, run.begin(), STEPS)
    assert engine.looks == [(n, n) for n in range(1, STEPS + 1)]


def test_the_steps_of_a_look_share_its_time(tmp_path: Path) -> None:
    run, data = make_run(tmp_path, Late(), train={"log_every": 3})
    progress = fit(run, data, run.begin(), STEPS)
    seconds = [line["seconds"] for line in metrics(tmp_path, "step")]
    assert seconds[2] == seconds[3] == seconds[4] == seconds[5]  # the last look is a whole one
    assert seconds[1] != seconds[2]
    assert sum(seconds) == pytest.approx(progress.seconds)


def test_how_often_is_looked_changes_no_line(tmp_path: Path) -> None:
    for every in (1, 4):
        settings = {"save": {"every": 5}, "evaluate": {"every": 3}, "train": {"log_every": every}}
        run, data = make_run(tmp_path / str(every), Late(), **settings)
        fit(run, data, run.begin(), 10)
    assert computed(tmp_path / "1") == computed(tmp_path / "4")


def test_a_run_that_stopped_between_two_looks_goes_on(tmp_path: Path) -> None:
    run, data = make_run(tmp_path / "whole", FakeEngine())
    fit(run, data, run.begin(), STEPS)

    world = JoinedWorld()
    parts = {"train": {"log_every": 4}}
    run, data = make_run(tmp_path / "parts", Interrupted(world, at=2), **parts)
    stopped = fit(replace(run, world=world), data, run.begin(), STEPS)
    assert (stopped.step, stopped.stopped) == (2, True)
    engine = Late()
    run, data = make_run(tmp_path / "parts", engine, **parts)
    fit(run, data, run.resume(), STEPS)
    assert engine.looks == [(3, 3), (4, 6), (5, 6), (6, 6)]
    assert computed(tmp_path / "parts") == computed(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.usefixtures("no_cache")
def test_a_model_learns_the_same_however_often_one_looks(tmp_path: Path) -> None:
    source = {"format": "instruction", "path": data_file(tmp_path / "d.jsonl", 20), "name": "d"}
    train_section = {"steps": 5, "global_batch": 2, "precision": "fp32", "micro_batch": 1}
    for every in (1, 3):
        job = make_job(
            str(tmp_path / str(every)),
            data={"train": [source], "sequence_length": 64},
            train=train_section | {"log_every": every},
        )
        train_here(job)
    assert computed(tmp_path / "1") == computed(tmp_path / "3")
    one, other = (
        load_file(tmp_path / str(every) / "result" / "model.safetensors") for every in (1, 3)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
