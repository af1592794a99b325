"""`shardtune verify`: every byte of a run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from shardtune.api import load_result
from shardtune.checkpoint.disk_space import estimate_disk, require_disk_space
from shardtune.checkpoint.export import save_result
from shardtune.checkpoint.latest import latest_checkpoint
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.run_guards import notes_on, require_unfinished
from shardtune.checkpoint.verify import verify_run
from shardtune.cli.main import main
from shardtune.config.job import LoRA, ModelSection, TrainSection
from shardtune.errors import RunError
from shardtune.models import tiny
from tests.checkpoint.together import save, together
from tests.jobs import make_environment
from tests.reports import make_report
from tests.synthetic import load_model, make_job, trained


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Two checkpoints and a result."""
    run = RunDir(tmp_path / "run")
    run.begin(make_job(str(run.path)), make_environment("run"))
    save(run.checkpoints, 2, 4)
    model = load_model(ModelSection(name="tiny"), LoRA(rank=2), TrainSection(precision="fp32"))
    save_result(
        model, trained(model), tiny.tokens(), frozenset({1}), run.result, dtype=torch.float32
    )
    return run


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_good_run_is_good(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run.path)]) == 0
    said = capsys.readouterr().out
    assert said.count("every byte as written") == 3
    assert "checkpoints/step-000002" in said
    assert "ddp x2" in said


def test_faults_are_named_and_fail(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    shard = sorted((run.checkpoints / "step-000002").glob("*.safetensors"))[0]
    flip(shard)
    flip(run.result / "adapter_model.safetensors")
    (run.result / "tokenizer.json").unlink()
    assert main(["verify", str(run.path), "--json"]) == 1
    found = {each["name"]: each["faults"] for each in json.loads(capsys.readouterr().out)}
    changed = "has other content than was written (SHA-256 differs)"
    assert found == {
        "checkpoints/step-000002": [f"{shard.name} {changed}"],
        "checkpoints/step-000004": [],
        "result": [f"adapter_model.safetensors {changed}", "tokenizer.json is missing"],
    }
    assert main(["verify", str(run.path)]) == 1
    assert "tokenizer.json is missing" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["checkpoints/step-000004/manifest.json", "result/manifest.json"])
def test_every_bit_of_a_manifest_counts(run: RunDir, name: str) -> None:
    path = run.path / name
    data = path.read_bytes()
    for at in range(0, 8 * len(data), len(data) // 5):
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        path.write_bytes(changed)
        assert any(each.faults for each in verify_run(run)), f"bit {at}"
    path.write_bytes(data)
    assert not any(each.faults for each in verify_run(run))


def test_a_run_that_does_not_know_itself(run: RunDir) -> None:
    (run.path / "environment.json").write_text("{", encoding="utf-8")
    assert not any(each.faults for each in verify_run(run)), "run.json knows it as well"
    (run.path / "run.json").write_text("{", encoding="utf-8")
    assert verify_run(run)[0].faults


def test_the_lost_result_of_a_finished_run(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """`verify`, `generate` and `--resume` agree: it is missing, and can be written again."""
    run.write_report(make_report(finished=True, directory=str(run.path)))
    assert not any(each.faults for each in verify_run(run))
    with pytest.raises(RunError, match="the run is finished"):
        require_unfinished(run, make_job(str(run.path)))
    shutil.rmtree(run.result)
    assert main(["verify", str(run.path)]) == 1
    assert "--resume" in capsys.readouterr().out
    assert main(["generate", str(run.path), "--prompt", "x"]) == 2
    assert "--resume" in capsys.readouterr().err
    require_unfinished(run, make_job(str(run.path)))
    assert notes_on(run) == [
        f"{run.result} is missing; it is written again from the last checkpoint"
    ]


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "no run directory" in capsys.readouterr().err


# Room on the disk --------------------------------------------------------------------------------


def test_the_need_of_a_disk() -> None:
    # A million weights, two moments: 12 MB a checkpoint. Two are kept while a third is written.
    need = estimate_disk(1_000_000, 2, keep=2, saves=10, result=2_000_000)
    assert (need.checkpoint, need.copies) == (12_000_000, 3)
    assert need.total == 38_000_000 + (1 << 20)
    assert estimate_disk(1_000_000, 2, keep=2, saves=1, result=0).copies == 1


def test_a_disk_that_is_too_small_is_refused_with_the_numbers(tmp_path: Path) -> None:
    require_disk_space(tmp_path / "not" / "there", estimate_disk(10, 2, keep=1, saves=1, result=10))
    with pytest.raises(RunError) as caught:
        require_disk_space(tmp_path, estimate_disk(10**15, 2, keep=2, saves=9, result=4 * 10**15))
    (problem,) = caught.value.problems
    assert "3 checkpoints of 11175870.90 GiB" in problem.fact  # 12e15 / 2^30
    assert f"are free in {tmp_path}" in problem.fact


@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["merge", "merged"]])
def test_a_damaged_result_is_not_used(
    run: RunDir, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    flip(run.result / "adapter_model.safetensors")
    assert main([command[0], str(run.path), *command[1:]]) == 2
    said = capsys.readouterr()
    assert "adapter_model.safetensors has other content than was written" in said.err
    assert "--resume" in said.err
    assert not said.out
    assert not (tmp_path / "merged").exists()
    with pytest.raises(RunError, match="other content"):
        load_result(run.path)


def test_a_pipe_in_the_place_of_a_file_is_named(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = sorted((run.checkpoints / "step-000002").glob("*.safetensors"))[0]
    manifest = run.checkpoints / "step-000004" / "manifest.json"
    for path in (shard, manifest):
        path.unlink()
        os.mkfifo(path)
    assert main(["verify", str(run.path), "--json"]) == 1
    said = capsys.readouterr().out
    assert said.count("is a named pipe (FIFO), not a file") == 2
    with pytest.raises(RunError, match="is a named pipe"):
        together(1, lambda rank: latest_checkpoint(run.checkpoints, "run", rank))


def test_a_result_can_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    model = load_model(ModelSection(name="tiny"), LoRA(rank=2), TrainSection(precision="fp32"))
    before = os.umask(0o027)
    try:
        save_result(
            model, trained(model), tiny.tokens(), frozenset({1}), tmp_path / "result",
            dtype=torch.float32,
        )  # fmt: skip
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "result").iterdir()}
    assert "adapter_model.safetensors" in modes
    assert set(modes.values()) == {0o640}
