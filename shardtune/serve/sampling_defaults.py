"""How a model's makers want it to be sampled: what its generation_config.json says.

Fields of a request win. As vLLM's server does, and transformers' `generate`. A file with
`do_sample: false` says nothing about sampling: its values are leftovers, which results don't have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "min_p": (0,), "repetition_penalty": (1,), "typical_p": (1,), "no_repeat_ngram_size": (0,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "epsilon_cutoff": (0,), "eta_cutoff": (0,),
    "encoder_repetition_penalty": (1,), "guidance_scale": (1,), "num_beams": (1,),
    "min_new_tokens": (0,), "min_length": (0,),
    **dict.fromkeys(
        (
            "top_h", "penalty_alpha", "max_new_tokens", "bad_words_ids", "suppress_tokens",
            "begin_suppress_tokens", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id",
        ),
        (),
    ),
}  # fmt: skip
"""What changes answers and isn't served, and the values of each that change nothing."""


@dataclass(frozen=True)
class SamplingDefaults:
    """What holds where a request says nothing; None where the model doesn't say either."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    left_out: Mapping[str, Any] = field(default_factory=dict)
    """What the file says besides, and isn't served."""

    @property
    def taken(self) -> dict[str, float]:
        """What the file says and is served."""
        own = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in own.items() if value is not None}

    @property
    def told(self) -> str:
        """In words; nothing where the model says nothing."""
        parts = [", ".join(f"{name} {value:g}" for name, value in self.taken.items())]
        if self.left_out:
            named = ", ".join(f"{name} {value}" for name, value in self.left_out.items())
            parts.append(f"not applied: {named}")
        said = "; ".join(filter(None, parts))
        return f"by its generation_config.json: {said}" if said else ""


def sampling_defaults(generation: Any | None) -> SamplingDefaults:
    """From a GenerationConfig of transformers. Values out of bounds are left out, too."""
    sampled = generation is not None and generation.do_sample is not False
    said: dict[str, Any] = generation.to_diff_dict() if generation is not None else {}
    bounds = {
        "temperature": lambda value: 0 <= value <= 2,
        "top_p": lambda value: 0 < value <= 1,
        "top_k": lambda value: value >= -1 and value % 1 == 0,
    }
    given = {name: said[name] for name in bounds if sampled and said.get(name) is not None}
    taken = {
        name: value
        for name, value in given.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and bounds[name](value)
    }
    left_out = {name: value for name, value in given.items() if name not in taken}
    for name, neutral in _NEUTRAL.items():
        if said.get(name) is not None and said[name] not in neutral:
            left_out[name] = said[name]
    top_k = max(int(taken["top_k"]), 0) if "top_k" in taken else None
    return SamplingDefaults(taken.get("temperature"), taken.get("top_p"), top_k, left_out)
