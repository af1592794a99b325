"""The result of a run: written as others read it, then read back and compared."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardtune.checkpoint.base_files import leave_base
from shardtune.checkpoint.model_card import CARD_FILE
from shardtune.checkpoint.model_folder import model_folder
from shardtune.checkpoint.rounding_error import Rounding, fp32_logits, rounding_bound
from shardtune.checkpoint.seal import seal_folder
from shardtune.compat.quiet import hide_loading_bars
from shardtune.engine.loss import forward, model_inputs
from shardtune.errors import Problem, RunError

if TYPE_CHECKING:
    from shardtune.core.step import MicroBatch
    from shardtune.models.model_files import ModelFiles

PROBE_TOKENS = 128  # tokens of one training row on which the two models are compared
FP8_TOLERANCE = 3e-1
"""How far logits of a model that was multiplied in 8 bits may be off, as a share of the largest.
Its weights are calibrated, not only rounded, which no rounding error bounds. Noise of one bf16
rounding in the embedding of a random Llama of 16 layers moved its logits by 13 %."""


def save_result(
    model: Any,
    trained: Mapping[str, Tensor],
    tokenizer: Any,
    stops: frozenset[int],
    target: Path,
    *,
    dtype: torch.dtype,
    base: ModelFiles | None = None,
    card: str | None = None,
) -> torch.dtype:
    """A PEFT folder for an adapter, an ordinary model folder otherwise; always safetensors.

    What is written are the weights in `trained`: the model may hold a share of them only. `dtype`
    is what whole models are written in; adapters are small and stay in fp32. Returns what it was.
    An older result in `target` is replaced once the new one is complete. `card` is the model card.
    """
    adapted = hasattr(model, "peft_config")
    with model_folder(target, replace=True) as partial:
        if adapted:
            # An embedding that is trained is among the modules to save; peft would add it again.
            weights = _under_every_name(model, trained)
            model.save_pretrained(partial, state_dict=weights, save_embedding_layers=False)
        else:
            hide_loading_bars()
            model.save_pretrained(partial, state_dict=_rounded(model, trained, dtype))
            config = copy.deepcopy(model.config)
            config.dtype = dtype  # transformers wrote what the model is held in
            config.save_pretrained(partial)
        generation = copy.deepcopy(model.generation_config)
        generation.eos_token_id = sorted(stops)  # where the answers learned to end
        generation.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        if base is not None:
            leave_base(partial, base)
        if card is not None:
            (partial / CARD_FILE).write_text(card, encoding="utf-8")
        seal_folder(partial)
    return torch.float32 if adapted else dtype


def _under_every_name(model: nn.Module, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An embedding that is the output head, too, is one weight; peft asks for both its names."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    return {
        name: trained[first[parameter]]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first[parameter] in trained
    }


def _rounded(
    model: nn.Module, trained: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The weights in `dtype` (a tied one bears one of its names only), and the buffers."""
    saved = set(model.state_dict())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {name: weight.to(dtype) for name, weight in trained.items()} | buffers


def check_result(
    reloaded: nn.Module,
    trained: Mapping[str, Tensor],
    logits: Tensor,
    probe: MicroBatch,
    *,
    written: torch.dtype,
    computed: torch.dtype = torch.float32,
) -> float:
    """Raises unless every trained weight came back, bit for bit, and the logits with them.

    `logits` are those of the trained model on `probe`, `computed` in that precision. They may
    differ by its rounding, and by that of the weights to `written`, in which they lie on disk: by
    as much as both move the logits of this model. Returns the largest difference of a logit.
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
    difference = (logits - probe_logits(reloaded, probe)).abs().max().item()
    if difference == 0:
        return difference
    if computed == torch.float8_e4m3fn:
        allowed = FP8_TOLERANCE * logits.abs().max().item()
    else:
        asked = [model_inputs(reloaded, _beginning(probe, "cpu"))]
        rounding = Rounding(weights=written, results=computed)
        allowed = rounding_bound(reloaded, asked, fp32_logits(reloaded, asked), rounding)
    if not difference <= allowed:  # so that it is refused also when it isn't a number
        by = f"{difference:.3g} from those of the trained model; rounding explains {allowed:.3g}"
        raise _wrong(f"its logits differ by {by}")
    return difference


@torch.no_grad()
def probe_logits(model: nn.Module, probe: MicroBatch, device: str = "cpu") -> Tensor:
    """What the model says to the beginning of the probe's first row. All ranks have to ask."""
    model.eval()
    with torch.compiler.set_stance("force_eager"):  # nothing is to be compiled for one short row
        logits = forward(model, model_inputs(model, _beginning(probe, device)), None)
    return logits.float().cpu()


def _beginning(probe: MicroBatch, device: str) -> MicroBatch:
    """The first tokens of the first row, on `device`, as one document: a model that is loaded as
    anybody would may not keep packed ones apart."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:1, :PROBE_TOKENS].to(device)

    mask, ids = probe.source_mask, cut(probe.input_ids)
    return replace(
        probe,
        input_ids=ids,
        position_ids=torch.arange(ids.shape[1], device=device)[None],
        targets=cut(probe.targets),
        source_mask=None if mask is None else cut(mask),
    )


def _wrong(fact: str) -> RunError:
    fix = "the training itself is safe in checkpoints/; report this with the run's environment.json"
    return RunError(Problem("result", f"read back from disk, {fact}", fix))
