"""A result that is still being computed."""

from __future__ import annotations

from dataclasses import asdict, replace

from shardtune.core.step import LateResult, StepResult

PLAIN = StepResult(2.5, 0.5, 1e-3, 100, 90, applied=False, busy=0.1, losses=(1.0, 1.5))


def late() -> tuple[LateResult, list[None]]:
    waited: list[None] = []

    def wait() -> StepResult:
        waited.append(None)
        return PLAIN

    return LateResult(wait), waited


def test_nobody_waits_until_a_figure_is_asked_for_and_then_once() -> None:
    result, waited = late()
    assert isinstance(result, StepResult)
    assert not waited
    assert (result.loss, result.applied, result.busy, result.losses) == (
        2.5,
        False,
        0.1,
        (1.0, 1.5),
    )
    assert result.read() is PLAIN
    assert len(waited) == 1


def test_it_compares_and_unfolds_as_any_result() -> None:
    assert late()[0] == late()[0]
    assert asdict(late()[0]) == asdict(PLAIN)
    assert replace(late()[0].read(), loss=1.0).labels == 90
    assert PLAIN.read() is PLAIN
