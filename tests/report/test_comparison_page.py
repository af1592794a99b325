"""Runs beside each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from shardtune.report.comparison_page import comparison_page, job_differences
from tests.report.pages import PageReader, make_history
from tests.reports import step_line


def test_jobs_are_compared_value_by_value() -> None:
    first = make_history(job={"a": 1, "b": True, "save.directory": "x", "same": 2.0})
    second = make_history(job={"a": 1.5, "same": 2.0, "save.directory": "y", "c": "z"})
    assert job_differences([first, second]) == {"a": (1, 1.5), "b": (True, None), "c": (None, "z")}
    assert job_differences([first, first]) == {}
    assert job_differences([make_history(job={"a": 1}), make_history(job={"a": True})])


def test_the_page() -> None:
    first = make_history(Path("runs/first"))
    second = make_history(Path("more/first"), job={"train.learning_rate": 2e-3}, state="failed")
    page = PageReader(comparison_page([first, second]))
    assert page.text("h1") == ["Comparison of first and first (2)"]
    assert page.text("h2")[0] == "What the jobs differ in"
    assert "train.learning_rate" in page.text("th")
    assert {"0.001", "0.002"} <= set(page.text("td"))
    assert page.count("figure") == page.count("desc") == 7


def test_runs_of_other_batches_are_aligned_by_tokens() -> None:
    small = make_history(Path("small"), steps=40)
    wide = tuple(step_line(step, tokens=32) for step in range(1, 11))
    large = replace(make_history(Path("large"), steps=10), steps=wide)
    found = comparison_page([small, large])
    ends = [
        json.loads(values["data-values"] or "[]")[-1][0]
        for tag, values in PageReader(found).tags
        if tag == "g" and values.get("data-name") in ("small", "large")
    ]
    assert set(ends) == {320.0}


def test_short_runs_are_not_called_smoothed_and_all_axes_are_the_same() -> None:
    short = [make_history(Path(name), steps=40) for name in ("first", "second")]
    page = PageReader(comparison_page(short))
    assert "Training loss" in page.text("figcaption")
    assert page.text("text").count("100") == page.count("figure")  # tokens, of 320
    long = [make_history(Path(name), steps=400) for name in ("first", "second")]
    assert "Training loss, smoothed" in PageReader(comparison_page(long)).text("figcaption")


def test_twenty_long_runs_make_a_small_page() -> None:
    runs = [make_history(Path(f"run{number}"), steps=800) for number in range(20)]
    assert len(comparison_page(runs).encode()) < 500_000
