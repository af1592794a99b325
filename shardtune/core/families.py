"""How the models of each family are built: what can be cut into stages, and into slices.

One table. Pipelines read where the layers, the embeddings and the head are; tensor parallelism
reads how each matrix of a layer is sliced. A family that isn't here is refused with its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Slicing = Literal["column", "row", "column_of_three", "each_head"]
"""`column`: the outputs are sliced. `row`: the inputs are, and the ranks' results are added.
`column_of_three`: the outputs are queries, keys and values in a row, and each is sliced.
`each_head`: the weight is applied to every head alone; ranks hold it whole and see only their
heads."""


@dataclass(frozen=True)
class Family:
    """Names inside a causal language model of transformers."""

    base: str
    """The attribute that holds the model without its head."""
    embedding: str
    layers: str
    norm: str
    head: str
    attention: str
    """The attention inside a layer."""
    mlp: str
    slices: Mapping[str, Slicing]
    """The weights of a layer that are sliced, by their module's name inside the layer."""
    positions: str = ""
    """An embedding of positions that is added to the first one, where there is one."""
    norms: tuple[str, ...] = field(default=())
    """The norms of a layer, which work on each token alone."""


_LLAMA = Family(
    base="model",
    embedding="embed_tokens",
    layers="layers",
    norm="norm",
    head="lm_head",
    attention="self_attn",
    mlp="mlp",
    slices={
        "self_attn.q_proj": "column",
        "self_attn.k_proj": "column",
        "self_attn.v_proj": "column",
        "self_attn.o_proj": "row",
        "self_attn.q_norm": "each_head",
        "self_attn.k_norm": "each_head",
        "mlp.gate_proj": "column",
        "mlp.up_proj": "column",
        "mlp.down_proj": "row",
    },
    norms=("input_layernorm", "post_attention_layernorm"),
)
_GPT2 = Family(
    base="transformer",
    embedding="wte",
    positions="wpe",
    layers="h",
    norm="ln_f",
    head="lm_head",
    attention="attn",
    mlp="mlp",
    slices={
        "attn.c_attn": "column_of_three",
        "attn.c_proj": "row",
        "mlp.c_fc": "column",
        "mlp.c_proj": "row",
    },
    norms=("ln_1", "ln_2"),
)
_NEOX = Family(
    base="gpt_neox",
    embedding="embed_in",
    layers="layers",
    norm="final_layer_norm",
    head="embed_out",
    attention="attention",
    mlp="mlp",
    slices={
        "attention.query_key_value": "column",  # a head's three parts stand together
        "attention.dense": "row",
        "mlp.dense_h_to_4h": "column",
        "mlp.dense_4h_to_h": "row",
    },
    norms=("input_layernorm", "post_attention_layernorm"),
)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gpt2": _GPT2,
    "gpt_neox": _NEOX,
}
"""By transformers' `model_type`."""
