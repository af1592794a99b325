"""What a transformer is made of: every tensor of it, from its config.json alone.

The list of tensors is the one truth. Counts, bytes, floating-point operations and what an adapter
trains are sums over it. `shardtune.core.model.architectures` writes the list for each architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

from shardtune.core.model.kind import ModelKind
from shardtune.core.model.weight import ModelPart, Weight, WeightKind

__all__ = [
    "LAYER_PARTS",
    "MATMUL_KINDS",
    "Experts",
    "ModelPart",
    "ModelShape",
    "Weight",
    "WeightKind",
]

LAYER_PARTS: tuple[ModelPart, ...] = ("layer", "moe_layer", "encoder_layer")

MATMUL_KINDS: tuple[WeightKind, ...] = ("linear", "conv1d", "matrix")


@dataclass(frozen=True)
class Experts:
    """The mixture in a layer's MLP."""

    count: int
    per_token: int
    ffn: int
    """Width of one expert."""
    shared_ffn: int
    """Width of what every token goes through beside its experts; 0 if there is none."""
    layers: int
    """How many layers have experts."""


@dataclass(frozen=True)
class ModelShape:
    """A transformer, described exactly; it has no weights and needs no torch."""

    name: str
    family: str
    """transformers' model_type."""
    vocab: int
    hidden: int
    layers: int
    """Decoder layers, with experts or without."""
    heads: int
    kv_heads: int
    head_dim: int
    """Of queries and keys."""
    value_dim: int
    """Of values; another than `head_dim` only with latent attention."""
    ffn: int
    """Width of an MLP without experts."""
    gated: bool
    """Whether the MLP multiplies two projections (SwiGLU, GeGLU)."""
    activation: str
    tied: bool
    """Whether the output head is the embedding."""
    norm: Literal["rms", "layer"]
    weights: tuple[Weight, ...]
    qk_norm: bool = False
    parallel: bool = False
    """Whether attention and MLP read the same input, instead of one the other's output."""
    positions: Literal["rotary", "learned", "sinusoidal", "alibi", "relative"] = "rotary"
    rotates_by_length: bool = False
    """LongRoPE: which frequencies a document has goes by its length."""
    max_positions: int = 0
    """The longest sequence that the config names; 0 if it names none."""
    dropout: float = 0.0
    """Of the residual stream in training, as the config has it."""
    attention_dropout: float = 0.0
    window: int | None = None
    """Tokens that a sliding window sees."""
    windowed_layers: int = 0
    """How many layers have that window; the others see everything."""
    experts: Experts | None = None
    encoder_layers: int = 0

    def __hash__(self) -> int:
        """Of all fields, computed once: the planner asks its caches thousands of times."""
        return self._hashed

    @cached_property
    def _hashed(self) -> int:
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    @property
    def kind(self) -> ModelKind:
        return "encoder_decoder" if self.encoder_layers else "decoder"

    @cached_property
    def parameters(self) -> int:
        """Every parameter, one that is used twice counted once."""
        return self.count(lambda weight: weight.parameter)

    @cached_property
    def buffers(self) -> int:
        """Numbers that are stored with the weights but never trained."""
        return self.count(lambda weight: not weight.parameter)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token meets: all but the experts that it isn't sent to."""
        return sum(self.active(weight) for weight in self.weights if weight.parameter)

    @cached_property
    def embedding_parameters(self) -> int:
        """What the model looks up in, and the output head where that is another tensor."""
        return self.parameters_in("embedding") + self.parameters_in("head")

    @cached_property
    def largest_layer(self) -> int:
        """Parameters of the largest layer: what an engine that gathers by layers holds at once."""
        return max((self.layer_parameters(part) for part in LAYER_PARTS), default=0)

    @cached_property
    def largest_module(self) -> int:
        """Parameters of the largest single module, without what lies in modules inside it."""
        sizes: dict[tuple[ModelPart, str], int] = {}
        for weight in self.weights:
            if weight.parameter:
                key = (weight.part, weight.module)
                sizes[key] = sizes.get(key, 0) + weight.size
        return max(sizes.values())

    @cached_property
    def largest_linear(self) -> int:
        """Weights of the largest linear module in a layer."""
        return max(w.size for w in self.weights if w.linear and w.part in LAYER_PARTS)

    def parameters_in(self, part: ModelPart) -> int:
        """All parameters of a part, over all its layers."""
        return sum(weight.total for weight in self.in_part(part) if weight.parameter)

    def layer_parameters(self, part: ModelPart) -> int:
        """Parameters of one layer of a kind; where layers differ, of the largest."""
        return self._layer_parameters.get(part, 0)

    @cached_property
    def _layer_parameters(self) -> dict[ModelPart, int]:
        largest: dict[ModelPart, dict[str, int]] = {}
        for weight in self.weights:
            if weight.parameter:
                sizes = largest.setdefault(weight.part, {})
                sizes[weight.name] = max(weight.size, sizes.get(weight.name, 0))
        return {part: sum(sizes.values()) for part, sizes in largest.items()}

    def layers_in(self, part: ModelPart) -> int:
        """How many layers of a kind there are."""
        return max((weight.times for weight in self.in_part(part)), default=0)

    def in_part(self, part: ModelPart) -> tuple[Weight, ...]:
        """The tensors of a part; for layers, those of one layer."""
        return self._parts.get(part, ())

    @cached_property
    def _parts(self) -> dict[ModelPart, tuple[Weight, ...]]:
        """The planner asks for parts thousands of times."""
        found: dict[ModelPart, list[Weight]] = {}
        for weight in self.weights:
            found.setdefault(weight.part, []).append(weight)
        return {part: tuple(weights) for part, weights in found.items()}

    def count(self, wanted: Callable[[Weight], bool]) -> int:
        return sum(weight.total for weight in self.weights if wanted(weight))

    def active(self, weight: Weight) -> int:
        if not weight.routed:
            return weight.total
        assert self.experts is not None
        return weight.total * self.experts.per_token // self.experts.count

    @property
    def token_table(self) -> Weight:
        """The embedding of the tokens; every family lists it first."""
        return self.in_part("embedding")[0]

    @cached_property
    def linears(self) -> tuple[Weight, ...]:
        """The weights of all linear modules."""
        return tuple(weight for weight in self.weights if weight.linear)
