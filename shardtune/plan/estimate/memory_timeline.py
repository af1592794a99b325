"""Memory timeline: what is allocated on a GPU in each phase of a step, by class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardtune.core.footprint import Held
from shardtune.core.layout import Layout, State
from shardtune.core.mesh import Mesh
from shardtune.core.model.quantized_size import gptq_bytes
from shardtune.core.model.shape import ModelShape
from shardtune.plan.estimate.activations import (
    again_bytes,
    boundary_bytes,
    kept_logit_bytes,
    layer_bytes,
    logit_bytes,
    passing_bytes,
    saved_bytes,
    stack_bytes,
    working_bytes,
)
from shardtune.plan.estimate.constants import MemoryConstants
from shardtune.plan.estimate.rank_share import RankShare, end_parameters, largest_part, states_of
from shardtune.plan.estimate.transient_buffers import (
    Casts,
    casts_of,
    gathered_bytes,
    in_shares,
    sending_bytes,
    updating_bytes,
)
from shardtune.plan.estimate.workload import Workload, whole_bytes

MemoryPhase = Literal["building", "forward", "backward", "optimizer", "evaluation", "save"]
MemoryClass = Literal["params", "gradients", "optimizer", "activations", "logits", "buffers"]
ClassBytes = dict[MemoryClass, float]


def memory_timeline(
    layout: Layout,
    shape: ModelShape,
    mesh: Mesh,
    work: Workload,
    cut: RankShare,
    held: Held,
    k: MemoryConstants,
) -> dict[MemoryPhase, ClassBytes]:
    """Of the rank that holds most; `held` is what it holds between steps."""
    step = _Step(layout, shape, mesh, work, cut, held, k)
    found: dict[MemoryPhase, ClassBytes] = {
        "forward": _largest(step.loss(), step.last_layer()),
        "backward": _largest(*step.turns()),
        "optimizer": step.optimizer(),
        "evaluation": step.evaluation(),
        "save": step.sizes(buffers=step.gathered),
    }
    if work.widths.loaded is not None:
        found["building"] = step.building(work.widths.loaded)
    if work.fp8:
        found["building"] = step.rounding()
    return found


FEW_TOKENS = 3072
"""Up to so many, `parallel/ddp/single_gpu.py` adds up an embedding's gradient in fp32."""


def on_gpu(held: Held, state: State) -> float:
    """Bytes of a state that live on the GPU."""
    return float(held.bytes.get((state, "gpu"), 0))


def _largest(*turns: ClassBytes) -> ClassBytes:
    return max(turns, key=lambda sizes: sum(sizes.values()))


@dataclass(frozen=True)
class _Step:
    """One step of one rank."""

    layout: Layout
    shape: ModelShape
    mesh: Mesh
    work: Workload
    cut: RankShare
    held: Held
    k: MemoryConstants

    def sizes(self, **classes: float) -> ClassBytes:
        base: ClassBytes = {
            "params": on_gpu(self.held, "params"),
            "gradients": 0.0,
            "optimizer": on_gpu(self.held, "optim"),
            "activations": 0.0,
            "logits": 0.0,
            "buffers": 0.0,
        }
        found: ClassBytes = base | classes  # type: ignore[assignment]
        found["buffers"] += self.lasting
        found["gradients"] = max(found["gradients"], self.before if self._lasts else 0.0)
        return found

    def building(self, loaded: float) -> ClassBytes:
        """Weights as they are read, and the halves of the largest beside them."""
        widths, largest = self.work.widths, self.shape.vocab * self.shape.hidden
        lower = 0.0 if self.work.host_mapped else 2.0
        return self.sizes(
            params=on_gpu(self.held, "params") * loaded / widths.trained + largest * widths.trained,
            optimizer=largest * lower,
        )

    def rounding(self) -> ClassBytes:
        """Weights in 8 bits, and what it takes to round them by data. Nothing is trained yet."""
        return self.sizes(optimizer=0.0, buffers=float(gptq_bytes(self.shape)))

    def loss(self) -> ClassBytes:
        """All activations are there, and the loss takes most."""
        # A plain loss has no gradient of the head yet when it is largest.
        first = self.head if self.work.loss == "pieces" or not self.work.counted else 0.0
        return self.sizes(
            gradients=max(self.before, first) if self.bucketed else self.before + first,
            activations=self.stack,
            logits=logit_bytes(self.shape, self.work, self.cut, self.k),
            buffers=self.at_loss + self.casts.forward,
        )

    def last_layer(self) -> ClassBytes:
        """The last layer is at work: where there are few logits, this may be more."""
        passing = passing_bytes(self.shape, self.work, self.cut)
        return self.sizes(
            gradients=self.before,
            activations=self.stack + passing,
            buffers=self.casts.forward + (self.gathered if passing else 0.0),
        )

    def turns(self) -> tuple[ClassBytes, ...]:
        """The backward pass as it begins, and as it ends."""
        if in_shares(self.layout, self.work):
            return self._turns_in_shares()
        compute, reduced = self.work.widths.compute, self.work.widths.reduced
        # The head's gradient is sent with the embedding's, at last, unless it is sent on its own.
        apart = self.sending and self.work.ends_apart
        on_its_way = self.head * reduced / compute if apart else 0.0
        start = self.sizes(
            gradients=max(self.before, self.head) if self.bucketed else self.before + self.head,
            activations=self.stack + self.at_work,
            logits=kept_logit_bytes(self.shape, self.work, self.cut),
            buffers=self.gathered
            + self.casts.backward
            + (self.sending if self.work.buckets else on_its_way),
        )
        # The last layer's turn: nothing is kept any more but what it works on.
        end = self.sizes(
            gradients=max(self.before, self.grads - self._still_to_come()),
            activations=self.layer + self.working,
            buffers=self.gathered + self.sending + self.casts.layer,
        )
        return (start, end, *self._embedding())

    def _embedding(self) -> Iterator[ClassBytes]:
        """The embedding comes last: its gradient is made, rounded, and added to the head's where
        both are one weight."""
        work, widths = self.work, self.work.widths
        whole = self.cut.pipeline == self.cut.tensor == 1
        if not work.counted or work.adapter is not None or not whole or self.bucketed:
            return
        numbers = self.shape.parameters_in("embedding")
        each = widths.gradients if work.autocast else widths.compute
        found = each * (3 if self.shape.tied else 1)
        if widths.loaded is not None and work.tokens <= FEW_TOKENS:
            found = max(found, 4 + each * (1 + self.shape.tied))  # added up in fp32
        yield self.sizes(
            gradients=max(self.before, self.grads - numbers * widths.gradients),
            buffers=numbers * found,
        )

    def _turns_in_shares(self) -> tuple[ClassBytes, ...]:
        """A layer's gradients are cast, sent and in shares before the next layer's come; those of
        the embedding and the head are whole until all others are done."""
        widths, adapter = self.work.widths, self.work.adapter
        each = widths.compute + widths.reduced
        part = states_of(whole_bytes(self.shape, self.work), self.shape, self.cut)
        trained = part.trained / widths.trained
        slices = self.cut.tensor
        ends = 0.0 if adapter is not None else self.ends / slices
        layer = largest_part(self.shape, self.cut)
        if adapter is not None:
            layer = trained / self.cut.layers(self.shape)
        table = self.ends / slices * widths.gathered
        tokens = self.work.tokens / self.cut.context
        head = 0.0
        if adapter is None and self.cut.ends:
            head = self.shape.vocab * self.shape.hidden * widths.compute / slices
        kept = self.stack - (self.layer if self.work.checkpointing == "none" else 0.0)
        first = {"gradients": self.before + head}
        late = max(self.before, self.grads * (1 - (ends + layer) / trained))
        last = max(self.before, self.grads * (1 - ends / trained))
        on_its_way = self.gathered + layer * widths.reduced  # while the next layer is at work
        answer = 0.0
        if self.work.loss == "plain" and self.cut.ends:
            answer = self.shape.vocab * self.work.scored / slices
        return (
            # Embedding and head come again, once as they are sent and once as they are used.
            self.sizes(
                gradients=self.before + (self.head if self.work.loss == "pieces" else 0.0),
                activations=self.stack + 3 * tokens * self.shape.hidden * widths.compute,
                logits=tokens * answer * widths.compute,
                buffers=2 * table,
            ),
            self.sizes(**first, activations=self.stack + self.at_work, buffers=self.gathered),
            self.sizes(**first, activations=kept, buffers=self.gathered + layer * each),
            self.sizes(**first, activations=kept + self.at_work, buffers=on_its_way),
            self.sizes(
                gradients=late + head, activations=self.layer + self.working, buffers=on_its_way
            ),
            self.sizes(gradients=last, buffers=ends * each),
        )

    def optimizer(self) -> ClassBytes:
        buffers = updating_bytes(
            self.layout, self.shape, self.mesh, on_gpu(self.held, "optim"), self.work
        )
        return self.sizes(gradients=self.grads, buffers=buffers)

    def evaluation(self) -> ClassBytes:
        logits = logit_bytes(self.shape, self.work, self.cut, self.k)
        boundary = boundary_bytes(self.shape, self.work, self.cut)
        return self.sizes(
            activations=self.working + boundary,
            logits=logits * 0.6,  # without the gradient
            buffers=self.gathered,
        )

    # What they are made of ---------------------------------------------------------------------

    @cached_property
    def stack(self) -> float:
        return stack_bytes(self.shape, self.work, self.cut)

    @cached_property
    def layer(self) -> float:
        return layer_bytes(self.shape, self.work, self.cut)

    @cached_property
    def working(self) -> float:
        return working_bytes(self.shape, self.work, self.cut)

    @property
    def at_work(self) -> float:
        """What the first layer of the backward pass has beyond what the forward pass left."""
        if self.work.checkpointing == "none":
            return self.working
        again = again_bytes(self.shape, self.work, self.cut)
        if self.work.counted:
            # What it has kept is in the stack; and layers that keep more come first, and are gone.
            again -= saved_bytes(self.shape, self.work, self.cut)
            again -= self.work.kept_layers * self.layer
        return self.working + max(0.0, again)

    @property
    def ends(self) -> int:
        return end_parameters(self.shape, self.cut)

    @property
    def grads(self) -> float:
        return 0.0 if self.work.in_backward else on_gpu(self.held, "grads")

    @property
    def before(self) -> float:
        """Gradients that are there from the start: summed up by the micro-batches before."""
        stays = self.work.microbatches > 1 or self.bucketed or self._lasts
        return self.grads if stays else 0.0

    @property
    def bucketed(self) -> bool:
        """Our engine for whole copies of the model: gradients live in DDP's buckets, for good."""
        whole = self.layout.divisor("grads", self.mesh) == self.cut.tensor == self.cut.expert == 1
        return self.work.autocast and whole and self.mesh.size > 1 and self.cut.pipeline == 1

    @cached_property
    def head(self) -> float:
        """The first gradient that there is, while all activations are still there."""
        if self.work.adapter is not None or not self.cut.ends:
            return 0.0
        # Autocast's backward pass ends in the width of the weight; our loss in pieces adds up in
        # fp32.
        widths = self.work.widths
        width = widths.gradients if self.work.autocast else widths.compute
        if self.work.loss == "pieces":
            width = 4
        return self.shape.vocab * self.shape.hidden * width / self.cut.tensor

    def _still_to_come(self) -> float:
        """Gradients that aren't there while the last layer is at work: its own, the embedding's."""
        if not self.work.counted or self.work.adapter is not None:
            return 0.0
        shape = self.shape
        missing = shape.largest_layer + (0 if shape.tied else shape.parameters_in("embedding"))
        return self.grads * missing / shape.parameters

    @cached_property
    def _whole(self) -> tuple[float, float]:
        return gathered_bytes(self.layout, self.shape, self.mesh, self.work, self.cut)

    @property
    def at_loss(self) -> float:
        return self._whole[0]

    @property
    def gathered(self) -> float:
        return self._whole[1]

    @cached_property
    def casts(self) -> Casts:
        return casts_of(self.shape, self.work, self.cut)

    @cached_property
    def sending(self) -> float:
        if self._lasts:
            return 0.0
        return sending_bytes(self.layout, self.shape, self.mesh, self.work, self.cut)

    @cached_property
    def lasting(self) -> float:
        """Buffers for sending that are there all the time."""
        if not self._lasts:
            return 0.0
        return sending_bytes(self.layout, self.shape, self.mesh, self.work, self.cut)

    @property
    def _lasts(self) -> bool:
        return self.work.buckets is not None and self.work.buckets.lasting
