"""The end of a run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shardtune.report.summary import print_summary
from tests.report.screen import plain_console, shown, squeezed
from tests.reports import make_report, report_values


def summary(**changes: Any) -> str:
    console = plain_console()
    print_summary(make_report(**changes), console)
    return squeezed(shown(console))


def test_predicted_beside_measured() -> None:
    def pair(predicted: float, measured: float) -> dict[str, float]:
        return {
            "predicted": predicted,
            "measured": measured,
            "error": predicted / measured - 1,
        }

    held = {state: pair(2**30, 2**30) for state in ("params", "grads", "optim")}
    found = {"held_bytes": held, "peak_gib": pair(38.72, 38.83), "tokens_per_second": pair(9, 10)}
    text = summary(forecast=found)
    assert "a rank holds 3.00 GiB between steps, exactly as predicted" in text
    assert "38.72 GiB at the peak predicted, 38.83 measured (-0.3%)" in text
    assert "9 tokens/s predicted, 10 measured (-10.0%)" in text
    off = {**found, "held_bytes": {**held, "optim": pair(2**30, 2**31)}}
    assert "optimizer states 1.00 GiB predicted, 2.00 GiB held" in summary(forecast=off)
    assert "predicted" not in summary(forecast=None)


def test_everything_that_a_person_wants_to_know() -> None:
    found = summary()
    for fragment in (
        "held-out prompt 1 of 1",
        "Add [two] numbers.",
        "(nothing)",
        "[b] + a",
        "Loss per data set",
        "code 1.5121 0.7511 -50.3% 4.54 -> 2.12 65.7% -> 81.8%",  # 0.7511 / 1.5121 - 1
        "(training) 1.5243 0.7725 -49.3%",
        "run done: 40 steps, 78,948 tokens in 5:26 of training",  # 326.5 s
        "speed 221 tokens/s over all ranks",
        "peak memory 3.18 GiB on the fullest of 2 ranks",
        "result runs/quickstart/result (lora)",
        "read back: weights as they were written, logits within 0",
        "all files runs/quickstart",
        "as a page: runs/quickstart/report.html",
        'next shardtune generate runs/quickstart --prompt "..."',
        "shardtune merge runs/quickstart runs/quickstart/merged",
    ):
        assert fragment in found
    assert "--resume" not in found


def test_how_busy_the_ranks_were() -> None:
    training = report_values()["training"] | {"utilisation": 0.973}
    assert "busy 97 % (not waiting for other ranks)" in summary(training=training)
    assert "busy 97 % (computing)" in summary(training=training, ranks=1)


def test_a_stopped_run_can_go_on() -> None:
    found = summary(finished=False)
    assert "run stopped early, on request: 40 steps" in found
    assert "next shardtune train runs/quickstart/job.yaml --resume" in found


def test_a_run_of_all_weights_has_nothing_to_merge() -> None:
    result = {
        "path": "runs/quickstart/result",
        "kind": "full fine-tune",
        "largest_difference": 1e-5,
    }
    found = summary(result=result)
    assert "logits within 1e-05" in found
    assert "runs/quickstart/result (full fine-tune)" in found
    assert "merge" not in found


def test_a_run_without_held_out_sets() -> None:
    found = summary(evaluation={}, samples=[])
    assert "(training) 1.5243 0.7725 -49.3%" in found
    assert "held-out" not in found


def test_a_resumed_run_with_no_step_left() -> None:
    training = report_values()["training"] | {"last_loss": None, "tokens_per_second": 0.0}
    found = summary(training=training)
    assert "code 1.5121 0.7511" in found
    assert "(training)" not in found
    assert "speed" not in found


def test_a_resumed_run_whose_metrics_are_lost() -> None:
    after = report_values()["evaluation"]["code"]["after"]
    assert "code nan 0.7511" in summary(evaluation={"code": {"before": None, "after": after}})


@pytest.mark.parametrize(("first", "last"), [(0.0, 0.0), (1.0, math.nan), (math.inf, 1.0)])
def test_losses_that_are_no_use(first: float, last: float) -> None:
    training = report_values()["training"] | {"first_loss": first, "last_loss": last}
    assert f"(training) {first:.4f} {last:.4f}" in summary(training=training)


def test_what_a_model_says_does_not_steer_the_terminal() -> None:
    sample = {"prompt": "\x1b[2Jp", "reference": "", "before": "a\x07b", "after": "\x1b]0;x\x9b\nc"}
    found = summary(samples=[sample])
    assert not {c for c in found if not c.isprintable()} - {"\n"}
    assert "�[2Jp" in found


def test_commands_can_be_copied_whatever_the_directory_is_called() -> None:
    found = summary(directory="my [bold] runs/a")
    assert "all files my [bold] runs/a" in found
    assert "shardtune merge 'my [bold] runs/a' 'my [bold] runs/a/merged'" in found
