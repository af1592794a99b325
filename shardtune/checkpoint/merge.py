"""Merges an adapter into its model (LoRA, IA3): one set of weights, judged before it is left.

Three things are compared, each with what it has to equal:

1. the merged model and the adapter on its model, both in fp32, by the logits of real prompts: they
   may differ by fp32's rounding alone, whatever the model was trained in;
2. the same weights rounded to the dtype that is written, computed in fp32 again: each weight is off
   by at most half a unit in its last place, and the logits by what that does to this model;
3. what transformers reads from the folder and what was written, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardtune.checkpoint.base_files import leave_base
from shardtune.checkpoint.model_card import CARD_FILE
from shardtune.checkpoint.model_folder import model_folder
from shardtune.checkpoint.rounding_error import (
    ModelCalls,
    Rounding,
    fp32_logits,
    rounded_logits,
    rounding_bound,
)
from shardtune.errors import Problem, RunError

if TYPE_CHECKING:
    from shardtune.models.model_files import ModelFiles

PROMPTS = 4
PROMPT_TOKENS = 64
_FIX = "use the adapter as it is, with peft, and report this with the run's environment.json"


@dataclass(frozen=True)
class LogitDifference:
    """The largest difference of a logit, and how large rounding can make it."""

    found: float
    bound: float


@dataclass(frozen=True)
class MergedModel:
    """A merge that was compared and written."""

    dtype: str
    merged: LogitDifference
    """Between the adapter on its model and the merged model, in fp32."""
    rounded: LogitDifference
    """Between the merged model in fp32 and in what it was written in."""
    in_bf16: float | None
    """How far bf16 would move a logit; None where the files are no larger than that."""


def merge_adapter(
    model: Any,
    tokenizer: Any,
    target: Path,
    dtype: torch.dtype,
    prompts: Sequence[str],
    *,
    base: ModelFiles | None = None,
    card: str | None = None,
) -> MergedModel:
    """Writes the merged model to `target`; RunError if it isn't the adapted one.

    `model` is the adapted model in fp32: adding a small correction to 16-bit weights would round
    most of it away before the sum is formed. The sum is rounded once, to `dtype`, at the end.
    `base` and `card` are those of `save_result`.
    """
    inputs = tokenize_prompts(tokenizer, prompts, model)
    adapted = fp32_logits(model, inputs)
    merged = merge_weights(model)
    same = compare_merged(adapted, merged, inputs)
    in_bf16 = cost_of_bf16(merged, inputs) if dtype == torch.float32 else None
    rounded = round_weights(merged, inputs, dtype)
    merged.config.dtype = dtype
    with model_folder(target) as partial:
        merged.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        if base is not None:
            leave_base(partial, base)
        if card is not None:
            (partial / CARD_FILE).write_text(card, encoding="utf-8")
        require_read_back(merged, partial)
    return MergedModel(_word(dtype), same, rounded, in_bf16)


def merge_weights(adapted: Any) -> Any:
    """The model with its adapter added to its weights. A head that is the embedding, too, gets a
    weight of its own where it is adapted: the correction is none of the embedding."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # peft is slow to import

    causal = adapted.get_base_model()
    head, text = causal.get_output_embeddings(), causal.config.get_text_config()
    if isinstance(head, BaseTunerLayer) and text.tie_word_embeddings:
        linear: Any = head.get_base_layer()
        linear.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
        text.tie_word_embeddings = causal.config.tie_word_embeddings = False
    return adapted.merge_and_unload()


def tokenize_prompts(tokenizer: Any, prompts: Sequence[str], model: Any) -> ModelCalls:
    """What both models are asked: the beginning of some prompts."""
    known = model.config.get_text_config().vocab_size
    ids = [tokenizer(text)["input_ids"][:PROMPT_TOKENS] for text in prompts]
    rows = [torch.tensor([row]) for row in ids if row and max(row) < known][:PROMPTS]
    if not rows:
        rows = [torch.arange(PROMPT_TOKENS).unsqueeze(0) % known]
    named = ["input_ids", *(["decoder_input_ids"] * model.config.is_encoder_decoder)]
    return [dict.fromkeys(named, row) for row in rows]


def compare_merged(adapted: Tensor, merged: nn.Module, inputs: ModelCalls) -> LogitDifference:
    """Refuses a merge whose logits are others than `adapted`, beyond the rounding of fp32."""
    logits = fp32_logits(merged, inputs)
    difference = LogitDifference(
        _largest(logits - adapted),
        rounding_bound(merged, inputs, logits, Rounding(results=torch.float32)),
    )
    if not difference.found <= difference.bound:  # a NaN is refused, too
        fact = (
            f"merged, the model answers otherwise than with its adapter: in fp32 logits differ by "
            f"{difference.found:.2g}, and rounding explains {difference.bound:.2g}"
        )
        raise RunError(Problem("merge", fact, _FIX))
    return difference


def round_weights(merged: Any, inputs: ModelCalls, dtype: torch.dtype) -> LogitDifference:
    """Rounds all weights to `dtype`, in place. RunError where that is more than rounding."""
    exact = fp32_logits(merged, inputs)
    bound = rounding_bound(merged, inputs, exact, Rounding(weights=dtype))
    kind = str(dtype).removeprefix("torch.")
    # Not `.to`: that rounds the rotary tables, too.
    for name, parameter in merged.named_parameters():
        largest = parameter.abs().max().item() if parameter.numel() else 0.0
        if largest > torch.finfo(dtype).max:
            fact = (
                f"{name} has a weight of {largest:.3g}; {kind} ends at {torch.finfo(dtype).max:.5g}"
            )
            raise RunError(Problem("--dtype", fact, "write bf16 or fp32, which have its range"))
        parameter.data = parameter.data.to(dtype)
    difference = LogitDifference(_largest(fp32_logits(merged, inputs) - exact), bound)
    if not difference.found <= difference.bound:
        fact = (
            f"rounded to {kind}, logits differ by {difference.found:.2g}; "
            f"rounding explains {difference.bound:.2g}"
        )
        raise RunError(Problem("merge", fact, "write it with --dtype fp32"))
    return difference


def cost_of_bf16(merged: nn.Module, inputs: ModelCalls) -> float:
    """The largest change of a logit if the weights were rounded to bf16. They stay as they are."""
    exact = fp32_logits(merged, inputs)
    return _largest(rounded_logits(merged, inputs, torch.bfloat16) - exact)


def require_read_back(merged: Any, folder: Path) -> None:
    """Refuses a folder from which transformers reads other weights than were written."""
    reloaded = type(merged).from_pretrained(folder, dtype=merged.config.dtype)
    back = reloaded.state_dict()
    for name, tensor in merged.state_dict().items():
        if name not in back or not torch.equal(back[name], tensor):
            fact = f"read back from disk, {name} differs from what was merged"
            raise RunError(Problem("merge", fact, _FIX))


def _largest(difference: Tensor) -> float:
    return difference.abs().max().item()


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
