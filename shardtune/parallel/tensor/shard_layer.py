"""Tensor parallelism: shards layers, so that each rank keeps its part of every matrix.

A weight becomes a DTensor on the tensor-parallel mesh, so that whoever saves, counts or shards it
further knows the whole of it. The computation itself is local: while a module runs, it sees what
its rank holds. What ranks tell each other is said in plain sight, by `Flow`, at four places of a
layer: before attention and MLP all tokens are gathered, behind them the results are added up.

What a layer keeps whole (norms, one side of each adapter) gets a gradient of this rank's tokens or
heads only. Those parts are summed once a step, by `reduce_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardtune.core.model.parallel_plan import DimShard, Family, vocabulary_shard
from shardtune.engine.shards import ShardRegions, shard_place
from shardtune.engine.unsharded import Unsharded
from shardtune.parallel.gradients import add_up
from shardtune.parallel.local_shards import (
    compute_locally,
    exchanged,
    in_order,
    see_local_weights,
    spread,
)
from shardtune.parallel.tensor.sequence_parallel import Flow
from shardtune.parallel.tensor.vocab_parallel import (
    VocabShard,
    gather_logits_in_eval,
    shard_embedding,
    vocab_parallel_loss_sum,
)

SpecOf = Callable[[str, Sequence[int]], DimShard | None]
APART = 2_654_435_761
"""Between the seeds of two ranks. Those of two stages are one apart, and a CPU's generator reads
32 bits of a seed: no rank may draw what another one draws in another stage."""


class TensorParallelModel(Unsharded):
    """One rank's tensor-parallel shards of a model; `mesh` has the ranks that hold the others."""

    whole_logits = False  # the vocabulary is divided

    def __init__(self, family: Family, mesh: DeviceMesh, words: int) -> None:
        self.family = family
        self.mesh = mesh
        self.flow = Flow(mesh.get_group(), mesh.get_local_rank(), mesh.size())
        self.vocab = VocabShard(self.flow, words)

    def shard_layer(self, layer: nn.Module, *, first: bool, last: bool = False) -> None:
        """Shards a layer in place.

        The `first` of a rank's layers is given whole hidden states; behind the `last` layer of a
        stage that isn't the last they are whole again. Between, each rank has its tokens.
        """
        family, flow = self.family, self.flow
        self._shard_module(layer, family.dim_shard_in_layer, {})
        for path, name in family.counts:
            for module in layer.get_submodule(path).modules():  # an adapter may be around it
                if hasattr(module, name):
                    setattr(module, name, getattr(module, name) // flow.size)
        rows = [name for name, style in family.styles.items() if style == "row"]
        _compute_layer_locally(layer, _biases_of(layer, rows), flow.size)
        _before(layer, lambda hidden: flow.scatter(hidden) if first else hidden)
        layer.register_forward_pre_hook(self._note_tokens, with_kwargs=True, prepend=True)
        if first:
            layer.register_forward_pre_hook(self._draw_apart)
        for block in (family.attention, family.mlp):
            _before(layer.get_submodule(block), flow.gather)
        for name in rows:
            _behind(layer.get_submodule(name), flow.reduce_scatter)
        if last:
            _behind(layer, flow.all_gather)

    def shard_ends(
        self,
        *,
        embedding: nn.Module | None = None,
        positions: nn.Module | None = None,
        norm: nn.Module | None = None,
        head: nn.Module | None = None,
    ) -> None:
        """Shards what a rank has of the rest; embedding and head may share a weight."""
        made: dict[nn.Parameter, nn.Parameter] = {}
        for end, spec_of in (
            (embedding, vocabulary_shard),
            (head, vocabulary_shard),
            (positions, _whole),
            (norm, _whole),
        ):
            if end is not None:
                self._shard_module(end, spec_of, made)
                compute_locally(end)
        if embedding is not None:
            for lookup in embedding.modules():  # there are two where a copy is trained
                if isinstance(lookup, nn.Embedding):
                    shard_embedding(lookup, self.vocab)
        if norm is not None:
            _behind(norm, self.flow.gather)
        if head is not None:
            gather_logits_in_eval(head, self.vocab)

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        return vocab_parallel_loss_sum(logits, targets, self.vocab)

    def reduce_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """An embedding of positions needs none: it works before the tokens are scattered."""
        positions = f".{self.family.positions}."
        partial = [
            gradient
            for name, gradient in gradients.items()
            if self.family.dim_shard(name, gradient.shape) is None and positions not in f".{name}"
        ]
        add_up(partial, self.flow.group)

    def unshuffled(self, name: str, whole: Tensor) -> Tensor:
        spec = self.family.dim_shard(name, whole.shape)
        return whole if spec is None else exchanged(whole, spec.dim, self.flow.size, spec.parts)

    def regions(self, name: str, weight: Tensor) -> ShardRegions:
        spec, place = self.family.dim_shard(name, weight.shape), shard_place(weight).region
        if spec is None or spec.parts == 1 or not place.size:
            return ShardRegions(0, [place])
        return ShardRegions(spec.dim, in_order(place, spec, self.flow.size, weight.shape[spec.dim]))

    def _shard_module(
        self, module: nn.Module, spec_of: SpecOf, made: dict[nn.Parameter, nn.Parameter]
    ) -> None:
        for prefix, owner in module.named_modules():
            for leaf, parameter in list(owner.named_parameters(recurse=False)):
                if parameter not in made:
                    name = f"{prefix}.{leaf}" if prefix else leaf
                    spec = spec_of(name, parameter.shape)
                    made[parameter] = spread(parameter, spec, self.mesh)
                setattr(owner, leaf, made[parameter])

    def _note_tokens(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        """Asked anew in every layer: the backward pass may run an earlier micro-batch again."""
        self.flow.tokens = kwargs["position_ids"].shape[-1]

    def _draw_apart(self, layer: nn.Module, args: Any) -> None:
        """From here on ranks have other tokens, heads and columns: dropout must not drop the same
        of each. Before, they drop alike what all of them have. Where the layer is computed again
        the generator is back at the seed that it had, and so draws the same again."""
        if layer.training:
            torch.manual_seed((torch.initial_seed() + self.flow.rank * APART) % 2**63)


def _whole(name: str, shape: Sequence[int]) -> None:
    return None


# Hooks --------------------------------------------------------------------------------------------


def _before(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Changes the hidden states on their way into a module; they are its first argument."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _behind(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    module.register_forward_hook(lambda module, args, output: change(output))


def _biases_of(layer: nn.Module, rows: Iterable[str]) -> set[tuple[nn.Module, str]]:
    """Biases that every rank adds to its part of a sum."""
    modules = (m for name in rows for m in layer.get_submodule(name).modules())
    return {(module, "bias") for module in modules if module._parameters.get("bias") is not None}


def _compute_layer_locally(layer: nn.Module, once: set[tuple[nn.Module, str]], ranks: int) -> None:
    """The same for each block of a layer. Activation checkpointing may compute a layer again by its
    `forward` alone (transformers from 5.23), which passes by the layer's own hooks."""
    see_local_weights(layer, [layer], once, ranks)
    for block in layer.children():
        compute_locally(block, once, ranks)
