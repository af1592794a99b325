"""What transformers' code of each model family can do, as far as defaults depend on it.

One table by `model_type`: the attention implementations of a family, best first, and whether packed
documents stay apart in it. `auto`, the planner and the trainer read it; a test holds every row
against transformers itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardtune.errors import ModelError, Problem

AttentionImplementation = Literal["sdpa", "flex_attention", "flash_attention_2", "eager"]
"""As transformers calls them: `attn_implementation`."""


@dataclass(frozen=True)
class FamilySupport:
    """What a family's code in transformers can do."""

    attention: tuple[AttentionImplementation, ...] = (
        "sdpa",
        "flex_attention",
        "flash_attention_2",
        "eager",
    )
    """Its attention implementations, best first."""
    mixes_documents: str = ""
    """Why documents that are packed into a row would see each other; empty where they don't."""

    @property
    def best_attention(self) -> AttentionImplementation:
        """The best one that any machine computes as it is: `sdpa`, else `eager`. FlashAttention 2
        is another package. FlexAttention has no backward pass on a CPU, and on GPUs it has to be
        compiled for each kind of mask, which fails for some shapes of heads."""
        return "sdpa" if "sdpa" in self.attention else "eager"


_UNFLEXED: tuple[AttentionImplementation, ...] = ("sdpa", "flash_attention_2", "eager")
_NO_SDPA: tuple[AttentionImplementation, ...] = ("flex_attention", "flash_attention_2", "eager")
_FLASH: tuple[AttentionImplementation, ...] = ("flash_attention_2", "eager")
_EAGER: tuple[AttentionImplementation, ...] = ("eager",)
_ALIBI = "its attention counts distances (ALiBi) over the whole row"
_NO_POSITIONS = "it makes its attention mask without looking at positions"
_OWN_POSITIONS = "it computes its own positions, over the whole row"

_PLAIN = (
    "apertus", "arcee", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4",
    "gemma", "gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe", "gpt_neox", "granite",
    "granitemoe", "granitemoehybrid", "helium", "hunyuan_v1_dense", "lfm2", "lfm2_moe", "llama",
    "ministral", "mistral", "mixtral", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "phi",
    "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
"""Those that have every implementation and keep documents apart: their masks are made from
positions, by transformers or by `models/document_isolation.py`, which resets recurrent layers."""

FAMILY_SUPPORT: Mapping[str, FamilySupport] = {
    **dict.fromkeys(_PLAIN, FamilySupport()),
    "bamba": FamilySupport(_UNFLEXED),
    "bloom": FamilySupport(_EAGER, _ALIBI),
    "codegen": FamilySupport(_EAGER),
    "falcon": FamilySupport(_UNFLEXED, _NO_POSITIONS),
    "falcon_h1": FamilySupport(_UNFLEXED),
    "gemma2": FamilySupport(_NO_SDPA),
    "gpt2": FamilySupport(_UNFLEXED),
    "gpt_bigcode": FamilySupport(_UNFLEXED),
    "gpt_neo": FamilySupport(_FLASH),
    "gpt_oss": FamilySupport(_NO_SDPA),
    "gptj": FamilySupport(_FLASH),
    "mpt": FamilySupport(_EAGER, _ALIBI),
    "olmoe": FamilySupport(_UNFLEXED),
    "opt": FamilySupport(mixes_documents=_OWN_POSITIONS),
    "persimmon": FamilySupport(_UNFLEXED),
    "qwen3_5_moe_text": FamilySupport(_UNFLEXED),
    "qwen3_5_text": FamilySupport(_UNFLEXED),
    "qwen3_next": FamilySupport(_UNFLEXED),
    "stablelm": FamilySupport(_UNFLEXED),
    "xglm": FamilySupport(_EAGER, _OWN_POSITIONS),
}
"""By transformers' `model_type`. A family that isn't here is trained too: transformers chooses its
attention, and documents are padded unless the job says otherwise."""


WITHOUT_BOUNDARIES = frozenset(
    {"bamba", "bloom", "codegen", "cohere2", "deepseek_v2", "deepseek_v3", "exaone4", "falcon",
     "falcon_h1", "gemma2", "gemma4_text", "gpt_neo", "gptj", "granitemoehybrid", "lfm2",
     "lfm2_moe", "mpt", "nemotron", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
     "stablelm", "xglm"}
)  # fmt: skip
"""Families whose attention can't be told where documents begin and end: on a GPU they keep their
mask, which transformers asks the GPU for, so no CUDA graph is recorded. A run asks the model itself
(`models/packed_attention.py`); attention dropout has the same effect in any family."""

SINK_FAMILIES = frozenset({"gpt_oss"})
"""Families whose heads have a sink (`s_aux`), and for which transformers has no sdpa. Where a GPU
would compute `eager` in 16 bits, a kernel of ours takes its place."""


def support_of(config: Mapping[str, Any]) -> FamilySupport | None:
    """What is known of the family that a config.json describes, or of the text model inside it."""
    inner = config.get("text_config")
    found = [each.get("model_type") for each in (config, inner) if isinstance(each, Mapping)]
    return next((FAMILY_SUPPORT[str(kind)] for kind in found if kind in FAMILY_SUPPORT), None)


def require_isolation(family: str, *, packing: bool) -> None:
    """Refuses packed rows of a family that is known to mix their documents. Of others a run looks
    for itself, before its first step."""
    support = FAMILY_SUPPORT.get(family)
    if support is None or not packing or not support.mixes_documents:
        return
    fact = f"is true, but {family} models mix packed documents: {support.mixes_documents}"
    raise ModelError(Problem("data.packing", fact, "set data.packing: false, or auto"))


def require_attention(family: str, asked: str) -> None:
    """Refuses an attention implementation that a family doesn't have; `auto` is never refused."""
    support = FAMILY_SUPPORT.get(family)
    if support is None or asked == "auto" or asked in support.attention:
        return
    fact = f"is {asked}, which {family} models don't have in transformers"
    fix = f"set model.attention: auto, or one of {', '.join(support.attention)}"
    raise ModelError(Problem("model.attention", fact, fix))
