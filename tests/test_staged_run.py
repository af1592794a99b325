"""A whole run in stages: trained, judged, answered, saved, read back, and gone on with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardtune.cli.main import main

pytestmark = pytest.mark.long
JOB = """\
model: {{name: {model}}}
adapter: {{type: none}}
data:
  train: [{{path: numbers.jsonl, format: instruction}}]
  eval: [{{name: held, path: held.jsonl, format: instruction}}]
  sequence_length: 64
train:
  {{steps: 4, global_batch: 8, learning_rate: 0.01, schedule: constant, precision: fp32}}
evaluate: {{samples: 2, max_new_tokens: 6}}
save: {{directory: {directory}, every: 2}}
strategy: {strategy}
launch: {{processes: {processes}, threads: 1}}
"""
ONE = ("{type: ddp}", 1)
STAGED = {
    "1f1b": ("{type: pipeline, stages: 2}", 2),
    "layers": ("{type: layers, stages: 2}", 2),
    "with-data": ("{type: pipeline, stages: 2, schedule: gpipe}", 4),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("staged")
    for name, numbers in (("numbers", range(40)), ("held", range(40, 46))):
        rows = [{"instruction": f"Say {n}.", "output": f"It is {n}."} for n in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def train(place: Path, name: str, strategy: str, processes: int, *more: str) -> dict[str, Any]:
    text = JOB.format(model="tiny", directory=name, strategy=strategy, processes=processes)
    (place / f"{name}.yaml").write_text(text)
    assert main(["train", str(place / f"{name}.yaml"), *more]) == 0
    report: dict[str, Any] = json.loads((place / name / "report.json").read_text())
    return report


def losses(place: Path, name: str) -> list[float]:
    lines = map(json.loads, (place / name / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines]  # of steps and of held-out sets, in their order


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return train(place, "alone", *ONE)


@pytest.mark.parametrize("name", STAGED)
@pytest.mark.process
def test_a_run_in_stages_is_the_run_of_one_process(
    name: str, place: Path, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    report = train(place, name, *STAGED[name])
    assert losses(place, name) == pytest.approx(losses(place, "alone"), rel=1e-5)
    assert report["samples"] == alone["samples"]  # questions, and answers before and after
    assert report["result"]["largest_difference"] < 1e-4
    assert 0 < report["training"]["utilisation"] <= 1


@pytest.mark.process
def test_a_run_in_stages_goes_on_after_its_checkpoint(
    place: Path, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    train(place, "resumed", *STAGED["1f1b"])
    shutil.rmtree(place / "resumed" / "checkpoints" / "step-000004")
    (place / "resumed" / "report.json").unlink()  # as if it had been stopped after step 3
    report = train(place, "resumed", *STAGED["1f1b"], "--resume")
    assert report["training"]["step"] == 4
    assert losses(place, "resumed") == pytest.approx(losses(place, "alone"), rel=1e-5)
