"""What is known before a run: whether it fits, what would, and which strategy is best."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from shardtune.config.auto import ResolvedJob, resolve
from shardtune.config.job import Job, ModelSection
from shardtune.config.job_file import load_job
from shardtune.config.model_config import shape_of
from shardtune.core.host.machine import Machine
from shardtune.core.model.known_models import catalogue
from shardtune.errors import JobError
from shardtune.parallel.fsdp.strategy import FSDP
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.this_machine import cluster_here, forecast_here, planner_here, require_fit
from tests.jobs import job_text, make_job

HERE = Machine(cores=8, gpus=0, memory=64 << 30)
GPUS = Machine(cores=64, gpus=8, gpu_name="NVIDIA A100-SXM4-80GB", memory=1 << 40)


def write_config(folder: Path, name: str) -> Path:
    """A model of which there is nothing but its config.json."""
    config = next(model.config for model in catalogue() if model.name == name)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def planned(job: Job, machine: Machine) -> ResolvedJob:
    """The job as it would run on a machine."""
    return resolve(job, machine, planner=planner_here(machine))


def resolved(job: Job, machine: Machine) -> Job:
    return resolve(job, machine).job


def _seconds_of_children() -> float:
    """Of a core: others may be at work on this machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_what_does_not_fit_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """The folder has neither weights nor a tokenizer: whoever opened them would say so instead."""
    write_config(tmp_path / "llama", "meta-llama/Llama-3.1-70B")
    (tmp_path / "job.yaml").write_text(job_text(model="{name: llama}"), encoding="utf-8")
    begun = _seconds_of_children()
    done = subprocess.run(
        [sys.executable, "-m", "shardtune", "train", "job.yaml", "train.precision=bf16"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert _seconds_of_children() - begun < 5
    assert done.returncode == 2
    assert re.search(r"needs 9\d{2}\.\d GiB on each \w+ and there are", done.stderr), done.stderr
    assert "fix: " in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-14B"])
def test_the_change_that_is_offered_fits(tmp_path: Path, model: str) -> None:
    folder = write_config(tmp_path / "model", model)
    path = tmp_path / "job.yaml"
    path.write_text(job_text(model=f"{{name: {folder}}}"), encoding="utf-8")
    found = forecast_here(resolved(load_job(path, []).job, HERE), HERE)
    assert found is not None
    with pytest.raises(JobError) as caught:
        require_fit(found)
    words = str(caught.value.problems[0].fix).split("  (")[0].split()
    changed = forecast_here(resolved(load_job(path, words).job, HERE), HERE)
    assert changed is not None
    require_fit(changed)


def test_what_fits_is_let_through() -> None:
    found = forecast_here(resolved(make_job(), HERE), HERE)
    assert found is not None
    require_fit(found)


def test_a_model_that_nobody_knows_is_no_reason_to_refuse(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "of-my-own"}', encoding="utf-8")
    job = resolved(make_job(model={"name": str(tmp_path)}), HERE)
    assert forecast_here(job, HERE) is None


def test_auto_is_replaced_by_the_best_strategy_with_its_reason(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", "meta-llama/Llama-3.1-8B")
    job = make_job(model={"name": str(folder)}, strategy={"type": "auto"})
    found = planned(job, GPUS)
    assert found.job.strategy.type in ("fsdp", "deepspeed")  # 120 GiB of states, 80 on a GPU
    assert found.reasons["strategy", "type"].startswith("planned: ")
    require_fit(forecast_here(found.job, GPUS) or pytest.fail("a known model on known GPUs"))


def test_auto_says_what_would_do_where_nothing_fits(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", "meta-llama/Llama-3.1-70B")
    job = make_job(model={"name": str(folder)}, strategy={"type": "auto"})
    with pytest.raises(JobError, match="no strategy fits on this machine"):
        planned(job, HERE)


def test_a_strategy_that_is_given_stays() -> None:
    given = make_job(strategy={"type": "fsdp"})
    assert planned(given, HERE) == resolve(given, HERE)
    assert isinstance(given.strategy, FSDP)


def test_this_machine_is_found_in_the_catalogue() -> None:
    found = cluster_here(GPUS, 8)
    assert (found.gpu.name, found.gpus, found.link) == ("A100-80GB", 8, "nvlink")
    assert found.gpu == parse_cluster("8xA100-80GB").gpu


def test_the_built_in_model_has_the_shape_that_it_is_built_in() -> None:
    """109,120 parameters, as `models/tiny.py` says."""
    shape = shape_of(ModelSection(name="tiny"))
    assert shape.parameters == 109_120


def test_a_rule_that_no_strategy_helps_against_is_what_a_person_is_told(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", "Qwen/Qwen2.5-0.5B")
    what = make_job(
        model={"name": str(folder)},
        strategy={"type": "auto"},
        train={"steps": 10, "epochs": 1.0, "precision": "fp32"},
    )
    with pytest.raises(JobError, match=r"both steps \(10\) and epochs \(1.0\) are given"):
        planned(what, HERE)
