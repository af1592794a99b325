"""What a save costs, from the times of steps."""

from __future__ import annotations

import pytest

from benchmarks.checkpoint import Step, longer, without_folder


def test_steps_beside_a_save_are_held_against_their_neighbours() -> None:
    """The machine becomes slower all the time, which is not the save's doing."""
    steps = [Step(10.0 + 0.02 * n) for n in range(40)]
    assert longer(steps, 1) == 0.0
    for number, save in ((12, 1), (13, 1), (30, 2)):
        steps[number] = Step(steps[number].seconds + 0.5, save)
    assert longer(steps, 1) == pytest.approx(1.0, abs=0.06)
    assert longer(steps, 2) == pytest.approx(0.5, abs=0.06)


def test_a_path_of_this_machine_is_not_published() -> None:
    words = ["--shape", "1B", "--folder", "/somewhere", "--saves", "2"]
    assert without_folder(words) == ["--shape", "1B", "--saves", "2"]
