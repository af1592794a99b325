"""The figures of a step (loss, gradient norm, tokens), fetched from the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardtune.core.step import LateResult, StepResult
from shardtune.engine.host_to_device import fetched
from shardtune.engine.timer import ComputeTimer


def step_result(
    rate: float,
    figures: Sequence[Tensor],
    losses: Sequence[Tensor],
    timer: ComputeTimer,
    device: torch.device,
) -> StepResult:
    """The result of a step, which a GPU may not have computed yet: reading it waits.

    `figures` are the summed loss, the norm, whether the update was applied, tokens and labels.
    """
    parts = [figure.to(device).reshape(1) for figure in figures]
    parts += [torch.stack(list(losses)).flatten()] if losses else []
    times = timer.end_step()  # before the figures go: who has them may ask for it
    figures_here = fetched(torch.cat([part.detach().double() for part in parts]))

    def result() -> StepResult:
        total, norm, applied, tokens, labels, *each = figures_here.wait()
        lap = times()
        return StepResult(
            loss=total / max(1, labels),
            grad_norm=norm,
            learning_rate=rate,
            tokens=int(tokens),
            labels=int(labels),
            applied=bool(applied),
            busy=lap.busy,
            since_last=lap.since_last,
            on_device=lap.on_device,
            losses=tuple(each),
        )

    if device.type == "cpu":
        return result()
    return LateResult(result, figures_here.is_here)
