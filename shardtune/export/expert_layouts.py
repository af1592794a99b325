"""LoRA of experts in the layouts of peft and of vLLM, and the proof that both mean the same.

peft keeps an adapter for each stacked weight of a layer, of E experts and rank r:

    experts.base_layer   gate_up_proj     A [E * r, in]   rows by expert, then by rank
    experts              down_proj        B [out, r * E]  columns by rank, then by expert

vLLM reads gpt-oss as peft writes it, and every other family here as three modules for each expert
(`experts.3.gate_proj`, A `[r, in]` and B `[out, r]`). The stacked weight holds gate over up: they
share A, and each has its part of B. It multiplies all of an adapter by alpha / r of the whole
adapter and knows no other rank, so experts of another rank bring their strength in B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardtune.errors import Problem, RunError

Deltas = dict[tuple[str, int, str], Tensor]
"""W' - W of each expert's matrix, outputs by inputs, by layer, expert and `gate`, `up` or
`down`."""

STACKED = ("gpt_oss",)
"""Families whose experts vLLM reads in peft's layout."""
_PLAIN = ("gate_proj", "up_proj", "down_proj")
_MODULES: dict[str, tuple[str, str, str]] = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe", "granitemoe", "olmoe", "qwen2_moe", "qwen3_moe"),
        _PLAIN,
    ),
    "mixtral": ("w1", "w3", "w2"),
}
"""What vLLM calls an expert's gate, up and down matrices."""
_RENAMED = {"mixtral": (".mlp.experts", ".block_sparse_moe.experts")}
"""Where transformers has given the experts another place than the published files, which vLLM
goes by."""
_MATRICES = ("gate", "up", "down")
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class ExpertFactors:
    """The adapter of one stacked weight."""

    layer: str
    """The module that holds the experts: `model.layers.0.mlp.experts`."""
    weight: str
    """`gate_up_proj` or `down_proj`."""
    a: Tensor
    """`[experts, rank, inputs]`."""
    b: Tensor
    """`[experts, outputs, rank]`."""
    scaling: float


def has_experts(names: list[str]) -> bool:
    """Whether an adapter has tensors of routed experts."""
    return any(".experts." in name for name in names)


def read_peft(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], experts: int
) -> list[ExpertFactors]:
    """The experts' adapters of a result, as peft computes with them."""
    found = []
    for name in sorted(tensors):
        if not name.endswith(f".experts{_A}") and not name.endswith(f".experts.base_layer{_A}"):
            continue
        module = name.removesuffix(_A)
        layer = module.removesuffix(".base_layer").removeprefix(_PREFIX)
        weight = "gate_up_proj" if module.endswith(".base_layer") else "down_proj"
        a, b = tensors[module + _A], tensors[module + _B]
        rank = len(a) // experts
        declared = (settings.get("rank_pattern") or {}).get(f"experts.{weight}", settings["r"])
        if len(a) != experts * declared or b.shape[1] != len(a):
            fact = (
                f"{module} has {len(a)} rows for {experts} experts of rank {declared}: their "
                "experts can't be told apart"
            )
            raise RunError(Problem("--to vllm", fact, "train again; the result is damaged"))
        a = a.reshape(experts, rank, -1)
        b = b.reshape(b.shape[0], rank, experts).permute(2, 0, 1)
        found.append(ExpertFactors(layer, weight, a, b, _scaling(settings, rank)))
    return found


def vllm_tensors(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], experts: int, family: str
) -> dict[str, Tensor]:
    """The whole adapter as vLLM reads it."""
    require_known(family, settings)
    found = {name: each for name, each in tensors.items() if ".experts." not in name}
    whole = _scaling(settings, settings["r"])
    for factors in read_peft(tensors, settings, experts):
        b = _exactly(factors.b, factors.scaling / whole, factors)
        if family in STACKED:
            inner = ".base_layer" if factors.weight == "gate_up_proj" else ""
            place = f"{_PREFIX}{factors.layer}{inner}"
            found[place + _A] = factors.a.flatten(0, 1).contiguous()
            found[place + _B] = b.permute(1, 2, 0).flatten(1).contiguous()
            continue
        for module, part in _parts(family, factors.weight, b.shape[1]):
            for expert in range(experts):
                place = f"{_PREFIX}{_vllm_layer(family, factors.layer)}.{expert}.{module}"
                found[place + _A] = factors.a[expert].clone()
                found[place + _B] = b[expert, part].clone()
    return found


def vllm_settings(settings: Mapping[str, Any], family: str) -> dict[str, Any]:
    """adapter_config.json without what vLLM doesn't read, so that nobody takes it for more."""
    names = [] if family in STACKED else list(_MODULES[family])
    kept = {key: value for key, value in settings.items() if key not in _PEFT_ONLY}
    return kept | {"target_modules": sorted({*settings["target_modules"], *names})}


_PEFT_ONLY = ("rank_pattern", "alpha_pattern", "target_parameters")


def require_known(family: str, settings: Mapping[str, Any]) -> None:
    """Refuses a family whose layout nobody has looked up, and what vLLM would scale otherwise."""
    if family not in _MODULES and family not in STACKED:
        known = ", ".join(sorted([*_MODULES, *STACKED]))
        raise _refuse(f"how vLLM lays out the experts of {family} isn't known here ({known} are)")
    if settings.get("use_rslora"):
        raise _refuse("vLLM scales experts by alpha / r, and rslora by alpha / sqrt(r)")


# The proof ---------------------------------------------------------------------------------------


def peft_deltas(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], experts: int, family: str
) -> Deltas:
    """What a result in peft's layout adds to each expert."""
    found: Deltas = {}
    for factors in read_peft(tensors, settings, experts):
        for expert in range(experts):
            delta = _dense(factors.a[expert], factors.b[expert] * factors.scaling)
            for matrix, part in _halves(family, factors.weight, len(delta)):
                found[factors.layer, expert, matrix] = delta[part]
    return found


def vllm_deltas(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], experts: int, family: str
) -> Deltas:
    """What an adapter in vLLM's layout adds to each expert, read as vLLM reads it: one scaling for
    all, experts by the numbers in their names, or as peft stacks them."""
    scaling = settings["lora_alpha"] / settings["r"]
    if family in STACKED:
        plain = {"r": settings["r"], "lora_alpha": settings["lora_alpha"]}
        found: Deltas = {}
        for name in (each for each in tensors if each.endswith(_A) and ".experts" in each):
            module = name.removesuffix(_A)
            layer = module.removesuffix(".base_layer").removeprefix(_PREFIX)
            weight = "gate_up_proj" if module.endswith(".base_layer") else "down_proj"
            rank = len(tensors[name]) // experts
            pattern = {"rank_pattern": {f"experts.{weight}": rank}}
            pair = {key: tensors[key] for key in (module + _A, module + _B)}
            (factors,) = read_peft(pair, plain | pattern, experts)
            for expert in range(experts):
                delta = _dense(factors.a[expert], factors.b[expert] * scaling)
                for matrix, part in _halves(family, weight, len(delta)):
                    found[layer, expert, matrix] = delta[part]
        return found
    before, after = _RENAMED.get(family, ("", ""))
    matrices = dict(zip(_MODULES[family], _MATRICES, strict=True))
    found = {}
    for name in (each for each in tensors if each.endswith(_A) and ".experts." in each):
        module = name.removesuffix(_A)
        path, number, leaf = module.removeprefix(_PREFIX).rsplit(".", 2)
        delta = _dense(tensors[name], tensors[module + _B] * scaling)
        found[path.replace(after, before), int(number), matrices[leaf]] = delta
    return found


def require_same_deltas(trained: Deltas, written: Deltas) -> int:
    """Compares two readings of an adapter to the bit; returns how many matrices there are."""
    if trained.keys() != written.keys():
        layer, expert, matrix = min(trained.keys() ^ written.keys())
        raise _refuse(f"read back, {layer} has another set of matrices: expert {expert}'s {matrix}")
    for (layer, expert, matrix), delta in trained.items():
        if not torch.equal(delta, written[layer, expert, matrix]):
            raise _refuse(
                f"read back, expert {expert} of {layer} would get another {matrix} matrix than was "
                "trained"
            )
    return len(trained)


def _dense(a: Tensor, b: Tensor) -> Tensor:
    """B A, added up rank by rank: in one order, whatever the shapes."""
    total = torch.zeros(len(b), a.shape[1])
    for row, column in zip(a.float(), b.float().T, strict=True):
        total += column[:, None] * row
    return total


def _halves(family: str, weight: str, outputs: int) -> list[tuple[str, slice]]:
    """Where gate and up lie in the outputs of a stacked weight: gpt-oss takes turns."""
    if weight == "down_proj":
        return [("down", slice(None))]
    if family in STACKED:
        return [("gate", slice(0, None, 2)), ("up", slice(1, None, 2))]
    return [("gate", slice(0, outputs // 2)), ("up", slice(outputs // 2, None))]


def _parts(family: str, weight: str, outputs: int) -> list[tuple[str, slice]]:
    names = dict(zip(_MATRICES, _MODULES[family], strict=True))
    return [(names[matrix], part) for matrix, part in _halves(family, weight, outputs)]


def _vllm_layer(family: str, layer: str) -> str:
    before, after = _RENAMED.get(family, ("", ""))
    return layer.replace(before, after) if before else layer


def _scaling(settings: Mapping[str, Any], rank: int) -> float:
    alpha = float(settings["lora_alpha"])
    return alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank


def _exactly(b: Tensor, factor: float, factors: ExpertFactors) -> Tensor:
    """B times a power of two, which no number is rounded by; refuses others."""
    if math.frexp(factor)[0] != 0.5:
        rank = factors.a.shape[1]
        raise _refuse(
            f"experts have rank {rank}; vLLM knows one rank for all, and a factor of {factor:.4g} "
            "between them would round what was trained. Ranks have to differ by a power of two"
        )
    return b * factor


def _refuse(fact: str) -> RunError:
    fix = "export the merged model: --to hf, then `vllm serve DIR`"
    return RunError(Problem("--to vllm", fact, fix))
