"""Weights, masters, moments and gradients where DeepSpeed keeps them, in each of its stages.

Everything that knows DeepSpeed's insides stands here. Reading and writing goes through its public
accessors where it has them; they are collective, so all ranks call the same methods in the same
order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.core.footprint import Held
from shardtune.core.layout import Home, Layout, State
from shardtune.engine.optim.adamw_8bit import is_8bit, packed, unpacked
from shardtune.engine.optim.build_optimizer import moment_tensors

Loaded = Mapping[nn.Parameter, Mapping[str, Tensor]]
"""For each trained weight its value and its moments, whole, by kind."""


class States:
    """What all stages have in common. `engine` is DeepSpeed's, `optimizer` is torch's inside it."""

    divided = True
    """Whether each rank has a flat range of the masters and moments, not all of them."""

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
        """The optimizer's whole tensors for a weight; none before the first step. Ask for them
        inside of `unpacked`."""
        if not self.kinds():
            return {}
        found = {key: self._moment(parameter, key).detach().clone() for key in self.keys}
        return found | self.count()

    def kinds(self) -> tuple[str, ...]:
        """The moments that there are; none before the first step."""
        return self.keys if self.optimizer.state else ()

    def flat_range(self, parameter: nn.Parameter, key: str | None) -> tuple[int, Tensor | None]:
        """This rank's shard of the flat master of a weight, or of a moment, and where it begins."""
        raise NotImplementedError

    def load(self, loaded: Loaded) -> None:
        """Puts back what `weight` and `moments` gave."""
        with self.unpacked(writing=True):
            self._load(loaded)

    @contextmanager
    def unpacked(self, *, writing: bool = False) -> Iterator[None]:
        """Moments of 8 bits are read and written in 32: DeepSpeed's accessors cut them at any
        place, and a byte means something only in its block."""
        if not is_8bit(self.optimizer):
            yield
            return
        state = self.optimizer.state
        kept = dict(state)
        for master, moments in kept.items():
            state[master] = unpacked(moments)
        self._link()
        yield
        for master, moments in state.items():
            state[master] = packed(moments, self.optimizer) if writing else kept[master]
        self._link()

    def _load(self, loaded: Loaded) -> None:
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
        home = self.layout.home.get("optim", "gpu")
        if home == "nvme":
            files = (f for f in self.swap["optim"].rglob("*.swp") if "gradient" not in f.name)
            found["optim", "nvme"] += sum(file.stat().st_size for file in files)
            home = "cpu"  # where small ones stay; of the others there is nothing in memory now
        found["optim", home] += stored(self.masters() + moment_tensors(self.optimizer))
        return Held(dict(found))

    def _count_weights(self, found: Counter[tuple[State, Home]]) -> None:
        found["params", "gpu"] += stored(self.engine.module.parameters())


def stored(tensors: Iterable[Tensor]) -> int:
    """The memory behind tensors; views of one buffer count once."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _moment_keys(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if optimizer.defaults["momentum"] else ()
    return ("exp_avg", "exp_avg_sq")
