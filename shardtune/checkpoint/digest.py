"""Digests by which two runs can be compared to the bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING

import torch

from shardtune.checkpoint.safetensors_writer import SAFETENSORS_DTYPES, byte_blocks

if TYPE_CHECKING:
    from shardtune.core.step import StepResult


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of whole tensors in the order of their names; names, types and shapes count too."""
    found = sha256()
    for key in sorted(tensors):
        tensor = tensors[key]
        found.update(f"{key} {SAFETENSORS_DTYPES[tensor.dtype]} {list(tensor.shape)}\n".encode())
        for block in byte_blocks(tensor):
            found.update(block)
    return found.hexdigest()


def digest_rng_state(device: str) -> str:
    """SHA-256 of the state of the random number generators that training draws from."""
    found = sha256(torch.get_rng_state().numpy().tobytes())
    if device != "cpu":
        found.update(torch.cuda.get_rng_state().numpy().tobytes())
    return found.hexdigest()


def trace_line(
    step: int, result: StepResult, *, samples: str, random: str, state: str
) -> dict[str, str | int]:
    """A step to the bit: floats in hexadecimal, everything else as a digest."""
    return {
        "step": step,
        "loss": _hex(result.loss),
        "gnorm": _hex(result.grad_norm),
        "lr": _hex(result.learning_rate),
        "samples": samples,
        "random": random,
        "state": state,
    }


def _hex(value: float) -> str:
    return value.hex() if math.isfinite(value) else str(value)
