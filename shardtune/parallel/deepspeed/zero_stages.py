"""Where each of DeepSpeed's stages keeps masters and moments, and how they are put back.

Stage 0 has them whole, stages 1 and 2 in flat ranges of groups, stage 3 in a shard of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardtune.core.layout import Home, Layout, State
from shardtune.parallel.deepspeed.states import States, stored


class Whole(States):
    """Stage 0: as without DeepSpeed, with fp32 copies of the weights where they have 16 bits."""

    divided = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._trained = [p for p in self.engine.module.parameters() if p.requires_grad]
        self._mixed = self.engine.fp16_enabled() or self.engine.bfloat16_enabled()
        self._master: dict[nn.Parameter, Tensor] = {p: p for p in self._trained}
        if self._mixed:
            groups = zip(
                self.engine.optimizer.fp16_groups, self.engine.optimizer.fp32_groups, strict=True
            )
            self._master = {
                p: m for lower, upper in groups for p, m in zip(lower, upper, strict=True)
            }

    def weight(self, parameter: nn.Parameter) -> Tensor:
        return self._master[parameter].detach().clone()

    def _moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        moment: Tensor = self.optimizer.state[self._master[parameter]][key]
        return moment

    @torch.no_grad()
    def _set_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        parameter.copy_(value)
        self._master[parameter].copy_(value)

    def _set_moment(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        self._moment(parameter, key).copy_(value)

    def _scale(self) -> float:
        return float(self._scaler().cur_scale) if self.engine.fp16_enabled() else 1.0

    def _scaler(self) -> Any:
        return self.engine.optimizer.loss_scale_config

    def scaled(self, loss: Tensor) -> Tensor:
        # Its wrapper for stage 0 divides by the scale, but nothing multiplies by it.
        return loss * self._scale()

    def norm_before(self) -> float | None:
        gradients = [gradient.float() for gradient in self.gradients()]  # fp16 would overflow
        norm = nn.utils.get_total_norm(gradients).item() / self._scale()
        if self.engine.fp16_enabled() and not torch.isfinite(torch.tensor(norm)):
            return None  # DeepSpeed has to see it, in order to lower the scale
        return norm

    def masters(self) -> list[Tensor]:
        return list(self._master.values()) if self._mixed else []

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self._trained if p.grad is not None]

    def _make_moments(self) -> None:
        for master in self._master.values():
            if not self.optimizer.state[master]:
                made = {key: torch.zeros_like(master) for key in self.keys}
                if "exp_avg" in made:
                    made["step"] = torch.zeros((), device=master.device)
                self.optimizer.state[master] = made


class Fragments(States):
    """Stages 1 and 2: each rank has a range of the flat fp32 weights, which may begin and end
    inside a tensor."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._linked = False

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        # DeepSpeed links weights to their moments when the first group has taken its first step,
        # and finds none of the groups that come after it. By now all of them have.
        if not self._linked:
            self._link()
        return super().moments(parameter)

    def flat_range(self, parameter: Any, key: str | None) -> tuple[int, Tensor | None]:
        if not self._linked:
            self._link()
        mapping = parameter._hp_mapping  # none where it lies outside of this rank's range
        if mapping is None:
            return 0, None
        found: Tensor = mapping.get_hp_fragment(optim_state_key=key)
        return mapping.lp_fragment_address.start, found.detach()

    def _link(self) -> None:
        zero = self.engine.optimizer
        if self.optimizer.state:
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()
            self._linked = True

    def masters(self) -> list[Tensor]:
        inner = self.engine.optimizer
        flat = getattr(inner, "single_partition_of_fp32_groups", None)
        # Stage 1 in bf16 with fp32 gradients is a class of its own in DeepSpeed.
        return list(flat if flat is not None else inner.fp32_groups_flat_partition)

    def gradients(self) -> list[Tensor]:
        inner = self.engine.optimizer
        found = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        found += [m.grad for m in self.masters() if m.grad is not None]
        for kept in ("averaged_gradients", "all_grad_tensors"):
            for group in getattr(inner, kept, {}).values():
                found += [group] if isinstance(group, Tensor) else list(group or ())
        for group in getattr(inner, "fp32_groups_gradients", []):
            found += list(group)
        found += list(getattr(inner, "accumulated_grads_in_cpu", {}).values())
        return found

    def _make_moments(self) -> None:
        super()._make_moments()
        self._link()

    def _set_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_fp32_param

        with torch.no_grad():
            parameter.copy_(value)
        safe_set_full_fp32_param(parameter, value.to(parameter.device))

    def _set_moment(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        safe_set_full_optimizer_state(parameter, value.to(parameter.device), key)


class Partitions(States):
    """Stage 3: each rank has its shard of every single weight."""

    def masters(self) -> list[Tensor]:
        return list(self.engine.optimizer.fp32_partitioned_groups_flat)

    def gradients(self) -> list[Tensor]:
        return [self.engine.optimizer.grad_partitions_flat_buffer]

    def flat_range(self, parameter: Any, key: str | None) -> tuple[int, Tensor | None]:
        share = parameter.partition_numel()
        begin = share * dist.get_rank()
        inner = self.engine.optimizer
        # Asked for in any case: what is swapped out is brought back group by group.
        padded, group = inner._get_fp32_opt_state_partition(
            parameter, release_swap_buffers=True, optim_state_key=key
        )
        size = min(share, parameter.ds_numel - begin)
        if size <= 0:  # nothing but padding
            return 0, None
        mine = padded.detach().view(-1)[:size]
        # The next one may be swapped into the same memory.
        return begin, mine.clone() if inner._swappable_optimizer_subgroup(group) else mine

    def _set_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if dist.get_rank() == 0:
                parameter.copy_(value)
        self._set(parameter, None, value)

    def _set_moment(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        self._set(parameter, key, value)

    def _set(self, parameter: Any, key: str | None, value: Tensor) -> None:
        # DeepSpeed's setters of whole tensors fail where a share is padded: give each rank its own.
        share = parameter.partition_numel()
        padded = value.new_zeros(share * dist.get_world_size())
        padded[: value.numel()] = value.flatten()
        mine = padded.narrow(0, share * dist.get_rank(), share)
        inner = self.engine.optimizer
        master, group = inner._get_fp32_opt_state_partition(
            parameter, release_swap_buffers=False, optim_state_key=key
        )
        master.data.copy_(mine)
        if inner._swappable_optimizer_subgroup(group):
            inner._optimizer_states_and_gradient_swap_out(group)

    def copies(self) -> list[Tensor]:
        weights = self.engine.module.parameters()
        return [w.ds_secondary_tensor for w in weights if w.ds_secondary_tensor is not None]

    def _count_weights(self, found: Counter[tuple[State, Home]]) -> None:
        weights = list(self.engine.module.parameters())
        home = self.layout.home.get("params", "gpu")
        shares = [w.ds_tensor for w in weights if w.ds_tensor.status.name == "AVAILABLE"]
        # Small ones may stay whole: on a single rank in the very memory of its shares.
        whole = [w.data for w in weights if w.ds_status.name == "AVAILABLE"]
        if home == "gpu":
            found["params", "gpu"] += stored([*shares, *whole])
        else:
            found["params", "cpu"] += stored(shares)
            found["params", "gpu"] += stored(whole)
        if home == "nvme":
            files = self.swap["params"].rglob("*.swp")
            found["params", "nvme"] += sum(file.stat().st_size for file in files)


def states_of(
    engine: Any,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    swap: Mapping[State, Path],
) -> States:
    """The states of the stage that the engine runs."""
    stage = int(engine.zero_optimization_stage())
    kinds: dict[int, type[States]] = {0: Whole, 1: Fragments, 2: Fragments, 3: Partitions}
    return kinds[stage](engine, optimizer, layout, swap)
