"""Forward passes in lockstep: ranks that hold shards of one model (FSDP, ZeRO-3) call it equally
often.

A forward pass gathers weights from all ranks, so a rank whose share of the questions is answered
has to go on calling until the last one is through (transformers' `synced_gpus`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def in_lockstep(
    model: Any, any_rank: Callable[[bool], bool], device: str = "cpu"
) -> Iterator[None]:
    """Inside, ranks may call `model` as often as each needs to, with what each has; the block ends
    on all of them together. `any_rank` is true on all ranks if its argument is on one."""
    waiting = False

    def before_each(*_: Any) -> None:
        if not waiting:
            any_rank(True)

    handle = model.register_forward_pre_hook(before_each)
    try:
        yield
        waiting = True
        token = torch.zeros(1, 1, dtype=torch.long, device=device)
        was_training = model.training
        model.eval()  # dropout would draw random numbers
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            while any_rank(False):
                model(input_ids=token, attention_mask=torch.ones_like(token), use_cache=False)
        model.train(was_training)
    finally:
        handle.remove()
