"""Curves that warn, and those that don't: each rule with a curve that it is for."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import pytest

from shardtune.core.runs.curve_warnings import CurveWatch
from shardtune.core.runs.metrics import CurveWarning, LossSpike, MetricsLine
from shardtune.training.dead_adapters import dead_adapter_warning
from tests.reports import evaluation_line, step_line


def seen(lines: Iterable[MetricsLine]) -> list[CurveWarning]:
    watch = CurveWatch()
    return [warning for line in lines for warning in watch.see(line)]


def falling(step: int) -> float:
    return 1.0 + math.exp(-step / 60)


def curve(
    loss: Callable[[int], float], steps: int = 300, *, rate: float = 1e-4
) -> list[MetricsLine]:
    noise = random.Random(0)
    return [
        step_line(step, loss=loss(step) + noise.gauss(0, 0.02), learning_rate=rate)
        for step in range(1, steps + 1)
    ]


def test_a_good_run_is_not_warned_of() -> None:
    lines = curve(falling)
    for step, loss in ((0, 2.0), (100, 1.3), (200, 1.2), (300, 1.21)):
        lines.append(evaluation_line(step, "code", loss))
        lines.append(evaluation_line(step, "chat", loss + 0.5))
    assert seen(sorted(lines, key=lambda line: line.step)) == []


def test_a_run_that_has_learnt_and_is_flat_is_not_called_stuck() -> None:
    assert seen(curve(lambda step: 1.0 + math.exp(-step / 10), 600)) == []


def test_overfitting_names_the_best_step() -> None:
    evaluations = [(0, 2.0), (50, 1.4), (100, 1.3), (150, 1.32), (200, 1.4), (250, 1.5)]
    lines = curve(falling, 250)
    lines += [evaluation_line(step, "code", loss) for step, loss in evaluations]
    (found,) = seen(sorted(lines, key=lambda line: line.step))
    assert (found.about, found.set, found.since, found.step) == ("overfitting", "code", 100, 250)
    assert "since step 100 (1.3 to 1.5) while the training loss falls" in found.fact


def test_a_set_that_was_best_before_training() -> None:
    evaluations = [(0, 1.0), (50, 1.1), (100, 1.2), (150, 1.3)]
    lines = curve(falling, 150)
    lines += [evaluation_line(step, "code", loss) for step, loss in evaluations]
    (found,) = seen(sorted(lines, key=lambda line: line.step))
    assert (found.about, found.since) == ("overfitting", 0)
    assert "the model before training answers better" in found.fact


def test_a_rising_evaluation_without_falling_training_is_no_overfitting() -> None:
    lines = curve(lambda step: 1.0 + step / 5000, 250)
    for step, loss in ((50, 1.3), (100, 1.35), (150, 1.4), (200, 1.5)):
        lines.append(evaluation_line(step, "code", loss))
    found = seen(sorted(lines, key=lambda line: line.step))
    assert "overfitting" not in [each.about for each in found]


def test_divergence_is_said_once() -> None:
    found = seen(curve(lambda step: falling(step) if step < 150 else 1.0 + (step - 150) / 50))
    assert [each.about for each in found] == ["divergence"]
    assert found[0].since is not None
    assert 120 < found[0].since < found[0].step < 200


def test_a_rate_that_moves_nothing() -> None:
    (found,) = seen(curve(lambda step: 2.3, rate=1e-9))
    assert found.about == "learning_rate_too_low"
    assert "(1e-09) may be too low" in found.fact


def test_a_warmup_is_waited_for() -> None:
    lines = [step_line(step, loss=2.3, learning_rate=step * 1e-9) for step in range(1, 300)]
    assert seen(lines) == []


def test_spikes_speak_of_a_high_rate() -> None:
    def spike(step: int) -> LossSpike:
        return LossSpike(kind="spike", step=step, fact="", usual=1.0, samples=())

    rate = step_line(1, learning_rate=5e-3)
    assert seen([rate, spike(10), spike(50), spike(200)]) == []
    (found,) = seen([rate, spike(10), spike(50), spike(90), spike(95)])
    assert found.about == "learning_rate_too_high"
    assert "3 steps since step 10" in found.fact
    assert "(0.005)" in found.fact


def test_no_gradient_at_all() -> None:
    (found,) = seen([step_line(step, grad_norm=0.0) for step in range(1, 9)])
    assert (found.about, found.step, found.since) == ("dead_adapter", 5, 1)
    assert "dead adapters?" in found.fact


def test_a_gradient_that_has_gone() -> None:
    """A rate of thousands leaves weights that answer nothing: adapters that were never trained
    are another thing."""
    rate = {"learning_rate": 9e3}
    alive = [step_line(1, grad_norm=2.0, **rate)]
    (found,) = seen(alive + [step_line(step, grad_norm=0.0, **rate) for step in range(2, 9)])
    assert (found.about, found.step, found.since) == ("dead_adapter", 6, 2)
    assert "lower train.learning_rate (at most 9e+03 so far)" in found.fact
    assert "adapters" not in found.fact


def test_one_set_that_gets_worse() -> None:
    lines = []
    for step, good, bad in ((0, 2.0, 1.0), (10, 1.5, 1.1), (20, 1.4, 1.2)):
        lines += [evaluation_line(step, "code", good), evaluation_line(step, "chat", bad)]
    (found,) = seen(lines)
    assert (found.about, found.set, found.step) == ("set_gets_worse", "chat", 20)
    assert "was 1 before training and is 1.2, while 1 other set got better" in found.fact


def test_all_sets_that_get_worse_are_another_matter() -> None:
    lines = [
        evaluation_line(step, name, 1.0 + step / 10)
        for step in (0, 10, 20)
        for name in ("code", "chat")
    ]
    assert seen(lines) == []


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf")])
def test_what_is_no_number_is_passed_over(loss: float | None) -> None:
    lines: list[MetricsLine] = [step_line(step, loss=loss) for step in range(1, 50)]
    assert seen([*lines, evaluation_line(49, "code", float("nan"))]) == []


def test_a_resumed_run_does_not_repeat_itself() -> None:
    lines = curve(lambda step: 2.3)
    first = CurveWatch()
    said = [warning for line in lines for warning in first.see(line)]
    again = CurveWatch()
    for line in (*lines[:250], *said):
        again.see(line)
    assert [warning for line in lines[250:] for warning in again.see(line)] == []


def test_a_warning_of_the_end_is_no_news_to_a_run_that_said_it() -> None:
    warning = dead_adapter_warning(9, ["layers.0.v_proj"])
    watch = CurveWatch()
    assert watch.is_news(warning)
    watch.see(warning)
    assert not watch.is_news(warning)
