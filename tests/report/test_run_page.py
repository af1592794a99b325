"""The page of a run: whole, escaped, self-contained, small, and harmless to the run."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardtune.core.runs.metrics import CurveWarning, LossSpike, NonfiniteGradient, TaskMetrics
from shardtune.core.runs.run_history import LauncherEvent, RunHistory, SavedCheckpoint, StepForecast
from shardtune.core.runs.step_parts import PARTS, RankParts, StepParts
from shardtune.report.run_page import run_page, try_write_run_page
from shardtune.report.run_story import proofs, public_text, verdict
from tests.report.pages import PageReader, make_data, make_history
from tests.reports import evaluation_line, make_report, report_values, step_line, task_line

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\x00\u202e\ud800"


def sections(page: PageReader) -> list[str]:
    return page.text("h2")


def test_all_parts_are_there() -> None:
    warning = CurveWarning(kind="warning", step=9, about="divergence", fact="it diverges", since=5)
    run = make_history(
        data=make_data(),
        warned=(warning, LossSpike(kind="spike", step=3, fact="high", usual=1.0, samples=())),
        events=(LauncherEvent(kind="restart", time=1e9, rank=1, step=7, text="rank 1 died"),),
        saves=(SavedCheckpoint("step-000040", 40, 1e9),),
    )
    page = PageReader(run_page(run))
    assert sections(page) == [
        "Warnings", "Answers before and after", "Loss", "Steps", "Where the time of a step went",
        "What happened", "Data", "What was proven", "Next", "Versions and digests",
    ]  # fmt: skip
    assert "Step 9: it diverges." in page.text("li")
    assert "2001-09-09 01:46:40" in page.text("th")
    assert "rank 1 died" in page.text("td")
    assert "shardtune merge runs/first merged/first" in page.text("pre")


def test_tasks_are_drawn_with_their_intervals() -> None:
    lines = tuple(
        TaskMetrics(
            kind="task", step=step, task="gsm8k", metric="exact", score=score, low=score - 0.1,
            high=score + 0.1, rows=50, seconds=1.0,
        )
        for step, score in ((0, 0.2), (80, 0.5))
    )  # fmt: skip
    page = PageReader(run_page(make_history(tasks={"gsm8k": lines})))
    assert "Tasks" in sections(page)
    assert any("gsm8k (exact): from 0.2 at step 0" in text for text in page.text("desc"))


def test_every_figure_has_a_title_and_a_text_alternative() -> None:
    page = PageReader(run_page(make_history(data=make_data())))
    figures = page.count("figure")
    assert figures == page.count("svg") == page.count("figcaption") >= 8
    ids = [values["id"] for tag, values in page.tags if "id" in values]
    assert len(ids) == len(set(ids))
    for tag, values in page.tags:
        if tag == "svg":
            assert values["role"] == "img"
            assert set((values["aria-labelledby"] or "").split()) <= set(ids)
    assert all(text.strip() for text in page.text("desc"))
    assert any("from 2 at step 0 to 1 at 80" in text for text in page.text("desc"))


def test_nothing_is_loaded_and_only_our_script_runs() -> None:
    text = run_page(make_history(data=make_data()))
    page = PageReader(text)
    assert not [tag for tag, values in page.tags if {"src", "href", "style"} & values.keys()]
    assert not re.findall(r"url\(|@import|fetch\(|XMLHttp", text)
    (policy,) = [v["content"] for t, v in page.tags if v.get("http-equiv") and v["content"]]
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_what_a_model_or_a_file_says_is_text() -> None:
    samples = [{"prompt": HOSTILE, "reference": HOSTILE, "before": HOSTILE, "after": HOSTILE}]
    run = make_history(
        Path(f"runs/{HOSTILE[:30]}"),
        report=make_report(samples=samples),
        data=make_data(HOSTILE),
        job={"model.name": HOSTILE},
        evaluations={HOSTILE: make_history().evaluations["code"]},
        warned=(CurveWarning(kind="warning", step=1, about="divergence", fact=HOSTILE),),
        events=(LauncherEvent(kind="failed", time=1.0, text=HOSTILE, cause=HOSTILE),),
    )
    text = run_page(run)
    page = PageReader(text)
    assert page.count("script") == 1
    assert page.count("img") == 0
    assert "\x00" not in text
    assert "\u202e" not in text
    text.encode()  # no half surrogate


def test_paths_of_this_machine_are_left_out(tmp_path: Path) -> None:
    run = make_history(tmp_path / "run", job={"model.name": f"{tmp_path}/model"})
    page = run_page(run)
    assert str(tmp_path) not in page
    assert "shardtune verify run" in page
    assert ".../model was trained" in page


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('File "/home/ann/lab/job.py", line 3', 'File ".../job.py", line 3'),
        ("path: ~/data/a.jsonl", "path: .../a.jsonl"),
        ("rank 1: can't read /mnt/x/a-b.txt: gone", "rank 1: can't read .../a-b.txt: gone"),
        ("see https://host/a/b, 3/4 and/or", "see https://host/a/b, 3/4 and/or"),
    ],
)
def test_folders_are_cut_from_what_others_wrote(text: str, shown: str) -> None:
    event = LauncherEvent(kind="failed", time=1, rank=1, step=1, text=text, cause=text)
    page = PageReader(run_page(make_history(state="failed", events=(event,), job_text=text)))
    assert public_text(text) == shown
    assert shown in page.text("td")
    assert shown in page.text("pre")
    assert any(shown in said for said in page.text("p"))


def test_a_long_run_makes_a_small_page() -> None:
    samples = [
        {"prompt": "p" * 9000, "reference": "r" * 9000, "before": "b" * 9000, "after": "<" * 9000}
    ] * 40
    spikes = tuple(
        LossSpike(kind="spike", step=n, fact="x" * 90, usual=1.0, samples=()) for n in range(3000)
    )
    sets = {
        name: tuple(evaluation_line(step, name, 1.0 + step % 7) for step in range(3000))
        for name in "abcdef"
    }
    scores = tuple(task_line(step, "sums", 0.5) for step in range(3000))
    run = make_history(
        steps=5000, report=make_report(samples=samples), data=make_data("&" * 9000), warned=spikes,
        evaluations=sets, tasks={"sums": scores, "more": scores},
    )  # fmt: skip
    assert len(run_page(run).encode()) < 500_000


def test_the_time_line_shows_how_a_run_of_many_events_ended() -> None:
    slow = [
        LauncherEvent(kind="slow", time=n, rank=1, step=n, text=f"slow at {n}") for n in range(900)
    ]
    failed = LauncherEvent(kind="failed", time=900, rank=1, step=900, text="it died at the end")
    page = PageReader(run_page(make_history(steps=900, events=(*slow, failed))))
    assert "it died at the end" in page.text("td")
    titles = [text for text in page.text("title") if text.startswith("slow at")]
    assert len(titles) < 200
    assert titles[-1].startswith("slow at 899")
    assert any("more here" in title for title in titles)


def test_where_a_run_was_resumed() -> None:
    event = LauncherEvent(kind="resume", time=1.0, step=30, text="went on after step 30")
    run = make_history(steps=40, events=(event,), job={"train.steps": 4000}, state="failed")
    page = PageReader(run_page(run))
    words = " ".join(page.text("desc"))
    assert "Resumed: 1, at step 30." in words
    assert "Faults" not in words
    assert "went on after step 30" in page.text("td")
    assert "4000" not in page.text("text")  # what is no longer planned isn't drawn


def test_what_is_kept_is_not_called_what_was_saved() -> None:
    saves = tuple(SavedCheckpoint(f"step-{n:06}", n, 1e9) for n in (30, 40))
    words = " ".join(PageReader(run_page(make_history(steps=40, saves=saves))).text("desc"))
    assert "Checkpoints kept: 2, at step 30, 40." in words


def test_documents_of_their_own_rows_and_pairs() -> None:
    data = make_data()
    alone = data.model_copy(update={"packing": False, "fill": 0.25})
    pairs = alone.model_copy(update={"paired": True})
    told = "A row is one document, of 32 tokens on average and 128 at most."
    assert told in run_page(make_history(data=alone))
    page = run_page(make_history(data=pairs))
    assert "A row is one source and its target, together 32 tokens on average." in page
    assert "shardtune serve" not in page
    assert "--to hf" in page
    assert "--to gguf" in run_page(make_history(data=data))


def test_a_forecast_is_drawn_for_a_gpu_only() -> None:
    forecast = StepForecast(tokens_per_second=90.0, allocated_gib=0.2)
    on_cpu = make_history(forecast=forecast)
    assert on_cpu.environment is not None
    gpu = on_cpu.environment.model_copy(update={"gpus": ("H200",)})
    assert 'class="level"' not in run_page(on_cpu)
    assert run_page(make_history(forecast=forecast, environment=gpu)).count('class="level"') == 2


def test_the_time_of_a_step_by_rank() -> None:
    rank = RankParts(**{**dict.fromkeys(PARTS, 0.0), "compute": 0.3, "data": 0.1}, positions=8)
    slow = rank.model_copy(update={"data": 0.4})
    steps = (step_line(1, parts=StepParts(steps=1, ranks=(rank, slow))), step_line(2))
    page = PageReader(run_page(RunHistory(Path("runs/first"), "running", steps=steps)))
    (words,) = [text for text in page.text("desc") if "rank 1" in text]
    assert "rank 0: 0.4 s, of it data 25%, compute 75%." in words
    assert "rank 1: 0.7 s, of it data 57%, compute 43%." in words


def test_ranks_that_a_resumed_run_no_longer_has_keep_their_own_mean() -> None:
    rank = RankParts(**{**dict.fromkeys(PARTS, 0.0), "compute": 0.4}, positions=8)
    steps = (
        step_line(1, parts=StepParts(steps=1, ranks=(rank,) * 4)),
        step_line(4, parts=StepParts(steps=3, ranks=(rank,) * 2)),
    )
    page = PageReader(run_page(RunHistory(Path("runs/first"), "running", steps=steps)))
    (words,) = [text for text in page.text("desc") if "rank 3" in text]
    assert words.count(": 0.4 s,") == 4


def test_runs_that_have_little() -> None:
    for state in ("running", "failed", "stopped"):
        empty = RunHistory(Path("runs/empty"), state)  # type: ignore[arg-type]
        page = PageReader(run_page(empty))
        assert "no values" in page.text("text")
        assert page.text("h2") == ["Loss", "Next"]
        assert any("before its first step" in said for said in page.text("p"))


def test_a_run_of_one_step() -> None:
    run = make_history(steps=1, evaluations={}, report=None, environment=None)
    page = PageReader(run_page(run))
    assert verdict(run) == "tiny was trained for 1 step on 8 tokens in 0.1 s of training."
    assert page.count("circle") == page.count("figure")  # one point in each chart
    assert "What happened" not in page.text("h2")


def test_a_small_fall_is_no_fall_of_nothing() -> None:
    sets = {"code": (evaluation_line(0, "code", 5.599), evaluation_line(1, "code", 5.583))}
    run = make_history(evaluations=sets, report=None)
    assert verdict(run).endswith("; the held-out loss fell from 5.599 to 5.583 (-0.29%) on code.")
    same = {"code": (evaluation_line(0, "code", 5.599), evaluation_line(1, "code", 5.59901))}
    assert verdict(replace(run, evaluations=same)).endswith("loss stayed at 5.599 on code.")


def test_losses_that_are_not_finite_are_said() -> None:
    steps = tuple(step_line(n, loss=n if n < 10 else None) for n in range(1, 41))
    nothing = evaluation_line(20, "code", 0.0).model_copy(update={"loss": None})
    sets = {"code": (evaluation_line(0, "code", 2.0), nothing)}
    left_out = tuple(
        NonfiniteGradient(kind="not_finite", step=n, fact="not finite", ranks={}, weights={})
        for n in range(10, 41)
    )
    run = make_history(steps=40, state="failed", report=None, evaluations=sets, warned=left_out)
    run = replace(run, steps=steps)
    assert verdict(run).endswith("; the held-out loss is no longer finite on code.")
    alone = replace(run, evaluations={})
    assert verdict(alone).endswith("; the training loss is no longer finite.")
    page = PageReader(run_page(run))
    named = "31 updates were left out, their gradients not finite: steps 10, 11, 12, 13, 14, 15, 16"
    assert f"{named}, 17 and 23 more." in page.text("li")
    texts = page.text("text")
    assert texts[texts.index("step") - 1] == "40"  # the axis goes on where the line ends


def test_a_spike_leaves_the_rest_readable() -> None:
    run = make_history(steps=200)
    steps = tuple(s.model_copy(update={"loss": 40.0}) if s.step == 50 else s for s in run.steps)
    spike = LossSpike(kind="spike", step=50, fact="far above", usual=1.1, samples=("a",))
    page = PageReader(run_page(replace(run, steps=steps, warned=(spike,))))
    assert "1 loss was far above those before: step 50." in page.text("li")
    assert "cut off: a loss of 40 at step 50" in page.text("li")
    (words,) = [text for text in page.text("desc") if "cut off" in text]
    assert "training loss, smoothed without spikes: from 1." in words
    assert "highest 40" not in words.split("cut off")[0]


def test_a_run_that_ended_early_says_why() -> None:
    report = make_report(early_stop={"metric": "code.loss", "value": 1.0, "waited": 3})
    run = make_history(job={"model.name": "tiny", "train.steps": 200}, report=report)
    assert "80 of 200 steps" in verdict(run)
    assert "; it ended early, 3 evaluations after the best code.loss; the held-out" in verdict(run)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("done", "tiny was trained for 80 steps on 640 tokens in 8.0 s of training; the held-out"),
        ("stopped", "tiny: stopped on request after 80 steps"),
        ("running", "tiny is in training, 80 steps"),
        ("failed", "tiny: failed after 80 steps on 640 tokens in 8.0 s of training (rank 1 died)"),
    ],
)
def test_the_verdict(state: str, words: str) -> None:
    events = (LauncherEvent(kind="failed", time=1.0, cause="rank 1 died"),)
    said = verdict(make_history(state=state, events=events))
    assert said.startswith(words)
    assert said.endswith("loss fell from 2 to 1 (-50%) on code.")


def test_a_result_of_an_earlier_step_is_told_by_its_own_figures() -> None:
    report = report_values(best={"metric": "code.loss", "value": 1.25, "step": 30})
    report["result"]["step"] = 30
    report["evaluation"]["code"]["after"]["loss"] = 1.25
    losses = ((0, 2.0), (30, 1.25), (80, 2.5))
    evaluations = {"code": tuple(evaluation_line(step, "code", loss) for step, loss in losses)}
    run = make_history(evaluations=evaluations, report=make_report(**report))
    said = verdict(run)
    assert "; the result is of step 30, the best by code.loss (1.25); the held-out" in said
    assert said.endswith("loss fell from 2 to 1.25 (-38%) on code.")
    read_back = dict(proofs(run, None))["the result is what was trained"]
    assert "weights equal to those of step 30" in read_back


def test_a_page_that_can_t_be_written_is_one_line(tmp_path: Path) -> None:
    said: list[str] = []
    try_write_run_page(tmp_path / "missing", said.append)
    assert len(said) == 1
    assert said[0].startswith("report.html was not written: FileNotFoundError")
    (tmp_path / "report.html").mkdir()
    try_write_run_page(tmp_path, said.append)
    assert said[1].startswith("report.html was not written: IsADirectoryError")
