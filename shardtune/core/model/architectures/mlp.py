"""MLPs, alone or many in a mixture of experts."""

from __future__ import annotations

from shardtune.core.model.architectures.tensors import Tensors, linear, matrix
from shardtune.core.model.architectures.traits import Traits
from shardtune.core.model.shape import Experts


def mlp(name: str, traits: Traits, hidden: int, ffn: int, *, bias: bool = False) -> Tensors:
    *first, last = traits.mlp
    found: Tensors = []
    if traits.fused or traits.fused_mlp:
        found += linear(f"{name}.gate_up_proj", 2 * ffn, hidden, bias=bias)
    else:
        for matrix_name in first:
            found += linear(f"{name}.{matrix_name}", ffn, hidden, bias=bias)
    return found + linear(f"{name}.{last}", hidden, ffn, bias=bias)


def routed(router: str, hidden: int, experts: Experts, names: tuple[str, ...] = ()) -> Tensors:
    """Router and experts; transformers holds all experts of a layer in two tensors."""
    count, ffn = experts.count, experts.ffn
    beside = router.rpartition(".")[0]
    up, down = f"{beside}.experts.gate_up_proj", f"{beside}.experts.down_proj"
    return [
        *matrix(f"{router}.weight", count, hidden),
        *matrix(up, count, 2 * ffn, hidden, routed=True, stands_for=names[:2]),
        *matrix(down, count, hidden, ffn, routed=True, stands_for=names[2:]),
    ]
