"""The benchmark of serving, tried on the CPU with a toy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serving import MODELS, main, table_rows
from benchmarks.serving_methods import (
    EVALUATE,
    METHODS,
    PAGED,
    SERVE,
    build,
    measure,
    prompts_of,
)


@pytest.mark.sampled(3)
def test_methods_give_the_same_answers() -> None:
    found = []
    for method in (SERVE, EVALUATE, "HF generate"):
        model = build(MODELS[0], tiny=True)
        (only,) = measure(model, METHODS[method], [3], tiny=True)
        assert only["tokens_per_second"] > 0
        found.append(only["answers"])
    assert found[0] == found[1] == found[2]
    assert len({tuple(each) for each in found[0]}) == 3


@pytest.mark.long
def test_transformers_continuous_batching_gives_them_too() -> None:
    ours, theirs = (
        list(measure(build(MODELS[0], tiny=True), METHODS[method], [3, 1], tiny=True))
        for method in (SERVE, PAGED)
    )
    assert [each["answers"] for each in ours] == [each["answers"] for each in theirs]


@pytest.mark.long
@pytest.mark.process
def test_a_method_that_fails_is_a_line(tmp_path: Path) -> None:
    graphs = f"{PAGED}, sdpa, CUDA graphs"  # which a CPU hasn't
    words = ["--tiny", "--requests", "2", "--models", MODELS[0], "--methods", SERVE, graphs]
    assert main([*words, "--out", str(tmp_path)]) == 0
    first, second = json.loads((tmp_path / "serving.json").read_text(encoding="utf-8"))
    assert first["tokens_per_second"] > 0
    assert "cpu" in second["error"]
    table = (tmp_path / "serving.md").read_text(encoding="utf-8")
    assert f"| Llama-3.2-1B | 2 | {SERVE} |" in table


def test_ours_is_compared_with_the_best_of_its_kind() -> None:
    rates = {
        SERVE: 90.0,
        EVALUATE: 60.0,
        PAGED: 80.0,
        f"{PAGED}, sdpa, CUDA graphs": 100.0,
        "HF generate": 120.0,
    }
    records = [
        {"model": MODELS[0], "requests": 16, "method": method, "tokens_per_second": rate}
        for method, rate in rates.items()
    ]
    records.append({"model": MODELS[0], "requests": 1, "method": SERVE, "error": "a | b"})
    found = table_rows(records)
    assert found[0][1:] == ["1", SERVE, "a \\| b", "", ""]
    assert found[1][1:] == ["16", SERVE, "90", "0.90", "0.8"]
    assert found[2][1:] == ["16", EVALUATE, "60", "0.50", "0.9"]
    assert found[3][1:] == ["16", PAGED, "80", "", ""]


def test_rounds_differ_in_tokens_alone() -> None:
    first, second = (prompts_of(5, 512, round_=number, tiny=True) for number in range(2))
    assert list(map(len, first)) == list(map(len, second))
    assert first != second


def test_a_toy_stays_out_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tiny"])
    assert "give --out" in capsys.readouterr().err
