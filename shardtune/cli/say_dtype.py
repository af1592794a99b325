"""What weights are written in, and why: one line for `merge` and `export --to hf`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardtune.core.setup import Precision


def say_dtype(
    target: Path,
    written: str,
    *,
    asked: bool,
    computed: Precision,
    in_bf16: float | None,
    whole: bool = False,
) -> str:
    """The line for weights `written` in this dtype by a run that `computed` in that precision.

    `asked` is whether `--dtype` chose it, `whole` whether the run trained all weights, and
    `in_bf16` how far bf16 would move a logit.
    """
    smaller = (
        ""
        if in_bf16 is None
        else f" (--dtype bf16: half the size, logits move by up to {in_bf16:.2g})"
    )
    if asked:
        return f"wrote {target} in {written}, as asked{smaller}"
    if computed == "fp32" or (computed == "bf16" and not whole):
        why = "in which the run computed and was evaluated"
    elif whole:
        why = "as the run's result is"
    else:
        why = "the base model's own: weights of a run in fp16 may exceed its range"
    return f"wrote {target} in {written}, {why}{smaller}"
