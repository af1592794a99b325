"""Weights, masters, moments and gradients where DeepSpeed keeps them, in each of its stages.

Everything that knows DeepSpeed's insides stands here. Reading and writing goes through its public
accessors where it has them; they are collective, so all ranks call the same methods in the same
order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardtune.core.footprint import Held
from shardtune.core.layout import Home, Layout, State

Loaded = Mapping[nn.Parameter, Mapping[str, Tensor]]
"""For each trained weight its value and its moments, whole, by kind."""


class States:
    """What all stages have in common. `engine` is DeepSpeed's, `optimizer` is torch's inside it."""

    divided = True
    """Whether each rank has a stretch of the masters and moments, not all of them."""

    def __init__(
        self,
        engine: Any,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        swap: Mapping[State, Path],
    ) -> None:
        self.engine = engine
        self.optimizer = optimizer
        self.layout = layout
        self.swap = swap
        self.keys = _moment_keys(optimizer)

    # Reading and writing ----------------------------------------------------------------------

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """The whole fp32 weight."""
        from deepspeed.utils import safe_get_full_fp32_param

        whole: Tensor = safe_get_full_fp32_param(parameter)
        return whole.detach().clone()

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The optimizer's whole tensors for a weight; none before the first step."""
        if not self.kinds():
            return {}
        found = {key: self._moment(parameter, key).detach().clone() for key in self.keys}
        return found | self.count()

    def kinds(self) -> tuple[str, ...]:
        """The moments that there are; none before the first step."""
        return self.keys if self.optimizer.state else ()

    def stretch(self, parameter: nn.Parameter, key: str | None) -> tuple[int, Tensor | None]:
        """This rank's part of the flat master of a weight, or of a moment, and where it begins."""
        raise NotImplementedError

    def load(self, loaded: Loaded) -> None:
        """Puts back what `weight` and `moments` gave."""
        if any(len(given) > 1 for given in loaded.values()):
            self._make_moments()
        for parameter, given in loaded.items():
            self._set_weight(parameter, given["weight"])
            for key in self.keys:
                if key in given:
                    self._set_moment(parameter, key, given[key])
            if "step" in given:
                for kept in self.optimizer.state.values():
                    kept["step"].fill_(given["step"].item())

    def _moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        whole: Tensor = safe_get_full_optimizer_state(parameter, key)
        return whole

    def count(self) -> dict[str, Tensor]:
        """The steps that the moments have seen, where the optimizer counts them."""
        kept = next(iter(self.optimizer.state.values()))
        return {"step": kept["step"].detach().cpu().clone()} if "step" in kept else {}

    def _make_moments(self) -> None:
        """Moments come into being in the first step; they can't be set before."""
        for master in self.masters():
            if not self.optimizer.state[master]:
                made = {key: torch.zeros_like(master) for key in self.keys}
                if "exp_avg" in made:
                    made["step"] = torch.zeros((), device=master.device)
                self.optimizer.state[master] = made

    def _link(self) -> None:
        """Lets the accessors see the moments that there are now."""

    def _set_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        raise NotImplementedError

    def _set_moment(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        raise NotImplementedError

    # The step ---------------------------------------------------------------------------------

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss as DeepSpeed's backward wants it."""
        return loss

    def norm_before(self) -> float | None:
        """The gradient's norm before the update, in the stage where DeepSpeed doesn't tell it."""
        return None

    def _scaler(self) -> Any:
        return self.engine.optimizer.loss_scaler

    def scale_state(self) -> dict[str, float]:
        """fp16's loss scale, and the good steps since it last changed."""
        if not self.engine.fp16_enabled():
            return {}
        scaler = self._scaler()
        return {
            "scale": float(scaler.cur_scale),
            "growth": float(scaler.cur_iter - scaler.last_overflow_iter),
        }

    def load_scale_state(self, numbers: Mapping[str, float]) -> None:
        if self.engine.fp16_enabled():
            scaler = self._scaler()
            scaler.cur_scale = numbers["scale"]
            scaler.last_overflow_iter = scaler.cur_iter - int(numbers["growth"])

    # Bytes ------------------------------------------------------------------------------------

    def masters(self) -> list[Tensor]:
        """The fp32 weights that the optimizer updates."""
        raise NotImplementedError

    def gradients(self) -> list[Tensor]:
        raise NotImplementedError

    def copies(self) -> list[Tensor]:
        """Second copies of weights that live as long as a step."""
        return []

    def passing(self) -> Held:
        """Bytes of what is gone between two steps; ask before the update."""
        home: Home = "cpu" if "optim" in self.layout.home else "gpu"
        gradients = sum(each.numel() * each.element_size() for each in self.gradients())
        found: dict[tuple[State, Home], int] = {("grads", home): gradients}
        if self.layout.home.get("optim") == "nvme":
            files = self.swap["optim"].rglob("*gradient*.swp")
            found["grads", "nvme"] = sum(file.stat().st_size for file in files)
        if copies := stored(self.copies()):
            found["params", "gpu"] = copies
        return Held(found)

    def lasting(self) -> Held:
        """Bytes of weights and optimizer states at this moment, gradients not counted."""
        found: Counter[tuple[State, Home]] = Counter()
        self._count_weights(found)
        if self.layout.home.get("optim") == "nvme":
            files = (f for f in self.swap["optim"].rglob("*.swp") if "gradient" not in f.name)
            found["optim", "nvme"] += sum(file.stat().st_size for file in files)
        else:
            moments = [
                value
                for kept in self.optimizer.state.values()
                for value in kept.values()
                if isinstance(value, Tensor) and value.ndim > 0
            ]
            home = self.layout.home.get("optim", "gpu")
            found["optim", home] += stored(self.masters() + moments)
        return Held(dict(found))

    def _count_weights(self, found: Counter[tuple[State, Home]]) -> None:
        found["params", "gpu"] += stored(self.engine.module.parameters())


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
    """Stages 1 and 2: each rank has a stretch of the flat fp32 weights, which may begin and end
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

    def stretch(self, parameter: Any, key: str | None) -> tuple[int, Tensor | None]:
        if not self._linked:
            self._link()
        mapping = parameter._hp_mapping  # none where it lies outside of this rank's stretch
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
    """Stage 3: each rank has its share of every single weight."""

    def masters(self) -> list[Tensor]:
        return list(self.engine.optimizer.fp32_partitioned_groups_flat)

    def gradients(self) -> list[Tensor]:
        return [self.engine.optimizer.grad_partitions_flat_buffer]

    def stretch(self, parameter: Any, key: str | None) -> tuple[int, Tensor | None]:
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
        found["params", "cpu" if home == "nvme" else home] += stored(shares)
        # Small ones may stay whole.
        found["params", "gpu"] += stored(w.data for w in weights if w.ds_status.name == "AVAILABLE")
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


def stored(tensors: Iterable[Tensor]) -> int:
    """The memory behind tensors; views of one buffer count once."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _moment_keys(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if optimizer.defaults["momentum"] else ()
    return ("exp_avg", "exp_avg_sq")
