"""An fp32 number as two halves of 16 bits, of which the upper one is the number, rounded to bf16.

The lower one are its last 16 bits, read as a signed number: what has to be added to the upper one's
bits. So nothing is held twice. A number in the middle between two of bf16 is rounded away from
zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAN = 0x7FC00000
"""One of the numbers that aren't: of others the upper half might be one."""

AT_ONCE = 1 << 24
"""Numbers whose halves are made at once."""


def split(number: Tensor, upper: Tensor, lower: Tensor) -> None:
    """Writes both halves, some rows at a time: what lies between takes no memory to speak of."""
    rows = max(1, AT_ONCE * max(1, len(number)) // max(1, number.numel())) if number.ndim else 0
    parts = [(number, upper, lower)]
    if number.numel() > AT_ONCE:
        parts = list(
            zip(*(torch.split(each, rows) for each in (number, upper, lower)), strict=True)
        )
    for part in parts:
        _split(*part)


def _split(number: Tensor, upper: Tensor, lower: Tensor) -> None:
    bits = torch.where(number.isnan(), NAN, number.contiguous().view(torch.int32))
    last = bits.to(torch.int16)
    lower.copy_(last)  # which may lie in CPU memory
    upper.view(torch.int16).copy_((bits - last.to(torch.int32)) >> 16)


def joined(upper: Tensor, lower: Tensor) -> Tensor:
    """The number, to the bit."""
    high = upper.contiguous().view(torch.int16).to(torch.int32)
    return high.bitwise_left_shift_(16).add_(_beside(lower, upper)).view(torch.float32)


def _beside(lower: Tensor, upper: Tensor) -> Tensor:
    """It may lie in CPU memory, pinned: nobody has to wait for it."""
    return lower.to(upper.device, non_blocking=True)
