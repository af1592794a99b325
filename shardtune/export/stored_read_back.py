"""Quantized weights and their adapter, read back by plain transformers beside the run's model.

Codes, scales, the other weights and the adapter have to come back to the bit. The logits of both
models are computed in fp32, and may differ by

- `nf4`: the rounding of weights to what the run computed in. bitsandbytes restores codes to what it
  multiplies in, here fp32, and transformers rounds the adapter to the model's dtype;
- `int8`: that, and the rounding of inputs. transformers multiplies by LLM.int8(), which rounds a
  row of inputs to 127 steps either way, outliers apart; training multiplied with restored weights.

What that does to this model is measured, as in `rounding_error`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.checkpoint.merge import LogitDifference
from shardtune.checkpoint.rounding_error import (
    ModelCalls,
    Rounding,
    fp32_logits,
    rounding_bound,
)
from shardtune.compat.quiet import hide_loading_bars, without_int8_warnings
from shardtune.core.model.peft_wrapper import unwrap_name
from shardtune.core.model.quantized_size import NF4_BLOCK
from shardtune.errors import Problem, RunError
from shardtune.models.model_files import auto_class, explaining
from shardtune.models.quantization.bitsandbytes_layers import INT8_STEPS
from shardtune.models.quantization.bitsandbytes_linear import import_bitsandbytes

AS_STORED = "--as-stored"
_FIX = f"export the merged model: leave out {AS_STORED}; and report this with config.json"


@dataclass(frozen=True)
class StoredAgreement:
    """What plain transformers makes of the folder, beside the run's model."""

    logits: LogitDifference
    next_tokens: float
    """The share of positions at which both would go on with the same token."""


def load_stored_folder(folder: Path, config: Any, *, trust_remote_code: bool) -> Any:
    """The model in a folder as anybody would load it, on the CPU."""
    hide_loading_bars()
    with explaining(AS_STORED, "what was written", _FIX):
        found = auto_class(config).from_pretrained(
            folder, device_map="cpu", trust_remote_code=trust_remote_code
        )
    return found.eval()


def require_same_weights(back: nn.Module, base: nn.Module, adapted: nn.Module) -> None:
    """Refuses weights that aren't, to the bit, those of `base` as it was written, and the adapter
    that `adapted` has, in the dtype that transformers reads it in: the model's."""
    found = {unwrap_name(name): tensor for name, tensor in back.state_dict().items()}
    written = base.state_dict()
    trained = {unwrap_name(name): tensor for name, tensor in adapted.state_dict().items()}
    adapter = {name: tensor for name, tensor in trained.items() if name not in written}
    _require_equal(found, written)
    read_in = {name: tensor.dtype for name, tensor in found.items()}
    _require_equal(found, {name: each.to(read_in.get(name)) for name, each in adapter.items()})


def compare_stored(
    back: nn.Module,
    adapted: nn.Module,
    layers: Collection[str],
    inputs: ModelCalls,
    computed: torch.dtype,
) -> StoredAgreement:
    """Refuses a model that answers otherwise than `adapted`, the run's with its weights restored to
    `computed` and widened to fp32. `layers` are the quantized ones. `back` is changed to compute in
    fp32."""
    bitsandbytes = import_bitsandbytes().nn
    for parameter in back.parameters():
        if parameter.is_floating_point():  # codes are bytes
            parameter.data = parameter.data.float()
    for module in back.modules():
        if isinstance(module, bitsandbytes.Linear4bit):
            module.compute_dtype = torch.float32
            module.support_avx512bf16_for_cpu = False  # it would multiply in bf16 whatever is asked
    exact = fp32_logits(adapted, inputs)
    with without_int8_warnings():
        logits = fp32_logits(back, inputs)
    rounding = Rounding(weights=computed, results=torch.float32)
    eight_bit = [each for each in back.modules() if isinstance(each, bitsandbytes.Linear8bitLt)]
    threshold = eight_bit[0].state.threshold if eight_bit else 0.0
    with _rounded_inputs(adapted, layers if eight_bit else (), threshold):
        bound = rounding_bound(adapted, inputs, exact, rounding)
    difference = LogitDifference((logits - exact).abs().max().item(), bound)
    explained = difference.found <= difference.bound  # false also for what isn't a number
    if not explained:
        raise _differs(
            f"logits differ by {difference.found:.3g}; rounding explains {difference.bound:.3g}"
            + known_cause(back)
        )
    same = (logits.argmax(-1) == exact.argmax(-1)).float().mean().item()
    return StoredAgreement(difference, same)


def known_cause(model: nn.Module) -> str:
    """What bitsandbytes gets wrong on this machine, in words; empty where it is right."""
    layers = [m for m in model.modules() if isinstance(m, import_bitsandbytes().nn.Linear4bit)]
    narrow = next((each for each in layers if each.in_features % NF4_BLOCK), None)
    if narrow is None or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return ""
    return (
        f" (on CPUs with AVX512 bitsandbytes takes other rows' scales where rows are no multiple "
        f"of {NF4_BLOCK} wide, as {narrow.in_features} here)"
    )


@contextmanager
def _rounded_inputs(model: nn.Module, layers: Collection[str], threshold: float) -> Iterator[None]:
    """While it lasts, what these layers are given is off by half a step of LLM.int8(), up or down
    by chance. Columns with an input from `threshold` on aren't rounded there."""
    draw = torch.Generator().manual_seed(1)

    def move(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *others = given
        signs = 2 * torch.randint(0, 2, x.shape, generator=draw, dtype=torch.int8) - 1
        size = x.abs()
        outliers = size >= threshold
        half = size.masked_fill(outliers, 0).amax(-1, keepdim=True) / (2 * INT8_STEPS)
        columns = outliers.flatten(0, -2).any(0)
        return (torch.where(columns, x, x + signs * half), *others)

    # An adapter around a layer bears its name, too, and is given what isn't rounded.
    chosen = {unwrap_name(name): each for name, each in model.named_modules()}
    hooks = [chosen[name].register_forward_pre_hook(move) for name in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _require_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        if name not in found:
            raise _differs(f"{name} is missing")
        if not torch.equal(found[name], tensor):
            raise _differs(f"{name} isn't what was written")


def _differs(fact: str) -> RunError:
    return RunError(Problem(AS_STORED, f"read back by transformers, {fact}", _FIX))
