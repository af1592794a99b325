"""The public API: lazy, typed, and not confused by the module `shardtune.train`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import shardtune
from shardtune.errors import JobError
from tests.jobs import make_job

NAMES = ["Job", "forecast", "load_job", "load_result", "rank_strategies", "train"]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'pydantic', 'yaml', 'rich', 'transformers'} & sys.modules.keys()"
    assert run(f"import sys, shardtune; print({heavy})") == "set()"
    code = f"import sys; from shardtune import {', '.join(NAMES)}; print('torch' in sys.modules)"
    assert run(code) == "False"


def test_the_names_are_listed() -> None:
    assert sorted(shardtune.__all__) == sorted(NAMES)
    assert set(NAMES) <= set(dir(shardtune))
    with pytest.raises(AttributeError, match="has no attribute 'tain'"):
        shardtune.tain  # noqa: B018


@pytest.mark.parametrize(
    "order",
    [
        pytest.param("import shardtune.train", marks=pytest.mark.long),
        pytest.param(
            "from shardtune.train import due; from shardtune import train", marks=pytest.mark.long
        ),
        pytest.param("from shardtune import train; import shardtune.train", marks=pytest.mark.long),
        pytest.param(
            "import shardtune; shardtune.train; from shardtune.train import due",
            marks=pytest.mark.long,
        ),
        "import shardtune.api, shardtune.train, importlib; importlib.reload(shardtune.api)",
    ],
)
def test_train_is_the_function_in_every_order_of_imports(order: str) -> None:
    found = run(
        f"{order}\nimport sys, shardtune\nfrom shardtune import train\n"
        "print(train.__module__, shardtune.train.__module__, shardtune.train is train)\n"
        "print(sys.modules.get('shardtune.train', sys).__name__)"
    )
    assert found.startswith("shardtune.api shardtune.api True")


def test_other_submodules_are_bound_as_ever() -> None:
    assert run("import shardtune.core.mesh; print(shardtune.core.mesh.__name__)") == (
        "shardtune.core.mesh"
    )


def test_planning_from_python() -> None:
    job = make_job(model={"name": "llama-3.1-8b"}, adapter={"type": "lora"}, train={"steps": 10})
    found = shardtune.forecast(job, cluster="4xA40")
    assert found.fits
    assert found.mesh.size == 4
    best = shardtune.rank_strategies(job, "4xA40").best
    assert best is not None
    assert best.fits
    with pytest.raises(JobError, match="no GPU"):
        shardtune.forecast(job, "4xB17")


def test_a_mistake_in_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: {name: tiny}\n")
    with pytest.raises(JobError, match="data"):
        shardtune.load_job(tmp_path / "job.yaml", ["train.stpes=3"])


def test_a_run_is_not_both_resumed_and_overwritten() -> None:
    with pytest.raises(JobError, match="either resumed or overwritten"):
        shardtune.train(make_job(), resume=True, overwrite=True)
