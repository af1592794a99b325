"""Independent readers of a GGUF file: transformers' own, and llama.cpp where it is installed.

What we wrote, we can read: that says little about names, orders and signs that we got wrong both
times. Others' readers have their own tables for these.
"""

from __future__ import annotations

import importlib.util
import io
import unicodedata
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardtune.checkpoint.rounding_error import Rounding, fp32_logits, rounding_bound
from shardtune.compat.quiet import hide_loading_bars
from shardtune.data.template_parity import parity_dialogues
from shardtune.errors import Problem, RunError
from shardtune.export.gguf_hyperparameters import gguf_family
from shardtune.export.gguf_vocabulary import composes_accents
from shardtune.export.gguf_write import chosen_type, rounding_bounds
from shardtune.export.llama_cpp_process import ask_llama_cpp
from shardtune.export.source import WholeModel

_WRITTEN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_OFFSET_ERROR = 2.0**-22  # a norm's weight went through w + 1 in fp32, and back
LEAST_AGREEMENT = 0.5
"""Of the next tokens with llama.cpp: a wrong rotary order or template leaves next to none."""


@dataclass(frozen=True)
class TransformersAgreement:
    """The model that transformers reads from the file, beside the one that was written."""

    logits: float
    """The largest difference of a logit."""
    next_tokens: float
    """The share of positions at which both would go on with the same token."""


@dataclass(frozen=True)
class LlamaCppAgreement:
    """What llama.cpp computes from the file."""

    logits: float
    next_tokens: float
    splits_accents: bool
    """Whether it reads letters and accents that are two characters as two, where training composed
    them; all other text was compared."""


def read_elsewhere(
    path: Path, whole: WholeModel, tokenizer: Any, kind: str
) -> tuple[TransformersAgreement | None, LlamaCppAgreement | None]:
    """What other readers make of the file; RunError where it is another model."""
    known = gguf_family(whole.config).known_to_transformers
    by_transformers = read_by_transformers(path, whole, kind) if known else None
    installed = importlib.util.find_spec("llama_cpp") is not None
    return by_transformers, read_by_llama_cpp(path, whole, tokenizer) if installed else None


def read_by_transformers(path: Path, whole: WholeModel, kind: str) -> TransformersAgreement:
    """Compares weights and logits of the model that transformers loads from the file."""
    from transformers import AutoModelForCausalLM

    hide_loading_bars()
    # transformers reads weights from any file, but leaves settings out (softcapping, head_dim).
    # Mistral is a Llama to llama.cpp, and so is what comes back.
    same = {"config": whole.config} if whole.config.model_type != "mistral" else {}
    with redirect_stderr(io.StringIO()):  # a bar for each file, which no setting turns off
        back = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, **same
        ).eval()
    found = dict(back.named_parameters())
    for name, weight in whole.weights().items():
        if name not in found:
            raise _differs(path, "transformers", f"{name} is missing")
        _require_near(path, name, found[name].detach(), weight, kind)
    exact, logits = fp32_logits(whole.model, whole.inputs), fp32_logits(back, whole.inputs)
    largest = (exact - logits).abs().max().item()
    if kind in _WRITTEN:
        rounding = Rounding(weights=_WRITTEN[kind], results=torch.float32)
        allowed = rounding_bound(whole.model, whole.inputs, exact, rounding)
        if not largest <= allowed:  # so that it is refused also when it isn't a number
            fact = f"logits differ by {largest:.3g}; rounding explains {allowed:.3g}"
            raise _differs(path, "transformers", fact)
    return TransformersAgreement(largest, _agreement(exact, logits))


def read_by_llama_cpp(path: Path, whole: WholeModel, tokenizer: Any) -> LlamaCppAgreement:
    """Compares token ids, logits and next tokens with those of llama.cpp."""
    texts = [m["content"] for each in parity_dialogues().values() for m in each.messages]
    composes = composes_accents(tokenizer)
    if composes:
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    rows = [call["input_ids"][0].tolist() for call in whole.inputs]
    found = ask_llama_cpp(path, rows=rows, texts=texts)
    _require_same_ids(path, texts, found.ids, tokenizer)
    logits = torch.from_numpy(found.logits)
    exact = fp32_logits(whole.model, whole.inputs).reshape(logits.shape)
    agreement = _agreement(exact, logits)
    if not agreement >= LEAST_AGREEMENT:
        fact = f"only {agreement:.0%} of the next tokens are the model's"
        raise _differs(path, "llama.cpp", fact)
    return LlamaCppAgreement((exact - logits).abs().max().item(), agreement, composes)


def _require_same_ids(
    path: Path, texts: Sequence[str], found: Sequence[Sequence[int]], tokenizer: Any
) -> None:
    """Refuses a file by which llama.cpp tokenizes otherwise than the run did."""
    for text, theirs in zip(texts, found, strict=True):
        ours = tokenizer(text, add_special_tokens=False)["input_ids"]
        for place, pair in enumerate(zip_longest(ours, theirs)):
            if pair[0] != pair[1]:
                fact = f"token {place} of {text[:40]!r} is {pair[1]}, and {pair[0]} in training"
                raise _differs(path, "llama.cpp", fact)


def _require_near(path: Path, name: str, found: Tensor, weight: Tensor, kind: str) -> None:
    """One weight, within what its type explains. Whole rows change places, so blocks stay."""
    wanted = np.ascontiguousarray(weight.float().numpy())
    bounds = rounding_bounds(wanted, chosen_type(weight, kind)) + _OFFSET_ERROR * (weight.ndim < 2)
    off = np.abs(found.float().numpy() - wanted)
    if not (off <= bounds).all():
        raise _differs(path, "transformers", f"{name} is off by {off.max():.3g}")


def _agreement(one: Tensor, other: Tensor) -> float:
    return float((one.argmax(-1) == other.argmax(-1)).float().mean())


def _differs(path: Path, reader: str, fact: str) -> RunError:
    fix = "report this with the model's config.json; --to hf can be converted elsewhere"
    return RunError(Problem(path.name, f"read by {reader}, {fact}", fix))
