"""AdamW with moments of 8 bits, by bitsandbytes.

A moment is stored as one byte for each number, an index into a fixed map of 256 values between -1
and 1, and an fp32 scale for each block of 256 numbers. Outside of the optimizer moments are fp32
tensors, as torch's AdamW has them: any engine can load them, and `packed` finds the very bytes
again that `unpacked` came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardtune.core.setup import SCALE_BLOCK, OptimizerSetup
from shardtune.errors import JobError, Problem

_NUMBERS = {"exp_avg": 1, "exp_avg_sq": 2}
"""The number that bitsandbytes gives to each of torch's moments."""
_AT_ONCE = 1 << 14  # blocks that are packed together, which bounds the memory that it takes


def adamw_8bit(
    groups: list[dict[str, Any]], setup: OptimizerSetup, rate: float
) -> torch.optim.Optimizer:
    """The optimizer. Moments of small weights have 8 bits, too, unlike by its default: what a rank
    holds must not depend on how the weights are divided."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ModuleNotFoundError as error:
        if error.name != "bitsandbytes":
            raise
        fact, fix = "bitsandbytes is not installed", "pip install 'shardtune[quant]'"
        raise JobError(Problem("train.optimizer.bits", fact, fix)) from None

    class _AdamW(AdamW8bit):  # type: ignore[misc]
        def update_step(self, group: Any, p: Tensor, *indices: int) -> None:
            if p.numel():  # a rank's share may be empty, which its kernels don't expect
                super().update_step(group, p, *indices)

    return _AdamW(groups, lr=rate, betas=setup.betas, eps=setup.eps, min_8bit_size=1)


def is_8bit(optimizer: torch.optim.Optimizer) -> bool:
    return hasattr(optimizer, "name2qmap")


def unpacked(kept: Mapping[str, Any]) -> dict[str, Tensor]:
    """The optimizer's state of one weight as torch's AdamW would keep it."""
    moments = {
        name: _dequantized(kept[f"state{n}"], kept[f"absmax{n}"], kept[f"qmap{n}"])
        for name, n in _NUMBERS.items()
    }
    return {"step": torch.tensor(float(kept["step"])), **moments}


def packed(moments: Mapping[str, Tensor], optimizer: Any) -> dict[str, Any]:
    """The inverse of `unpacked`, to the bit where `moments` come from it."""
    kept: dict[str, Any] = {"step": int(moments["step"].item())}
    for (name, n), kind in zip(_NUMBERS.items(), ("dynamic", "udynamic"), strict=True):
        values = moments[name]
        # One map for all weights, on the device of the moments.
        qmap = optimizer.name2qmap[kind] = optimizer.name2qmap[kind].to(values.device)
        kept[f"state{n}"], kept[f"absmax{n}"] = _quantized(values, qmap)
        kept[f"qmap{n}"] = qmap
    return kept


def _dequantized(codes: Tensor, scales: Tensor, qmap: Tensor) -> Tensor:
    values = qmap[codes.flatten().int()]
    values *= scales.repeat_interleave(SCALE_BLOCK)[: values.numel()]
    return values.view(codes.shape)


def _quantized(values: Tensor, qmap: Tensor) -> tuple[Tensor, Tensor]:
    flat = values.flatten()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % SCALE_BLOCK)).view(-1, SCALE_BLOCK)
    parts = torch.split(padded, _AT_ONCE)
    codes, scales = zip(*(_quantized_blocks(part, qmap) for part in parts), strict=True)
    return torch.cat(codes).flatten()[: flat.numel()].view(values.shape), torch.cat(scales)


def _quantized_blocks(blocks: Tensor, qmap: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows: a scale that gives exactly these values where there is one, else
    the largest value, as bitsandbytes takes it."""
    borders = (qmap[1:] + qmap[:-1]) / 2
    scales = blocks.abs().amax(1)
    codes = _nearest(blocks, scales, borders)
    for scale in _possible_scales(scales, -float(qmap[0])):
        tried = _nearest(blocks, scale, borders)
        exact = (qmap[tried.int()] * scale[:, None] == blocks).all(1)
        codes = torch.where(exact[:, None], tried, codes)
        scales = torch.where(exact, scale, scales)
    return codes, scales


def _possible_scales(largest: Tensor, lowest: float) -> list[Tensor]:
    """The scales of rows whose largest value is negative. The map has 1 but not -1, so such a value
    was stored as its lowest: dividing by that gives the scale back, up to two roundings."""
    if lowest <= 0:
        return []
    near = largest / lowest
    above, below = (torch.nextafter(near, torch.full_like(near, end)) for end in (torch.inf, 0.0))
    further = torch.nextafter(above, torch.full_like(near, torch.inf))
    return [near, above, below, further, torch.nextafter(below, torch.zeros_like(near))]


def _nearest(blocks: Tensor, scale: Tensor, borders: Tensor) -> Tensor:
    relative = blocks / torch.where(scale > 0, scale, 1.0)[:, None]
    return torch.bucketize(relative, borders, out_int32=True).to(torch.uint8)
