"""The result of a run: written as others read it, then read back and compared."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardtune.core.cache import atomic_folder
from shardtune.errors import Problem, RunError

if TYPE_CHECKING:
    from shardtune.core.step import MicroBatch

PROBE = 128  # tokens of one training row on which the two models are compared
SAME_LOGITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""How far the reloaded model's logits may be off, as a share of the largest: rounding only."""


def save_result(
    model: Any, tokenizer: Any, stops: frozenset[int], target: Path, *, dtype: torch.dtype
) -> torch.dtype:
    """A PEFT folder for an adapter, an ordinary model folder otherwise; always safetensors.

    `dtype` is what whole models are written in; adapters are small and stay in fp32. Returns what
    it was. An older result in `target` is replaced once the new one is complete.
    """
    adapted = hasattr(model, "peft_config")
    with atomic_folder(target, replace=True) as partial:
        if adapted:
            model.save_pretrained(partial)
        else:
            model.save_pretrained(partial, state_dict=_rounded(model, dtype))
            config = copy.deepcopy(model.config)
            config.dtype = dtype  # transformers wrote what the model is held in
            config.save_pretrained(partial)
        generation = copy.deepcopy(model.generation_config)
        generation.eos_token_id = sorted(stops)  # where the answers learned to end
        generation.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return torch.float32 if adapted else dtype


def _rounded(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state of the model in `dtype`, with a tied weight under one of its names only.

    Rounded, the two would no longer share their memory, and be taken for two.
    """
    once = {name for name, _ in chain(model.named_parameters(), model.named_buffers())}
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
        if name in once
    }


def check_result(
    reloaded: nn.Module,
    trained: Mapping[str, Tensor],
    model: nn.Module,
    probe: MicroBatch,
    *,
    written: torch.dtype,
) -> float:
    """Raises unless every trained weight came back, bit for bit, and the logits with them.

    Both up to the rounding to `written`, in which the weights lie on disk. Returns the largest
    difference of a logit.
    """
    back = dict(reloaded.named_parameters())
    missing = sorted(trained.keys() - back.keys())
    if missing:
        raise _wrong(f"{len(missing)} of {len(trained)} weights are missing, first {missing[0]}")
    for name, weight in trained.items():
        again = back[name].detach().to(weight.device)
        if again.shape != weight.shape or not torch.equal(
            again, weight.to(written).to(again.dtype)
        ):
            raise _wrong(f"{name} differs from what was trained")
    ours, theirs = _logits(model, probe), _logits(reloaded, probe)
    difference = (ours - theirs).abs().max().item()
    computed = next(iter(reloaded.parameters())).dtype
    allowed = max(SAME_LOGITS[written], SAME_LOGITS[computed]) * ours.abs().max().item()
    if not difference <= allowed:  # so that it is refused also when it isn't a number
        raise _wrong(f"its logits differ by {difference:.3g} from those of the trained model")
    return difference


@torch.no_grad()
def _logits(model: nn.Module, probe: MicroBatch) -> Tensor:
    model.eval()
    device = next(model.parameters()).device
    logits: Tensor = model(
        input_ids=probe.input_ids[:1, :PROBE].to(device),
        position_ids=probe.position_ids[:1, :PROBE].to(device),
        use_cache=False,
    ).logits
    return logits.float().cpu()


def _wrong(fact: str) -> RunError:
    fix = "the training itself is safe in checkpoints/; report this with the run's environment.json"
    return RunError(Problem("result", f"read back from disk, {fact}", fix))
