"""Question by question, our figures are those of lm-evaluation-harness."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from shardtune.cli.open_model import open_model
from shardtune.core.files.cache import cache_dir
from shardtune.evaluation.harness import run_harness
from shardtune.evaluation.recipes import find_tasks
from shardtune.evaluation.run_task import run_task
from shardtune.evaluation.task_rows import open_rows
from shardtune.models.smollm2 import SMOLLM2_FOLDER
from shardtune.training.respondent_model import ModelRespondent

pytest.importorskip("lm_eval", reason="needs shardtune[eval]")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the harness's own
    pytest.mark.long,  # to import it takes longer than to ask
    pytest.mark.timeout(7200),
]
GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_train_2000.jsonl"
SHOTS = 2
FIRST_SHOTS = {"sampler": "first_n"}


@pytest.fixture(autouse=True)
def quiet_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def gsm8k_for_harness(folder: Path, tokens: int) -> dict[str, Any]:
    """The harness's own gsm8k.yaml, on local files and with the first examples."""
    return {
        "task": "gsm8k_local",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"train": str(folder / "shots.jsonl"), "test": str(folder / "rows.jsonl")}
        },
        "output_type": "generate_until",
        "training_split": "train",
        "fewshot_split": "train",
        "test_split": "test",
        "fewshot_config": FIRST_SHOTS,
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "num_fewshot": SHOTS,
        "generation_kwargs": {
            "until": ["Question:", "</s>", "<|im_end|>"], "do_sample": False, "temperature": 0.0,
            "max_gen_toks": tokens,
        },
        "filter_list": [
            {
                "name": "flexible-extract",
                "filter": [
                    {"function": "regex", "group_select": -1,
                     "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)"},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [
            {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True,
             "ignore_case": True, "ignore_punctuation": False,
             "regexes_to_ignore": [",", "\\$", "(?s).*#### ", "\\.$"]}
        ],
    }  # fmt: skip


def compare(name: str, rows: list[dict[str, Any]], folder: Path, tokens: int) -> list[float]:
    """Our scores, after each answer and score was found to be the harness's."""
    write(folder / "shots.jsonl", rows[:SHOTS])
    write(folder / "rows.jsonl", rows[SHOTS:])
    opened = open_model(name, precision="fp32")
    ours = ModelRespondent(opened.model, opened.tokenizer, opened.stop_ids, opened.device)
    (task,) = find_tasks(f"gsm8k={folder / 'rows.jsonl'}")
    options = {
        "shots": SHOTS, "shots_path": str(folder / "shots.jsonl"), "max_new_tokens": tokens
    }  # fmt: skip
    task = task.with_options(options)
    found = run_task(task, open_rows(task, has_template=ours.has_template), ours)
    figures, samples = run_harness(
        opened.model, opened.tokenizer, [gsm8k_for_harness(folder, tokens)]
    )
    theirs = {each["doc_id"]: each for each in samples["gsm8k_local"]}
    assert len(theirs) == len(found.rows) == len(rows) - SHOTS
    for row in found.rows:
        other = theirs[row.row]
        assert row.answer == other["resps"][0][0], f"row {row.row}"
        assert row.score == other["exact_match"], f"row {row.row}: {row.answer}"
    (figure,) = figures
    assert figure.value == pytest.approx(found.interval.mean)
    return found.scores


@pytest.mark.process
def test_gsm8k_of_a_random_model(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(8)]
    compare("tiny", rows, tmp_path, 24)


@pytest.mark.skipif(not GSM8K.is_file(), reason="needs ../shared/data")
@pytest.mark.skipif(
    not (cache_dir() / "models" / SMOLLM2_FOLDER).is_dir(),
    reason="needs `shardtune models pull smollm2-135m-instruct`",
)
@pytest.mark.process
def test_gsm8k_of_smollm2(tmp_path: Path) -> None:
    """100 rows unless GSM8K_ROWS says otherwise."""
    count = SHOTS + int(os.environ.get("GSM8K_ROWS", "100"))
    with GSM8K.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in islice(lines, count)]
    scores = compare("smollm2-135m-instruct", rows, tmp_path, 256)
    print(f"{sum(scores):.0f} of {len(scores)} right, as the harness finds")


@pytest.mark.parametrize("normalize", ["none", "characters"])
@pytest.mark.process
def test_options_have_the_harness_s_log_likelihoods(tmp_path: Path, normalize: str) -> None:
    rows = [
        {"question": f"Number {n} is", "choices": ["even", "odd, too", "none"], "answer": n % 2}
        for n in range(6)
    ]  # fmt: skip
    path = write(tmp_path / "rows.jsonl", rows)
    opened = open_model("tiny")
    ours = ModelRespondent(opened.model, opened.tokenizer, opened.stop_ids, opened.device)
    (task,) = find_tasks(f"choice={path}")
    options = {
        "prompt": "{{question}}", "metric": {"type": "choice", "normalize": normalize}
    }  # fmt: skip
    task = task.with_options(options)
    found = run_task(task, open_rows(task, has_template=ours.has_template), ours)
    settings = {
        "task": "options", "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test",
        "output_type": "multiple_choice", "doc_to_text": "{{question}}",
        "doc_to_choice": "choices", "doc_to_target": "answer", "num_fewshot": 0,
        "metric_list": [
            {"metric": each, "aggregation": "mean", "higher_is_better": True}
            for each in ("acc", "acc_norm")
        ],
    }  # fmt: skip
    _, samples = run_harness(opened.model, opened.tokenizer, [settings])
    key = "acc" if normalize == "none" else "acc_norm"
    for row, other in zip(found.rows, samples["options"], strict=True):
        theirs = [float(each[0]) for each in other["filtered_resps"]]
        assert [float(each) for each in row.detail.split()] == pytest.approx(theirs, abs=1e-4)
        assert row.score == other[key]
