"""How the models of each family are built: what can be cut into stages, and into slices.

One table. Pipelines read where the layers, the embeddings and the head are; tensor parallelism
reads how each matrix of a layer is sliced. A family that isn't here is refused with its name, and
so are slices of one whose layers nobody has said how to slice (mixtures of experts).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardtune.core.mesh import Mesh
from shardtune.core.model.peft_wrapper import unwrap_copies
from shardtune.core.model.shape import ModelShape
from shardtune.core.pipeline_schedule import Pipelining
from shardtune.errors import ModelError, Problem

ParallelStyle = Literal["column", "row", "column_of_three"]
"""`column`: the outputs are sharded. `row`: the inputs are, and the ranks' results are summed.
`column_of_three`: the outputs are queries, keys and values in a row, and each is sharded."""


@dataclass(frozen=True)
class DimShard:
    """Along which dim a weight is sharded, and into how many equal parts it falls before.

    Rank r of n has the r-th n-th of each part.
    """

    dim: int
    parts: int = 1


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
    styles: Mapping[str, ParallelStyle] = field(default_factory=dict)
    """The matrices of a layer that are sharded, by their module's name inside the layer. Whatever
    else a layer has (norms) is kept whole by every rank, which sees a part of the tokens or of the
    heads with it."""
    positions: str = ""
    """An embedding of positions that is added to the first one, where there is one."""
    dropout: str = ""
    """The dropout between the embeddings and the first layer, where there is one."""
    transposed: bool = False
    """Whether the matrices of a layer have their inputs first."""
    counts: tuple[tuple[str, str], ...] = ()
    """Modules inside a layer and an attribute of each that counts outputs; a rank has its share."""

    @property
    def slices(self) -> bool:
        """Whether its layers can be sliced; each can be cut into stages."""
        return bool(self.styles)

    def dim_shard(self, name: str, shape: Sequence[int]) -> DimShard | None:
        """How a weight of the whole model is sharded, by its name; None if ranks keep it whole."""
        inside = re.search(rf"(?:^|\.){self.layers}\.\d+\.(.+)$", name)
        if inside:
            return self.dim_shard_in_layer(inside[1], shape)
        for end in (self.embedding, self.head):
            found = re.search(rf"(?:^|\.){end}\.(.+)$", name)
            if found:
                return vocabulary_shard(found[1], shape)
        return None

    def dim_shard_in_layer(self, name: str, shape: Sequence[int]) -> DimShard | None:
        """How a weight of a layer is sharded, by its name inside the layer. A copy that is trained
        of a module, or of a block around it, is sharded as the module is."""
        name = unwrap_copies(name)
        for module, style in self.styles.items():
            if name.startswith(f"{module}."):
                leaf = name.removeprefix(f"{module}.")
                return _dim_shard(style, leaf, shape, transposed=self.transposed)
        return None


def vocabulary_shard(name: str, shape: Sequence[int]) -> DimShard | None:
    """How a weight of the embedding or the head is sharded, by its name inside of it."""
    return _dim_shard("column", name, shape, transposed=False)


def _dim_shard(
    style: ParallelStyle, leaf: str, shape: Sequence[int], *, transposed: bool
) -> DimShard | None:
    """How one weight of a sharded module is sharded; adapters follow the side that they are on."""
    words = leaf.split(".")
    outputs = DimShard(0, 3 if style == "column_of_three" else 1) if style != "row" else None
    inputs = DimShard(1) if style == "row" else None
    if "lora_A" in words:
        return inputs
    if "lora_B" in words or words[-1] == "bias":
        return outputs
    if "ia3_l" in words:  # a column scales outputs, a row inputs
        return outputs if shape[-1] == 1 else inputs
    spec = outputs or inputs
    return DimShard(1 - spec.dim, spec.parts) if spec and transposed else spec


_LLAMA = Family(
    base="model",
    embedding="embed_tokens",
    layers="layers",
    norm="norm",
    head="lm_head",
    attention="self_attn",
    mlp="mlp",
    styles={
        "self_attn.q_proj": "column",
        "self_attn.k_proj": "column",
        "self_attn.v_proj": "column",
        "self_attn.o_proj": "row",
        "mlp.gate_proj": "column",
        "mlp.up_proj": "column",
        "mlp.down_proj": "row",
    },
)
_GPT2 = Family(
    base="transformer",
    embedding="wte",
    positions="wpe",
    dropout="drop",
    layers="h",
    norm="ln_f",
    head="lm_head",
    attention="attn",
    mlp="mlp",
    styles={
        "attn.c_attn": "column_of_three",
        "attn.c_proj": "row",
        "mlp.c_fc": "column",
        "mlp.c_proj": "row",
    },
    transposed=True,
    counts=(("attn", "split_size"), ("attn.c_attn", "nf"), ("mlp.c_fc", "nf")),
)
_NEOX = Family(
    base="gpt_neox",
    embedding="embed_in",
    dropout="emb_dropout",
    layers="layers",
    norm="final_layer_norm",
    head="lm_head",
    attention="attention",
    mlp="mlp",
    styles={
        "attention.query_key_value": "column",  # a head's three parts stand together
        "attention.dense": "row",
        "mlp.dense_h_to_4h": "column",
        "mlp.dense_4h_to_h": "row",
    },
)
_MIXTURE = replace(_LLAMA, styles={})
"""Experts are divided by expert, not by column."""

SHARDABLE_FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gpt2": _GPT2,
    "gpt_neox": _NEOX,
    **dict.fromkeys(
        (
            "deepseek_v2",
            "deepseek_v3",
            "glm4_moe",
            "gpt_oss",
            "mixtral",
            "olmoe",
            "qwen2_moe",
            "qwen3_moe",
        ),
        _MIXTURE,
    ),
}
"""By transformers' `model_type`."""


def family_of(config: Any) -> Family:
    """The family of the model that a configuration of transformers describes."""
    return family_named(config.get_text_config().model_type)


def family_named(kind: str) -> Family:
    """The family by transformers' `model_type`; ModelError for one that isn't here."""
    if kind not in SHARDABLE_FAMILIES:
        fact = f"no rule says how a {kind!r} model is split into stages and tensor-parallel shards"
        known = ", ".join(sorted(SHARDABLE_FAMILIES))
        fix = f"use a strategy that keeps layers whole (`shardtune plan`), or a model of {known}"
        raise ModelError(Problem("model.name", fact, fix))
    return SHARDABLE_FAMILIES[kind]


def can_slice(kind: str) -> bool:
    """Whether layers of a family, by transformers' `model_type`, can be sliced."""
    return kind in SHARDABLE_FAMILIES and SHARDABLE_FAMILIES[kind].slices


def _require_slices(kind: str) -> Family:
    """The family, if its layers can be sliced."""
    family = family_named(kind)
    if not family.slices:
        fact = f"no rule says how the experts of a {kind!r} model are sliced"
        fix = "divide it otherwise: `shardtune plan` shows how"
        raise ModelError(Problem("strategy", fact, fix))
    return family


def require_tensor_parallel(config: Any, degree: int) -> Family:
    """Refuses a degree of tensor parallelism that doesn't divide the model.

    A vocabulary needn't divide: its runs may differ in length.
    """
    text = config.get_text_config()
    family = _require_slices(text.model_type)
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    _require_counts(text.num_attention_heads, kv_heads, _inner(text), degree)
    return family


def degrees_of(shape: ModelShape) -> list[int]:
    """Over how many ranks the layers of a model can be sharded; only 1 if nobody has said how."""
    common = math.gcd(shape.heads, shape.kv_heads, shape.ffn) if can_slice(shape.family) else 1
    return [n for n in range(1, common + 1) if common % n == 0]


def require_cuttable(shape: ModelShape, mesh: Mesh, pipelining: Pipelining | None) -> None:
    """As `require_divisible`, for a model of which only the shape is known."""
    stages, degree = mesh.size_of("pipeline"), mesh.size_of("tensor")
    if mesh.size_of("expert") > 1:
        widths = (shape.hidden, shape.experts.ffn) if shape.experts else ()
        _require_experts(shape.experts.count if shape.experts else 0, mesh, widths)
    if stages == degree == 1:
        return
    family_named(shape.family)
    if degree > 1:
        _require_slices(shape.family)
        _require_counts(shape.heads, shape.kv_heads, shape.ffn, degree)
    if pipelining is not None:
        require_stages(shape.layers, pipelining, stages)


def _require_counts(heads: int, kv_heads: int, columns: int, degree: int) -> None:
    counts = {"heads": heads, "key-value heads": kv_heads, "MLP columns": columns}
    common = math.gcd(*counts.values())
    possible = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
    problems = [
        Problem(
            "strategy",
            f"{count} {what} / tensor({degree}) = {count / degree:.2f}",
            f"use tensor parallelism over {possible} ranks: these divide all of them",
        )
        for what, count in counts.items()
        if count % degree
    ]
    if problems:
        raise ModelError(problems)


def require_stages(layers: int, pipelining: Pipelining, ranks: int) -> None:
    """Refuses more stages than layers, with the equation."""
    stages = pipelining.stages(ranks)
    if stages > layers:
        fact = f"stages({ranks}) x chunks({pipelining.chunks}) = {stages} > {layers} layers"
        fix = f"use at most {layers} stages in all: every one needs a layer"
        raise ModelError(Problem("strategy", fact, fix))


def require_divisible(config: Any, mesh: Mesh, pipelining: Pipelining | None = None) -> None:
    """Refuses a model that the axes of `mesh` can't cut, before any of its weights is read."""
    if mesh.size_of("expert") > 1:
        _require_experts(expert_count(config), mesh, expert_widths(config))
    if mesh.size_of("tensor") > 1:
        require_tensor_parallel(config, mesh.size_of("tensor"))
    if mesh.size_of("pipeline") > 1 and pipelining is not None:
        family_of(config)
        layers = config.get_text_config().num_hidden_layers
        require_stages(layers, pipelining, mesh.size_of("pipeline"))


def _inner(config: Any) -> int:
    """The width of the MLP; GPT-2 leaves it open where it is four times the hidden width."""
    for name in ("intermediate_size", "n_inner"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    return 4 * int(config.hidden_size)


def expert_count(config: Any) -> int:
    """Routed experts of a layer; 0 where a model has none."""
    return _of_experts(
        config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
    )


def _of_experts(config: Any, *names: str) -> int:
    """The first of these that a configuration has; 0 where it has none."""
    text = config.get_text_config()
    places = (text, getattr(text, "ffn_config", None))  # DBRX's
    found = (getattr(place, name, None) for place in places for name in names)
    return int(next(filter(None, found), 0))


def active_share(config: Any) -> float:
    """The share of its experts that a token is sent to; 1 where a model has none."""
    count = expert_count(config)
    chosen = _of_experts(config, "num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k")
    return chosen / count if count and chosen else 1.0


def expert_widths(config: Any) -> tuple[int, ...]:
    """Inputs and inner width of an expert's matrices, as far as a configuration tells."""
    text = config.get_text_config()
    inner = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
    return tuple(int(width) for width in (text.hidden_size, inner) if width)


def _require_experts(count: int, mesh: Mesh, widths: Sequence[int]) -> None:
    """Refuses ranks that can't have equally many experts each, or equal shares of them."""
    ranks, shards = mesh.size_of("expert"), mesh.size_of("shard")
    if not count:
        fact = f"expert({ranks}) divides the experts of a layer, and this model has none"
        raise ModelError(Problem("strategy", fact, "use another strategy (`shardtune plan`)"))
    if count % ranks:
        fact = f"{count} experts / expert({ranks}) = {count / ranks:.2f}"
        possible = ", ".join(str(n) for n in range(2, count + 1) if count % n == 0)
        raise ModelError(Problem("strategy", fact, f"divide them over {possible} ranks"))
    own = count // ranks

    def even(shards: int) -> bool:
        return not own % shards or not any(width % shards for width in widths)

    if not even(shards):
        sizes = " x ".join(map(str, widths))
        fact = f"shard({shards}) divides neither the {own} experts of a rank nor their {sizes}"
        possible = " or ".join(str(n * ranks) for n in range(1, shards) if even(n))
        raise ModelError(Problem("strategy", fact, f"start {possible} processes"))
