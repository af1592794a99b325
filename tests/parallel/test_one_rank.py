"""Strategies for several ranks on one, by the command: a first try on one GPU, or on one core."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from shardtune.config.auto import resolve
from shardtune.core.host.machine import Machine
from shardtune.core.world import World
from tests.jobs import make_job, write_job
from tests.ranks import on_ranks


@pytest.mark.process
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "strategy",
    ["{type: fsdp}", pytest.param("{type: fsdp, sharding: hybrid}", marks=pytest.mark.long)],
)
def test_one_rank_needs_no_others(strategy: str, tmp_path: Path) -> None:
    """Torch would look for other ranks by itself, and wait for minutes."""
    rows = "".join(json.dumps({"text": "b" * n}) + "\n" for n in range(1, 9))
    (tmp_path / "good.jsonl").write_text(rows, encoding="utf-8")
    job = write_job(tmp_path, strategy=strategy, train="{steps: 1, global_batch: 2}")
    _train(job)
    assert (tmp_path / "runs/bad/result").is_dir()


@pytest.mark.process
@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_weights_that_stay_whole_are_held_as_predicted(ranks: int, tmp_path: Path) -> None:
    """ZeRO-3 keeps weights of up to 4,096 numbers whole: two ranks beside their shares of them, one
    in the very memory of its share."""
    pytest.importorskip("deepspeed")
    rows = "".join(json.dumps({"text": "b" * n}) + "\n" for n in range(1, 9))
    (tmp_path / "good.jsonl").write_text(rows, encoding="utf-8")
    kept = "{stage: 3, stage3_param_persistence_threshold: 4096}"
    job = write_job(
        tmp_path,
        adapter="{type: none}",
        strategy=f"{{type: deepspeed, zero_optimization: {kept}}}",
        train="{steps: 2, global_batch: 2, precision: fp32}",
        launch=f"{{processes: {ranks}, threads: 1}}",
    )
    _train(job)
    report = json.loads((tmp_path / "runs/bad/report.json").read_text(encoding="utf-8"))
    held = report["forecast"]["held_bytes"]["params"]
    assert held["predicted"] == held["measured"]


def groups_left(world: World, folder: Path, strategy: dict[str, str]) -> list[tuple[bool, bool]]:
    """Of three runs in this process: whether each came to its end, and left torch a group. The
    first fails, because its weights overflow."""
    import torch.distributed as dist

    from shardtune.errors import RunError
    from shardtune.train import train

    source = {"path": str(folder / "good.jsonl"), "format": "completion"}
    found = []
    small = {"global_batch": 2, "micro_batch": 2, "precision": "fp32", "max_grad_norm": None}
    for name, rate in (("failed", 1e4), ("first", 1e-4), ("second", 1e-4)):
        job = make_job(
            data={"train": [source], "sequence_length": 64},
            strategy=strategy,
            train={
                **small,
                "steps": 8,
                "learning_rate": rate,
                "optimizer": {"type": "sgd"},
                "on_nan": "stop",
            },
            launch={"processes": 1, "threads": 1},
            save={"directory": str(folder / name)},
        )
        report = None
        fails = name == "failed"
        with pytest.raises(RunError, match="not finite") if fails else nullcontext():
            report = train(resolve(job, Machine(cores=1, gpus=0)).job, quiet=True)
        found.append((report is not None and report.finished, dist.is_initialized()))
    return found


@pytest.mark.process
@pytest.mark.parametrize(
    "strategy",
    [{"type": "fsdp"}, pytest.param({"type": "deepspeed"}, marks=pytest.mark.long)],
)
def test_a_run_leaves_the_next_one_no_process_group(
    strategy: dict[str, str], tmp_path: Path
) -> None:
    if strategy["type"] == "deepspeed":
        pytest.importorskip("deepspeed")
    rows = "".join(json.dumps({"text": "b" * n}) + "\n" for n in range(1, 9))
    (tmp_path / "good.jsonl").write_text(rows, encoding="utf-8")
    (found,) = on_ranks(1, groups_left, tmp_path, strategy)
    assert found == [(False, False), (True, False), (True, False)]


def _train(job: Path) -> None:
    command = [sys.executable, "-m", "shardtune", "train", job.name]
    done = subprocess.run(
        command, cwd=job.parent, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
