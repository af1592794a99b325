"""Expert parallelism: each rank keeps some experts of every layer, and gets the tokens for them.

The module of experts stays transformers' own, with fewer experts in it; peft's wrappers around it
stay, too. Around both of them tokens are dispatched and results combined (`dispatch.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardtune.core.model.divisible_experts import has_divisible_experts
from shardtune.core.model.parallel_plan import DimShard
from shardtune.core.model_builder import ModelBuilder
from shardtune.engine.shards import ShardRegions, shard_place
from shardtune.engine.unsharded import Unsharded
from shardtune.parallel.expert.dispatch import through_experts
from shardtune.parallel.local_shards import compute_locally, exchanged, in_order, spread


@runtime_checkable
class PackedExperts(Protocol):
    """Experts that hold more of their weights than parameters: scales of packed ones."""

    num_experts: int

    def keep_experts(self, first: int, count: int) -> None:
        """Lets go of what belongs to other experts."""


class ExpertParallelModel(Unsharded):
    """One rank's experts of a model; `mesh` has the ranks that hold the others."""

    def __init__(self, skeleton: nn.Module, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.specs: Mapping[str, DimShard] = dict(_specs(skeleton))
        """How the experts' weights are divided, by their names in the whole model."""

    def is_routed(self, name: str) -> bool:
        """Whether a weight is that of experts, or of an adapter of theirs."""
        return name in self.specs

    def shard_layer(self, layer: nn.Module) -> None:
        """Leaves this rank its experts of a layer, in place; a layer may have none."""
        for outer in list(expert_modules(layer)):
            specs = dict(_weights(outer))
            for owner_name, owner in outer.named_modules():
                for leaf, parameter in list(owner.named_parameters(recurse=False)):
                    name = f"{owner_name}.{leaf}" if owner_name else leaf
                    setattr(owner, leaf, spread(parameter, specs[name], self.mesh))
            self._route(outer)
            if isinstance(experts := _inside(outer), PackedExperts):
                kept = experts.num_experts  # by now those of this rank
                experts.keep_experts(self.mesh.get_local_rank() * kept, kept)

    def _route(self, outer: Any) -> None:
        experts = _inside(outer)
        count, group = experts.num_experts, self.mesh.get_group()
        for module in outer.modules():
            if hasattr(module, "num_experts"):  # the wrappers know it, too
                module.num_experts = count // self.mesh.size()
        compute_locally(outer)
        local = outer.forward

        def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return through_experts(local, hidden, chosen, weights, count, group)

        outer.forward = forward

    def unshuffled(self, name: str, whole: Tensor) -> Tensor:
        spec = self.specs.get(name)
        if spec is None:
            return whole
        return exchanged(whole, spec.dim, self.mesh.size(), spec.parts)

    def regions(self, name: str, weight: Tensor) -> ShardRegions:
        spec, place = self.specs.get(name), shard_place(weight).region
        if spec is None or spec.parts == 1 or not place.size:
            return ShardRegions(0, [place])
        size = weight.shape[spec.dim]
        return ShardRegions(spec.dim, in_order(place, spec, self.mesh.size(), size))


def build_expert_parallel(
    builder: ModelBuilder,
    device: str,
    mesh: DeviceMesh,
    then: Callable[[nn.Module], None] = lambda part: None,
) -> tuple[nn.Module, ExpertParallelModel]:
    """The model with its experts divided over the ranks of `mesh`; each part goes on to `then`."""
    seen: list[ExpertParallelModel] = []

    def inspect(skeleton: nn.Module) -> tuple[nn.Module, ...]:
        seen.append(ExpertParallelModel(skeleton, mesh))
        return ()

    def divide(part: nn.Module) -> None:
        if not hasattr(part, "config") and not hasattr(part, "peft_config"):  # the root comes last
            seen[0].shard_layer(part)
        then(part)

    model = builder.in_parts(device, divide, inspect)
    return model, seen[0]


def expert_modules(part: nn.Module) -> Iterator[nn.Module]:
    """The experts of each layer, with whatever adapters are around them."""
    inside: set[nn.Module] = set()
    for module in part.modules():  # parents come before their children
        if module not in inside and has_divisible_experts(_inside(module)):
            inside.update(module.modules())
            yield module


def _inside(module: Any) -> Any:
    """The module that peft's wrappers are around."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def _specs(skeleton: nn.Module) -> Iterator[tuple[str, DimShard]]:
    prefixes = {module: name for name, module in skeleton.named_modules()}
    for outer in expert_modules(skeleton):
        for name, spec in _weights(outer):
            yield f"{prefixes[outer]}.{name}", spec


def _weights(outer: nn.Module) -> Iterator[tuple[str, DimShard]]:
    """The experts are a weight's first dimension. peft lays A out by expert and rank, B by rank and
    expert: of B a rank has its experts' columns of each rank."""
    count = _inside(outer).num_experts
    for name, parameter in outer.named_parameters():
        adapter = "lora_B" in name.split(".")
        yield name, DimShard(1, parameter.shape[1] // count) if adapter else DimShard(0)
