"""`shardtune evaluate` on the tiny model: a task of each metric, before and after, on ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardtune.cli.evaluate_checks import is_measurement
from shardtune.cli.main import main
from shardtune.cli.open_model import open_model
from shardtune.config.job import ModelSection
from shardtune.data.formats import plain_prompt
from shardtune.errors import ModelError
from shardtune.evaluation.forgetting import general_texts
from shardtune.evaluation.recipes import find_tasks
from shardtune.evaluation.respondent import TaskQuestion
from shardtune.evaluation.run_task import run_task
from shardtune.evaluation.task_rows import open_rows
from shardtune.models.load import load_base
from shardtune.models.model_files import ModelFiles
from shardtune.training.respondent_model import ModelRespondent
from tests.evaluation.judging_endpoint import Endpoint, serving
from tests.models import encoder_decoder

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def tiny() -> ModelRespondent:
    opened = open_model("tiny")
    return ModelRespondent(opened.model, opened.tokenizer, opened.stop_ids, opened.device)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as server:
        yield server


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """What a run with LoRA leaves, without training: an adapter that changes the model."""
    from peft import LoraConfig, get_peft_model

    from shardtune.checkpoint.export import save_result
    from shardtune.models import tiny

    run = tmp_path / "run"
    run.mkdir()
    (run / "job.yaml").write_text(
        "model: {name: tiny}\nadapter: {type: lora, rank: 4, alpha: 8, targets: [q_proj, v_proj]}\n"
        "data: {train: [{path: rows.jsonl, format: completion}]}\n"
        "train: {steps: 1, precision: fp32}\n"
    )
    files = ModelFiles(ModelSection(name="tiny"))
    torch.manual_seed(0)
    model = get_peft_model(load_base(files, "fp32"), LoraConfig(**LORA))  # type: ignore[arg-type]
    trained = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight)
            trained[name] = weight.detach()
    save_result(
        model, trained, tiny.tokens(), files.stop_ids, run / "result",
        dtype=files.dtype, base=files, card="",
    )  # fmt: skip
    return run


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_options_are_chosen_by_their_likelihood(tiny: ModelRespondent, tmp_path: Path) -> None:
    """Letters are single tokens: the model's logits after the question say which is likeliest."""
    letters = "abcdefghij"
    with torch.no_grad():
        logits = tiny.model(torch.tensor([list(b"Which?")])).logits[0, -1]
    best = max(letters, key=lambda letter: float(logits[ord(letter)]))
    rows = [{"prompt": "Which?", "choices": list(letters), "answer": best}]
    (task,) = find_tasks(f"choice={write(tmp_path / 'q.jsonl', rows)}")
    task = task.with_options({"before_answer": ""})
    found = run_task(task, open_rows(task, has_template=tiny.has_template), tiny)
    assert found.rows[0].answer == best
    assert found.scores == [1.0]


def test_before_and_after_side_by_side(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": text, "answer": "e"} for text in ("one", "two", "three")]
    path, out = write(tmp_path / "q.jsonl", rows), tmp_path / "out.json"
    code = main(
        ["evaluate", str(run_folder), "--task", f"contains={path}", "--max-new-tokens", "12",
         "--out", str(out)]
    )  # fmt: skip
    assert code == 0
    shown = capsys.readouterr().out
    assert "before" in shown
    assert "change" in shown
    assert is_measurement(out)
    (task,) = json.loads(out.read_text())["tasks"]
    assert task["before"]["rows"] == task["after"]["rows"] == 3
    said = [[row["answer"] for row in task[side]["answers"]] for side in ("before", "after")]
    assert said[0] != said[1], "the adapter was on both times, or off"
    opened = open_model("tiny")
    plain = ModelRespondent(opened.model, opened.tokenizer, opened.stop_ids, opened.device)
    (found,) = find_tasks(f"contains={path}")
    found = found.with_options({"max_new_tokens": 12})
    expected = run_task(found, open_rows(found, has_template=plain.has_template), plain)
    assert said[0] == [row.answer for row in expected.rows]


@pytest.mark.slow
def test_a_judge_and_forgetting_from_the_command_line(
    run_folder: Path, tmp_path: Path, endpoint: Endpoint,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    rows = [{"question_id": 1, "category": "writing", "turns": ["Hi", "Again"]}]
    path, out = write(tmp_path / "question.jsonl", rows), tmp_path / "out.json"
    monkeypatch.setenv("JUDGE_KEY", "secret")
    monkeypatch.setattr("shardtune.evaluation.forgetting.PARAGRAPHS", 100)
    general_texts.cache_clear()
    code = main(
        ["evaluate", str(run_folder), "--judge", str(path), "--judge-model", "judge",
         "--judge-url", f"http://127.0.0.1:{endpoint.server_port}/v1", "--judge-key", "JUDGE_KEY",
         "--max-new-tokens", "4", "--forgetting", "--out", str(out)]
    )  # fmt: skip
    general_texts.cache_clear()
    assert code == 0
    shown = capsys.readouterr().out
    assert "general texts: loss" in shown
    assert "tied" in shown
    found = json.loads(out.read_text())
    assert len(found["grades"]) == 4
    assert len(found["pairs"]) == 2
    assert found["general_loss"]["before"] != found["general_loss"]["after"]
    assert endpoint.keys == {"Bearer secret"}
    assert "secret" not in out.read_text()
    assert out.with_suffix(".svg").read_text().startswith("<svg")


def test_a_run_is_asked_under_the_headings_that_it_learnt(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = run_folder / "job.yaml"
    assert not open_model(str(run_folder)).plain
    job.write_text(
        job.read_text().replace("format: completion", "format: instruction, template: plain")
    )
    opened = open_model(str(run_folder))
    assert opened.plain
    asked = ModelRespondent(opened.model, opened.tokenizer, opened.stop_ids, plain=opened.plain)
    messages = ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"})
    assert opened.tokenizer.decode(asked.encode(TaskQuestion(messages=messages))) == (
        plain_prompt("Hi", "Be kind.")
    )
    assert asked.has_template
    write(tmp_path / "q.jsonl", [{"prompt": "a", "answer": "b"}] * 2)
    task = tmp_path / "task.yaml"
    task.write_text("{path: q.jsonl, metric: exact, chat: true, shots: 1}\n")
    assert main(["evaluate", str(run_folder), "--task", str(task)]) == 2
    assert "the run learnt single questions" in capsys.readouterr().err


def test_an_encoder_decoder_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder_decoder.write(tmp_path / "model", "flan_t5")
    monkeypatch.setattr("shardtune.models.load.load_base", None)
    with pytest.raises(ModelError, match="has an encoder"):
        open_model(str(tmp_path / "model"))


def test_the_folder_of_an_adapter_is_refused(run_folder: Path) -> None:
    with pytest.raises(ModelError, match="folder of an adapter"):
        open_model(str(run_folder / "result"))


def test_what_is_wrong_is_said_before_a_model_is_loaded(
    tmp_path: Path, endpoint: Endpoint,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("shardtune.cli.open_model.open_model", None)
    assert main(["evaluate", "tiny"]) == 2
    assert "nothing to measure" in capsys.readouterr().err
    assert main(["evaluate", "tiny", "--task", "mbpp=rows.jsonl"]) == 2
    assert "--allow-code" in capsys.readouterr().err
    assert main(["evaluate", "tiny", "--judge", "none.jsonl"]) == 2
    assert "there is no such file" in capsys.readouterr().err
    assert main(["evaluate", "tiny", "--task", "exact=none.jsonl"]) == 2
    assert "there is no such file" in capsys.readouterr().err
    assert main(["evaluate", "tiny", "--forgetting", "--out", str(tmp_path / "no" / "o.json")]) == 2
    assert "--out: can't write into" in capsys.readouterr().err
    mine = write(tmp_path / "mine.jsonl", [{"prompt": "?", "answer": "!"}])
    before = mine.read_bytes()
    assert main(["evaluate", "tiny", "--forgetting", "--out", str(mine)]) == 2
    assert "is there already, and no earlier evaluation" in capsys.readouterr().err
    assert mine.read_bytes() == before
    path = write(tmp_path / "q.jsonl", [{"prompt": "a", "answer": "b", "turns": ["a"]}])
    monkeypatch.setitem(sys.modules, "sacrebleu", None)  # as if it weren't installed
    assert main(["evaluate", "tiny", "--task", f"chrf={path}"]) == 2
    assert "sacrebleu is not installed" in capsys.readouterr().err
    monkeypatch.setattr("shardtune.evaluation.sandbox._without_network", lambda: ())
    assert main(["evaluate", "tiny", "--task", f"code={path}", "--allow-code"]) == 2
    assert "no network namespace" in capsys.readouterr().err
    endpoint.failures = [401]
    url = f"http://127.0.0.1:{endpoint.server_port}/v1"
    judge = ["--judge", str(path), "--judge-url", url, "--judge-model", "judge"]
    assert main(["evaluate", "tiny", *judge]) == 2
    assert "HTTP 401" in capsys.readouterr().err


def test_what_was_measured_and_judged_is_written_where_a_judge_fails(
    tmp_path: Path, endpoint: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"Question {n}", "prompt_id": n, "answer": "b"} for n in range(8)]
    path = write(tmp_path / "q.jsonl", rows)
    out = tmp_path / "out.json"
    endpoint.failures = [401, *[200] * 8]  # the last comes first, and is the trial's
    code = main(
        ["evaluate", "tiny", "--task", f"exact={path}", "--judge", str(path), "--judge-model", "j",
         "--judge-url", f"http://127.0.0.1:{endpoint.server_port}/v1", "--max-new-tokens", "2",
         "--out", str(out)]
    )  # fmt: skip
    assert code == 2
    assert "HTTP 401" in capsys.readouterr().err
    written = json.loads(out.read_text())
    assert len(written["tasks"]) == 1
    assert 4 <= len(written["grades"]) < 8  # four are asked at once


@pytest.mark.long
def test_ranks_share_the_rows(tmp_path: Path) -> None:
    rows = [{"prompt": text, "answer": "e"} for text in ("one", "two", "three", "four", "five")]
    path = write(tmp_path / "q.jsonl", rows)
    found = []
    for ranks in ("1", "2"):
        out = tmp_path / f"{ranks}.json"
        done = subprocess.run(
            [sys.executable, "-m", "shardtune", "evaluate", "tiny", "--task", f"contains={path}",
             "--max-new-tokens", "6", "--processes", ranks, "--out", str(out)],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
            timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(json.loads(out.read_text())["tasks"][0]["after"]["answers"])
    assert found[0] == found[1]
    assert len(found[0]) == 5
