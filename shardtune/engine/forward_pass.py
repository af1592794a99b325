"""The forward pass of one micro-batch: from tokens to its summed loss, or to its score."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.core.model.document_boundaries import takes_boundaries
from shardtune.core.setup import EngineSetup
from shardtune.core.step import IGNORED, MicroBatch
from shardtune.engine.activation_offload import Offload
from shardtune.engine.host_to_device import Staged, Staging
from shardtune.engine.loss import forward, loss_sum, model_inputs, selects_logits
from shardtune.engine.router_losses import RouterLosses
from shardtune.engine.row_lengths import TakesRowLengths
from shardtune.engine.unsharded import Unsharded
from shardtune.kernels.linear_cross_entropy import fused_loss

COMPUTE = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class ForwardPass:
    """The model with its loss: autocast, activation offload and the fused output head."""

    def __init__(
        self,
        model: nn.Module,
        setup: EngineSetup,
        device: torch.device,
        sharded: Unsharded,
        *,
        fuse: bool,
        autocasts: bool = True,
    ) -> None:
        self.model = model
        self.module = model
        """What is called in training: the model, or a wrapper that synchronises its gradients."""
        self.sharded = sharded
        self._device = device
        self._dtype = COMPUTE[setup.precision]
        self._autocasts = autocasts
        self._selects = selects_logits(model)
        self._fused = fused_loss(model) if fuse else None
        self.activation_offload = Offload(model, device) if setup.offload_activations else None
        self.router_losses: RouterLosses | None = None
        if setup.router_aux_loss_coef or setup.router_z_loss_coef:
            self.router_losses = RouterLosses(
                model,
                balance=setup.router_aux_loss_coef,
                z=setup.router_z_loss_coef,
                device=device,
            )
        self._told_lengths = [m for m in model.modules() if isinstance(m, TakesRowLengths)]
        self.staging = Staging(device, told=takes_boundaries(model))

    def loss(self, batch: MicroBatch) -> Tensor:
        """The summed loss of a micro-batch, ready for the backward pass."""
        return self.loss_here(self.staging.receive(batch))

    def loss_here(self, here: Staged) -> Tensor:
        """The same of one that is on the device."""
        inputs, kept, targets = self._inputs(here)
        if self.router_losses is not None:
            self.router_losses.begin_batch(here.lengths, here.input_ids.shape[1])
        if self._fused is None:
            logits = forward(self.module, inputs, kept)
            return self.sharded.loss_sum(logits, targets.flatten())
        with self._fused.returning_loss(targets):
            return forward(self.module, inputs, kept)

    @torch.no_grad()
    def count_routed(self, batch: MicroBatch) -> None:
        """A forward pass that only counts which experts its tokens are sent to."""
        here = self.staging.receive(batch)
        assert self.router_losses is not None
        self.router_losses.begin_batch(here.lengths, here.input_ids.shape[1])
        self._tell_lengths(here)
        kept = torch.zeros(1, dtype=torch.long, device=self._device) if self._selects else None
        forward(self.model, model_inputs(self.model, here), kept)

    def score(self, batch: MicroBatch) -> Tensor:
        """The summed loss of a micro-batch, and how many of its targets the model would choose."""
        inputs, kept, targets = self._inputs(self.staging.receive(batch))
        if self._fused is not None:
            with self._fused.evaluating(targets):
                return forward(self.model, inputs, kept)
        logits, targets = forward(self.model, inputs, kept), targets.flatten()
        correct = ((logits.argmax(-1) == targets) & (targets != IGNORED)).sum()
        return torch.stack([loss_sum(logits, targets), correct])

    def _inputs(self, here: Staged) -> tuple[dict[str, Any], Tensor | None, Tensor]:
        """What the model is given, the positions at which the batch has labels, and those
        labels."""
        inputs = model_inputs(self.model, here)
        self._tell_lengths(here)
        if not self._selects:
            return inputs, None, here.targets
        return inputs, here.kept, here.targets[:, here.kept]

    def _tell_lengths(self, here: Staged) -> None:
        for module in self._told_lengths:
            module.row_lengths = here.lengths

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Mixed precision, unless the weights themselves are in the precision of compute."""
        if not self._autocasts:
            return contextlib.nullcontext()
        dtype = self._dtype
        return torch.autocast(self._device.type, dtype, enabled=dtype != torch.float32)

    def saving(self) -> contextlib.AbstractContextManager[object]:
        """Where the activations go that are saved for the backward pass."""
        return (
            contextlib.nullcontext()
            if self.activation_offload is None
            else self.activation_offload.saving()
        )
