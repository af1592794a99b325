"""A T5 from job to result: trained, evaluated, asked, resumed, loaded by plain transformers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from shardtune.cli.result_command import ask, merge
from shardtune.config.auto import resolve
from shardtune.config.job import Job
from shardtune.core.host.machine import Machine
from shardtune.core.runs.run_history import read_run_history
from shardtune.core.runs.run_report import RunReport
from shardtune.plan.run_forecast import RunForecast
from shardtune.plan.this_machine import forecast_here
from shardtune.report.run_page import run_page
from shardtune.train import train
from tests.conformance.table import STRATEGIES
from tests.jobs import make_job
from tests.models import encoder_decoder
from tests.runs import lines, train_on

PROMPT = "9 backwards."


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    encoder_decoder.write(tmp_path / "model", "flan_t5")
    for name, numbers in (("train", range(100, 140)), ("held", range(10, 14))):
        rows = ({"prompt": f"{n} backwards.", "completion": str(n)[::-1]} for n in numbers)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return tmp_path


def job_in(folder: Path, adapter: str, strategy: dict[str, Any], ranks: int = 1) -> Job:
    def source(name: str) -> dict[str, str]:
        path = str(folder / f"{name}.jsonl")
        return {"path": path, "format": "source_target", "prefix": "Say "}

    job = make_job(
        model={"name": str(folder / "model")},
        adapter={"type": "lora", "rank": 4} if adapter == "lora" else {"type": "none"},
        data={
            "train": [source("train")],
            "eval": [source("held")],
            "sequence_length": 32,
            "target_length": 8,
        },
        train={
            "steps": 4, "global_batch": 4, "micro_batch": 2, "precision": "fp32",
            "learning_rate": 0.01, "schedule": "constant",
        },
        evaluate={"samples": 2, "max_new_tokens": 4},
        strategy=strategy,
        launch={"processes": ranks, "threads": 1},
        save={"directory": str(folder / "run"), "every": 2},
    )  # fmt: skip
    return resolve(job, Machine(cores=2, gpus=0)).job


def forecast(job: Job) -> RunForecast:
    found = forecast_here(job, Machine(cores=2, gpus=0, memory=8 << 30))
    assert found is not None
    return RunForecast.of(found)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [pytest.param("none", marks=pytest.mark.long), "lora"])
def test_from_job_to_result(folder: Path, adapter: str) -> None:
    job = job_in(folder, adapter, {"type": "ddp"})
    report = train(job, predicted=forecast(job))
    assert isinstance(report, RunReport)
    figures = report.evaluation["held"]
    assert figures.before is not None
    assert figures.after.loss < figures.before.loss
    assert [sample.prompt for sample in report.samples] == [
        "Say 10 backwards.",
        "Say 12 backwards.",
    ]
    assert [sample.reference for sample in report.samples] == ["01", "21"]
    assert report.forecast is not None
    held = report.forecast.held_bytes
    assert all(each.measured == each.predicted for each in (held.params, held.grads, held.optim))
    page = run_page(read_run_history(folder / "run"))
    assert "shardtune serve" not in page  # such a model holds no dialogue
    assert "A row is one source and its target, together 1" in page

    result = folder / "run" / "result"
    answer = ask(folder / "run", PROMPT, max_new_tokens=4, temperature=0.0, raw=False)
    if adapter == "lora":
        base = AutoModelForSeq2SeqLM.from_pretrained(folder / "model")
        model: Any = PeftModel.from_pretrained(base, result)
    else:
        model = AutoModelForSeq2SeqLM.from_pretrained(result)
    tokenizer = AutoTokenizer.from_pretrained(result)
    with torch.no_grad():
        given = tokenizer(f"Say {PROMPT}", return_tensors="pt").input_ids
        written = model.eval().generate(input_ids=given, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(written[0], skip_special_tokens=True).strip() == answer

    assert_card_of_both_halves(result)
    if adapter == "lora":
        merge(folder / "run", folder / "merged")
        assert_card_of_both_halves(folder / "merged")


def assert_card_of_both_halves(result: Path) -> None:
    """The card names the pipeline and the class that take such a model."""
    card = (result / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: text2text-generation\n" in card
    assert "AutoModelForSeq2SeqLM.from_pretrained" in card
    assert "CausalLM" not in card


@pytest.mark.long
def test_a_stopped_run_goes_on_as_if_it_had_not(folder: Path) -> None:
    job = job_in(folder, "lora", {"type": "ddp"})
    train(job)
    whole = lines(folder / "run" / "metrics.jsonl")
    losses = [line["loss"] for line in whole if line["kind"] == "step"]
    newest = max((folder / "run" / "checkpoints").iterdir())
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    again = train(job, resume=True)
    assert again is not None
    repeated = lines(folder / "run" / "metrics.jsonl")
    assert [line["loss"] for line in repeated if line["kind"] == "step"] == losses


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("zero3", marks=pytest.mark.long)])
def test_a_model_that_is_spread_answers_and_is_saved(folder: Path, strategy: str) -> None:
    """Its encoder runs while weights are gathered; what is read back is compared in the run."""
    settings, ranks, needs = STRATEGIES[strategy]
    if needs and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    train_on(ranks, job_in(folder, "none", settings, ranks))
    report = json.loads((folder / "run" / "report.json").read_text(encoding="utf-8"))
    assert report["finished"]
    assert len(report["samples"]) == 2
    assert report["evaluation"]["held"]["after"]["loss"] < 5
