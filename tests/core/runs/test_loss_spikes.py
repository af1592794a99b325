"""A loss out of line is told from an ordinary one."""

from __future__ import annotations

import random

from shardtune.core.runs.loss_spikes import MIN_LOSSES, LossSpikes


def test_a_noisy_falling_curve_has_no_spike() -> None:
    draw = random.Random(0)
    spikes = LossSpikes()
    curve = [4.0 * 0.999**step + draw.gauss(0, 0.2) for step in range(3000)]
    assert [loss for loss in curve if spikes.see(loss) is not None] == []


def test_a_flat_curve_may_move_a_little() -> None:
    spikes = LossSpikes()
    assert all(spikes.see(2.0) is None for _ in range(20))
    assert spikes.see(2.9) is None


def test_a_spike_is_told_with_the_usual_loss_and_does_not_become_usual() -> None:
    spikes = LossSpikes()
    for step in range(20):
        spikes.see(2.0 + 0.01 * (step % 5))
    assert spikes.see(100.0) == 2.02
    assert spikes.see(100.0) == 2.02
    assert spikes.see(2.01) is None


def test_nothing_is_known_at_the_beginning() -> None:
    spikes = LossSpikes()
    assert all(spikes.see(10.0**step) is None for step in range(MIN_LOSSES))
