"""Builds a model, part by part where it is to be divided: a rank never holds more than one part and
what it keeps.

The skeleton costs nothing: its parameters are on the meta device. A part (a decoder layer, and at
last the rest) is read from the safetensors files, cast, quantized where asked, given its adapters'
first values, and handed to whoever divides it, before the next one is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.compat.c_allocator import give_back_memory
from shardtune.config.job import Adapter, LoRA, ModelSection, NoAdapter
from shardtune.core.model.known_models import MODEL_NAME
from shardtune.core.model.peft_wrapper import unwrap_name
from shardtune.core.setup import Precision
from shardtune.errors import ModelError, Problem
from shardtune.models.added_tokens import ends, grown
from shardtune.models.document_isolation import isolate_documents
from shardtune.models.experts.grouped_experts import (
    expert_matrices,
    multiply_odd_experts_apart,
)
from shardtune.models.fp32_routing import route_in_fp32
from shardtune.models.fused.apply import LayerSetup, apply_fused_layers, pack_weights
from shardtune.models.fused_weights import FusedWeight, own_names
from shardtune.models.load import COMPUTE_DTYPES, load_base
from shardtune.models.model_files import ModelFiles, auto_class
from shardtune.models.packed_attention import use_varlen_attention
from shardtune.models.peft_adapters import (
    autocast_answers,
    initialize_adapters,
    insert_adapters,
    reset_dora_magnitudes,
    share_factors,
)
from shardtune.models.quantization.bitsandbytes_linear import QuantizedLinear
from shardtune.models.quantization.calibration import (
    CalibrationPass,
    CalibrationSamples,
    calibration_groups,
    weight_holders,
)
from shardtune.models.quantization.fp8_linear import FP8Linear
from shardtune.models.quantization.quantized_experts import QuantizedExperts
from shardtune.models.quantization.swap import quantizable, swap
from shardtune.models.required_weights import (
    LEFTOVER_BUFFERS,
    OTHER_WEIGHTS,
    require_finite,
    shared_names,
    some_names,
)
from shardtune.models.rope_by_document import rotate_by_document
from shardtune.models.weight_files import NoFiles, WeightFiles
from shardtune.parallel import strategies_that

DividePart = Callable[[nn.Module], None]
LeftOut = Callable[[nn.Module], Collection[nn.Module]]


def build_model(
    files: ModelFiles,
    adapter: Adapter | None,
    *,
    precision: Precision,
    seed: int,
    speed: LayerSetup,
    device: str,
    divide: DividePart | None = None,
    left_out: LeftOut | None = None,
    calibration_samples: Callable[[], CalibrationSamples] = list,
) -> nn.Module:
    """The adapted model. Frozen weights are held in `precision`, trained ones in fp32.

    Where nothing divides it, it comes whole. Without an adapter (not even the one that trains all
    weights) the model is frozen. What `left_out` names, of the adapted skeleton, stays without
    memory. 8-bit weights are rounded by `calibration_samples`, if there are any.
    """
    compute, quantized = COMPUTE_DTYPES[precision], files.section.quantization != "none"
    if divide is None and not quantized:
        # transformers loads models, too, whose weights are computed from several tensors.
        held = "fp32" if isinstance(adapter, NoAdapter) else precision
        model, names = load_base(files, held).to(device), TensorNames.none()
        require_finite(files.section.name, model.named_parameters())
    else:
        # Weights to be divided or quantized are never whole in 16 bits.
        model = skeleton(files, compute)
        names = TensorNames.of(model, files.weights, files.section)
    use_varlen_attention(model, device, compute)
    route_in_fp32(model)
    isolate_documents(model)
    rotate_by_document(model)
    in_layers = divide is not None or quantized or speed.changes_layers
    layers = decoder_layers(model) if in_layers else []
    frame = Frame.of(model, layers, names, files.section, adapter, compute=compute, speed=speed)
    built = frame.fill(device, divide, seed=seed, left_out=left_out)
    if files.section.quantization == "fp8" and (found := calibration_samples()):
        frame.calibrate(device, found)
    if divide is None and not quantized:
        pack_weights(frame.layers)
    return built


@dataclass(frozen=True)
class Frame:
    """An adapted model without memory, and where its weights will come from. It is filled once."""

    model: nn.Module
    layers: tuple[nn.Module, ...]
    """Those that are handled one by one; none where the whole model is one part."""
    names: TensorNames
    adapter: Adapter
    compute: torch.dtype

    @classmethod
    def of(
        cls,
        model: Any,
        layers: Sequence[nn.Module],
        names: TensorNames,
        section: ModelSection,
        adapter: Adapter | None,
        *,
        compute: torch.dtype,
        speed: LayerSetup,
    ) -> Frame:
        """Puts adapters and quantized layers into a skeleton."""
        if adapter is None:
            model.requires_grad_(False)
            adapter = NoAdapter()
        elif isinstance(adapter, NoAdapter):
            # So does transformers with what it loads, also where its code freezes a weight (biases
            # by which a router chooses). Every strategy has to train, save and write the same.
            for weight in model.parameters():
                weight.requires_grad_(weight.is_floating_point())
        kind = section.quantization
        saved = adapter.modules_to_save if isinstance(adapter, LoRA) else ()
        linears = quantizable(layers, saved, kind) if kind != "none" else set()
        adapted = insert_adapters(model, adapter)
        autocast_answers(adapted, adapter, compute)
        if kind != "none":
            # After the adapters: some look at the weights' shape, which 4-bit ones don't have.
            swap(adapted, linears, kind, compute)
        share_factors(adapted, adapter, compute)
        apply_fused_layers(model, layers, adapter, speed)
        return cls(adapted, tuple(layers), names, adapter, compute)

    def fill(
        self, device: str, divide: DividePart | None, *, seed: int, left_out: LeftOut | None = None
    ) -> nn.Module:
        """Gives each part its weights on `device`, and hands it to `divide`; what is `left_out`
        stays without memory."""
        prefixes = {module: name for name, module in self.model.named_modules()}
        missing = left_out(self.model) if left_out else ()
        absent = frozenset(inside for module in missing for inside in module.modules())
        for part in (*self.layers, self.model):
            if part in absent:
                continue
            prefix = prefixes[part]
            _fill(part, prefix, self.names, self.compute, device, absent, self.model)
            initialize_adapters(part, prefix, self.adapter, seed=seed, device=device, absent=absent)
            if divide is not None:
                divide(part)
            give_back_memory()
        return self.model

    def calibrate(self, device: str, calibration_samples: CalibrationSamples) -> None:
        """Lets 8-bit layers hear what their inputs are, and round their weights by it. Nobody has
        kept the exact ones, so they are read once more."""
        names = {module: name for name, module in self.model.named_modules()}
        passage = CalibrationPass(
            self.model, self.layers, calibration_samples, device, self.compute
        )
        for group in calibration_groups(self.layers):
            passage.collect(group)
            for layer in group:
                inside = [module for module in layer.modules() if isinstance(module, FP8Linear)]
                for holder in weight_holders(layer):
                    holder.finish_calibration()
                    takers: dict[str, list[FP8Linear]] = {}
                    for module in (each for each in inside if each.holder is holder):
                        tensor = self.names.tensor_of.get(unwrap_name(f"{names[module]}.weight"))
                        if tensor is not None:  # a joint layer has none of its own
                            takers.setdefault(tensor, []).append(module)
                    for tensor, weight in self.names.files.read(takers):
                        for module in takers[tensor]:
                            module.requantize(weight.to(device=device, dtype=self.compute))
                    holder.copy_outlier_columns()
                reset_dora_magnitudes(layer, self.adapter, device)
        torch.cuda.empty_cache()  # squares of wide layers; without a GPU this does nothing


def skeleton(files: ModelFiles, dtype: torch.dtype) -> Any:
    """The model in eval mode, its parameters without memory, its buffers real."""
    model = without_memory(files.config, files.section, dtype)
    generation = files.generation_config
    if generation is not None:
        model.generation_config = generation
    return model


def without_memory(config: Any, section: ModelSection, dtype: torch.dtype) -> Any:
    """The model that `config` describes, as `skeleton` makes it."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = auto_class(config).from_config(
            config,
            dtype=dtype,
            attn_implementation=section.attn_implementation,
            trust_remote_code=section.trust_remote_code,
        )
    model.tie_weights()  # the context above made two parameters of a shared one
    multiply_odd_experts_apart(model)
    return model.eval()


def decoder_layers(model: Any) -> list[nn.Module]:
    """The repeated layers, in order: the modules which transformers says must not be cut."""
    kinds = frozenset(model._no_split_modules or ())
    inside: set[nn.Module] = set()
    layers = []
    for module in model.modules():  # parents come before their children
        if type(module).__name__ in kinds and module not in inside:
            layers.append(module)
            inside.update(module.modules())
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}
    layers = [layer for layer in layers if layer not in ends]
    if not layers:
        fact = f"{type(model).__name__} doesn't say which of its layers repeat"
        raise ModelError(Problem(MODEL_NAME, fact, _use_whole_models()))
    return layers


def _use_whole_models() -> str:
    able = strategies_that(lambda each: each.holds_whole_model)
    names = " or ".join(each.written() for each in able)
    return f"use a strategy that holds the whole model on each rank: {names}"


@dataclass(frozen=True)
class TensorNames:
    """Which tensor of the files fills which weight of the model, by the weight's own name."""

    files: WeightFiles | NoFiles
    tensor_of: dict[str, str]
    growing: frozenset[str]
    """The tensors of embedding and output head where they may have fewer rows than the model."""
    fused: Mapping[str, FusedWeight] = field(default_factory=dict)
    """The weights that are computed from several tensors, by their own names."""
    model: str | None = None
    """The model as the job names it; None where there are no files."""

    @classmethod
    def none(cls) -> TensorNames:
        """Of a model that has its weights already."""
        return cls(NoFiles({}), {}, frozenset())

    @classmethod
    def unwritten(cls, model: nn.Module) -> TensorNames:
        """Weights of the right shapes that no file holds."""
        groups = shared_names(model)
        shapes = {group[0]: tuple(model.get_parameter(group[0]).shape) for group in groups}
        tensor_of = {name: group[0] for group in groups for name in group}
        return cls(NoFiles(shapes), tensor_of, frozenset())

    @classmethod
    def of(cls, model: Any, files: WeightFiles, section: ModelSection) -> TensorNames:
        """Raises ModelError naming every weight without a tensor and every tensor without one."""
        written, fused, split = own_names(model, files.file_of)
        tensor_of: dict[str, str] = {}
        missing = []
        for group in shared_names(model):
            present = next((name for name in group if name in written), None)
            if present is not None:
                tensor_of |= dict.fromkeys(group, written[present])
            elif group[0] not in fused:
                missing.append(group[0])
        tensor_of |= {name: written[name] for name in model.state_dict() if name in written}
        ignorable = (*(model._keys_to_ignore_on_load_unexpected or ()), LEFTOVER_BUFFERS)
        unexpected = [
            name
            for name in sorted(written.keys() - tensor_of.keys())
            if not any(re.search(pattern, name) for pattern in ignorable)
        ]
        whole = _use_whole_models()
        facts = (
            ("are cut out of larger tensors, which takes a whole model", split, whole),
            ("are missing", missing if not split else [], OTHER_WEIGHTS),
            ("have no place in the model", unexpected, OTHER_WEIGHTS),
        )
        problems = [
            Problem(
                MODEL_NAME,
                f"{len(names)} weights of {section.name!r} {what}: {some_names(names)}",
                fix,
            )
            for what, names, fix in facts
            if names
        ]
        if problems:
            raise ModelError(problems)
        growing: set[str] = set()
        if section.add_tokens:
            inside = {parameter for end in ends(model) for parameter in end.parameters()}
            growing = {tensor_of[name] for name, p in model.named_parameters() if p in inside}
        return cls(files, tensor_of, frozenset(growing), fused, section.name)


def _fill(
    part: nn.Module,
    prefix: str,
    names: TensorNames,
    compute: torch.dtype,
    device: str,
    absent: Collection[nn.Module],
    model: Any,
) -> None:
    """Reads what `part` still lacks of the model's own weights; the adapters' are left alone."""
    wanted: dict[str, list[tuple[nn.Module, str]]] = {}
    fused: list[tuple[FusedWeight, nn.Module, str]] = []
    for module_name, module in part.named_modules(prefix=prefix):
        if module in absent or ".modules_to_save." in f"{module_name}.":
            continue  # the latter is filled as a copy of the original
        for leaf, tensor in (*module.named_parameters(recurse=False), *_buffers(module)):
            own_name = unwrap_name(f"{module_name}.{leaf}")
            tensor_name = names.tensor_of.get(own_name)
            if tensor_name is not None and (tensor.is_meta or leaf in module._buffers):
                wanted.setdefault(tensor_name, []).append((module, leaf))
            elif own_name in names.fused and tensor.is_meta:
                fused.append((names.fused[own_name], module, leaf))
        for leaf, buffer in _buffers(module):
            module._buffers[leaf] = buffer.to(device)
    for tensor_name, value in names.files.read(wanted):
        places = wanted[tensor_name]
        grows = tensor_name in names.growing
        _check_shape(tensor_name, value, places, grows=grows)
        _place(tensor_name, value, places, compute, device, names.model)
    for weight, module, leaf in fused:
        dtype = torch.float32 if getattr(module, leaf).requires_grad else compute
        read = names.files.read(weight.sources)
        tensors = {name: tensor.to(dtype=dtype, copy=True) for name, tensor in read}
        value = weight.compute(tensors, model.config)
        _check_shape(weight.name, value, [(module, leaf)], grows=False)
        _place(weight.name, value, [(module, leaf)], compute, device, names.model)


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return list(module.named_buffers(recurse=False))


def _place(
    name: str,
    value: Tensor,
    places: list[tuple[nn.Module, str]],
    compute: torch.dtype,
    device: str,
    model: str | None,
) -> None:
    """Puts one tensor of the files where it belongs; weights that are shared stay shared. `model`
    is whose it is, None where it has no values yet."""
    made: dict[Tensor, nn.Parameter] = {}
    for module, leaf in places:
        old = getattr(module, leaf)
        if leaf in module._buffers:
            module._buffers[leaf] = value.to(device=device, dtype=old.dtype, copy=True)
            continue
        if old not in made:
            dtype = torch.float32 if old.requires_grad else compute
            if value.shape != old.shape:  # `_check_shape` lets only rows for new tokens be missing
                value = grown(value.to(dtype), old.shape[0])
            copy = value.to(device=device, dtype=dtype, copy=True)
            if model is not None:
                require_finite(model, [(name, copy)])
            if isinstance(module, QuantizedLinear) and leaf == "weight":
                module.quantize(copy)
                continue
            if isinstance(module, QuantizedExperts) and leaf in expert_matrices(module):
                module.quantize(leaf, copy)
                continue
            made[old] = nn.Parameter(copy, requires_grad=old.requires_grad)
        setattr(module, leaf, made[old])


def _check_shape(
    name: str, value: Tensor, places: list[tuple[nn.Module, str]], *, grows: bool
) -> None:
    for module, leaf in places:
        expected = tuple(getattr(module, leaf).shape)
        fits = grows and value.shape[1:] == expected[1:] and value.shape[0] <= expected[0]
        if tuple(value.shape) != expected and not fits:
            fact = f"{name} has the shape {tuple(value.shape)} on disk, {expected} in the model"
            raise ModelError(Problem(MODEL_NAME, fact, OTHER_WEIGHTS))
