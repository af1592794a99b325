"""Builds the model of a job: the engine decides whether it comes whole or in parts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardtune.config.job import Adapter, ModelSection, TrainSection
from shardtune.models.fused.apply import LayerSetup, pack_weights
from shardtune.models.load import COMPUTE_DTYPES
from shardtune.models.materialize import (
    DividePart,
    Frame,
    LeftOut,
    TensorNames,
    build_model,
    decoder_layers,
    without_memory,
)
from shardtune.models.model_files import ModelFiles
from shardtune.models.packed_attention import use_varlen_attention
from shardtune.models.quantization.calibration import CalibrationSamples


@dataclass(frozen=True)
class PretrainedModelBuilder:
    """Builds the model of a job, adapters included; both ways give the same weights, bit for bit.

    Frozen weights are held in the precision of the computation; weights that are trained are held
    in fp32, because an update is often too small to change a 16-bit number.
    """

    files: ModelFiles
    adapter: Adapter
    train: TrainSection
    calibration_samples: Callable[[], CalibrationSamples] = list
    """Some of those that are trained: 8-bit weights are rounded by them."""

    def whole(self, device: str) -> nn.Module:
        """The whole model on `device`."""
        return self._build(device)

    def in_parts(
        self,
        device: str,
        divide: Callable[[nn.Module], None],
        left_out: Callable[[nn.Module], Collection[nn.Module]] | None = None,
    ) -> nn.Module:
        """The model part by part: each decoder layer, then the root, is filled and divided."""
        return self._build(device, divide, left_out)

    def _build(
        self, device: str, divide: DividePart | None = None, left_out: LeftOut | None = None
    ) -> nn.Module:
        return build_model(
            self.files,
            self.adapter,
            precision=self.train.compute_precision,
            seed=self.train.seed,
            speed=LayerSetup.of(self.train),
            device=device,
            divide=divide,
            left_out=left_out,
            calibration_samples=self.calibration_samples,
        )


@dataclass(frozen=True)
class MetaModelBuilder:
    """The same sizes in the same places, but nothing in the weights: for a dry run.

    Made before fake tensors are switched on, used once while they are.
    """

    frame: Frame

    @classmethod
    def of(
        cls,
        config: Any,
        section: ModelSection,
        adapter: Adapter,
        train: TrainSection,
        device: str = "cpu",
    ) -> MetaModelBuilder:
        """The model that transformers builds from `config`, for `device`; no file is opened."""
        import peft  # noqa: F401 - it makes tensors when imported, which must not become fake

        compute = COMPUTE_DTYPES[train.compute_precision]
        model = without_memory(config, section, compute)
        use_varlen_attention(model, device, compute)
        names, layers = TensorNames.unwritten(model), decoder_layers(model)
        speed = LayerSetup.of(train)
        frame = Frame.of(model, layers, names, section, adapter, compute=compute, speed=speed)
        return cls(frame)

    def whole(self, device: str) -> nn.Module:
        """The whole model on `device`."""
        model = self.frame.fill(device, None, seed=0)
        pack_weights(self.frame.layers)
        return model

    def in_parts(
        self,
        device: str,
        divide: Callable[[nn.Module], None],
        left_out: Callable[[nn.Module], Collection[nn.Module]] | None = None,
    ) -> nn.Module:
        """The model part by part, each handed to `divide` as soon as it has its size."""
        return self.frame.fill(device, divide, seed=0, left_out=left_out)
