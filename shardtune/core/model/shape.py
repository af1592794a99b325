"""What a transformer is made of: every tensor of it, from its config.json alone.

The list of tensors is the one truth. Counts, bytes, floating-point operations and what an adapter
trains are sums over it. `shardtune.core.model.architectures` writes the list for each architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from shardtune.core.fp8_memory import (
    HESSIAN_BUDGET,
    gptq_workspace_bytes,
    hessian_bytes,
    outlier_columns,
)
from shardtune.core.model.weight import ModelPart, Weight, WeightKind
from shardtune.errors import ModelError, Problem, did_you_mean

__all__ = [
    "HEAD",
    "LAYER_PARTS",
    "MATMUL_KINDS",
    "NF4_BITS",
    "Experts",
    "ModelPart",
    "ModelShape",
    "Weight",
    "WeightKind",
]

LAYER_PARTS: tuple[ModelPart, ...] = ("layer", "moe_layer", "encoder_layer")

MATMUL_KINDS: tuple[WeightKind, ...] = ("linear", "conv1d", "matrix")

NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""Bits a weight: four, an 8-bit scale for 64 of them, an fp32 scale for 256 of those scales."""


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
    positions: Literal["rotary", "learned", "alibi", "relative"] = "rotary"
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

    @staticmethod
    def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
        """The shape of the model that a config.json describes; ModelError if it can't be told."""
        from shardtune.core.model.architectures import read_shape  # it imports this module

        return read_shape(config, name)

    # Counts ------------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> int:
        """Every parameter, one that is used twice counted once."""
        return self._count(lambda weight: weight.parameter)

    @cached_property
    def buffers(self) -> int:
        """Numbers that are stored with the weights but never trained."""
        return self._count(lambda weight: not weight.parameter)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token meets: all but the experts that it isn't sent to."""
        return sum(self._active(weight) for weight in self.weights if weight.parameter)

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
        return self._count(lambda weight: weight.parameter and weight.part == part)

    def layer_parameters(self, part: ModelPart) -> int:
        """Parameters of one layer of a kind; where layers differ, of the largest."""
        return sum(w.size for w in self.weights if w.part == part and w.parameter)

    def layers_in(self, part: ModelPart) -> int:
        """How many layers of a kind there are."""
        return max((w.times for w in self.weights if w.part == part), default=0)

    def in_part(self, part: ModelPart) -> tuple[Weight, ...]:
        """The tensors of a part; for layers, those of one layer."""
        return tuple(weight for weight in self.weights if weight.part == part)

    def _count(self, wanted: Callable[[Weight], bool]) -> int:
        return sum(weight.total for weight in self.weights if wanted(weight))

    def _active(self, weight: Weight) -> int:
        if not weight.routed:
            return weight.total
        assert self.experts is not None
        return weight.total * self.experts.per_token // self.experts.count

    # Floating-point operations -----------------------------------------------------------------

    @cached_property
    def multiplied_parameters(self) -> int:
        """Weights that one token is multiplied with: the output head counts even where it is the
        embedding, looking up doesn't."""
        inside = sum(self._active(w) for w in self.weights if w.kind in MATMUL_KINDS)
        return inside + (self.token_table.size if self.tied else 0)

    @property
    def token_table(self) -> Weight:
        """The embedding of the tokens; every family lists it first."""
        return self.in_part("embedding")[0]

    def matmul_flops_per_token(self) -> int:
        """Of a forward pass, attention's own products not counted.

        In a model with an encoder a token goes through both halves: one read for each written.
        """
        return 2 * self.multiplied_parameters

    def attention_flops(self, seq: int, *, causal: bool = True) -> int:
        """Of the scores and the weighted sums in a forward pass over one sequence of `seq` tokens.

        `causal` counts only the pairs that a token may see; without it every pair counts, as
        kernels without that knowledge compute them and some reports count them.
        """
        pair = 2 * self.heads * (self.head_dim + self.value_dim)
        whole, half = seq * seq, seq * (seq + 1) // 2
        if not causal:
            return pair * whole * (self.layers + self.encoder_layers + self._cross_layers)
        windowed = self.windowed_layers if self.window is not None and self.window < seq else 0
        seen = (self.layers - windowed) * half
        if windowed:
            assert self.window is not None
            outside = seq - self.window
            seen += windowed * (half - outside * (outside + 1) // 2)
        return pair * (seen + (self.encoder_layers + self._cross_layers) * whole)

    @property
    def _cross_layers(self) -> int:
        return self.layers if self.encoder_layers else 0

    # Adapters ----------------------------------------------------------------------------------

    def lora_parameters(
        self,
        rank: int,
        targets: Literal["all-linear"] | Collection[str] = "all-linear",
        *,
        dora: bool = False,
        modules_to_save: Collection[str] = (),
    ) -> int:
        """What LoRA trains: `rank` rows and columns beside each target, with DoRA its lengths too,
        and whole modules where asked."""
        found = self.targeted(targets)
        count = sum(rank * weight.lora_rows * weight.times for weight in found)
        if dora:
            count += sum(weight.features[0] * weight.times for weight in found)
        return count + self._saved(modules_to_save)

    def ia3_parameters(
        self,
        targets: Literal["auto"] | Collection[str] = "auto",
        feedforward: Literal["auto"] | Collection[str] = "auto",
    ) -> int:
        """What IA3 trains: a factor for each output of a target, or each input of a feedforward."""
        from shardtune.core.model.architectures import ia3_modules  # it imports this module

        chosen, inputs = ia3_modules(self, targets, feedforward)
        self._check("adapter.targets", "linear layer", chosen, [w.module for w in self.linears])
        return sum(
            weight.times * weight.shape[1 if _called(weight.module, inputs) else 0]
            for weight in self.linears
            if _called(weight.module, chosen)
        )

    @property
    def linears(self) -> tuple[Weight, ...]:
        """The weights of all linear modules."""
        return tuple(weight for weight in self.weights if weight.linear)

    def targeted(self, targets: Literal["all-linear"] | Collection[str]) -> tuple[Weight, ...]:
        """What LoRA adapts where it is told `targets`; `all-linear` is all but the output head.

        Where experts bear the names of modules that older models had, peft takes such a name for
        the experts alone: an MLP without experts that has a module of this name stays as it is.
        """
        taken = {name for weight in self.weights for name in weight.adapted_as}
        candidates = [
            weight
            for weight in self.weights
            if weight.adapted_as or (weight.linear and _last(weight.module) not in taken)
        ]
        if targets == "all-linear":
            return tuple(weight for weight in candidates if weight.part != "head")
        known = [name for weight in candidates for name in weight.targets]
        self._check("adapter.targets", "linear layer", targets, known)
        return tuple(w for w in candidates if any(_called(name, targets) for name in w.targets))

    def _saved(self, names: Collection[str]) -> int:
        self._check("adapter.modules_to_save", "module", names, self._modules())
        head_is_table = self.tied and _called(HEAD, names)
        return self._count(
            lambda weight: (
                weight.parameter
                and (
                    any(_called(module, names) for module in _enclosing(weight.module))
                    or (head_is_table and weight is self.token_table)
                )
            )
        )

    def _modules(self) -> list[str]:
        found = [module for weight in self.weights for module in _enclosing(weight.module)]
        return list(dict.fromkeys([*found, HEAD]))

    def _check(self, key: str, what: str, wanted: Collection[str], modules: Iterable[str]) -> None:
        """Refuses names that the model doesn't have."""
        known = dict.fromkeys(map(_last, modules))
        problems = []
        for index, name in enumerate(wanted):
            if not any(_called(module, (name,)) for module in modules):
                near = did_you_mean(name, known)
                fix = f"did you mean {near!r}?" if near else f"choose among {', '.join(known)}"
                fact = f"{self.name} has no {what} {name!r}"
                problems.append(Problem(f"{key}.{index}", fact, fix))
        if problems:
            raise ModelError(problems)

    # Bytes -------------------------------------------------------------------------------------

    def quantizable(self, kept: Collection[str] = ()) -> int:
        """Numbers in the linear modules that can be stored in 4 or 8 bits, biases not counted."""
        return sum(weight.total for weight in self._packed(kept))

    def eight_bit(self) -> int:
        """Bytes of the linear modules in 8-bit floating point: each number for either direction,
        and the columns that they have twice."""
        return sum(
            weight.total
            // weight.shape[-1]
            * (2 * weight.shape[-1] + outlier_columns(weight.shape[-1]))
            for weight in self._packed(())
        )

    def rounding_bytes(self) -> int:
        """At most so many bytes are taken for a while, beside `eight_bit`, to round them by data.
        Modules with one input may hear it together, which takes less."""
        packed = self._packed(())
        squares = {
            part: sum(hessian_bytes(each.shape[-1]) for each in packed if each.part == part)
            for part in LAYER_PARTS
        }
        whole = sum(hessian_bytes(each.shape[-1]) * each.times for each in packed)
        heard = min(whole, max(HESSIAN_BUDGET, *squares.values()))
        return heard + max(
            (gptq_workspace_bytes(each.shape[-1], each.size) for each in packed), default=0
        )

    def _packed(self, kept: Collection[str]) -> list[Weight]:
        """Linear modules in layers, without those in modules called as one of `kept`; GPT-2's
        transposed ones and experts can't be stored so."""
        names = set(map(_last, kept))
        return [
            weight
            for weight in self.weights
            if weight.kind == "linear"
            and weight.part in LAYER_PARTS
            and names.isdisjoint(weight.module.split("."))
        ]

    def frozen_bytes(
        self,
        quantization: Literal["none", "nf4", "int8"] = "none",
        *,
        width: int = 2,
        kept: Collection[str] = (),
    ) -> int:
        """Bytes of all weights, those that are not quantized in `width` bytes each."""
        if quantization == "none":
            return self.parameters * width
        packed = self._packed(kept)
        count = sum(weight.total for weight in packed)
        rest = (self.parameters - count) * width
        if quantization == "nf4":
            return rest + math.ceil(count * NF4_BITS / 8)
        scales = sum(weight.times * weight.shape[0] for weight in packed)  # one for each output
        return rest + count + scales * width


HEAD = "lm_head"
"""What every architecture that we know calls its output head."""


def _called(module: str, names: Collection[str]) -> bool:
    """A module is meant by its whole name or by the last parts of it."""
    return any(module == name or module.endswith(f".{name}") for name in names)


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _enclosing(module: str) -> list[str]:
    """The module and those that it lies in: `mlp.up_proj` and `mlp`."""
    parts = module.split(".")
    return [".".join(parts[: length + 1]) for length in range(len(parts))]
