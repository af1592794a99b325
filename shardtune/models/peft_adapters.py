"""Puts adapters into a model. They go in before anything is sharded.

`insert_adapters` makes the adapters' modules, without values; `initialize_adapters` gives values to
those of one part. What an adapter starts from depends on the job's seed and on its name
alone: a model that is built in parts starts as one that is built at once, on every rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from hashlib import sha256
from typing import Any

import torch
from torch import nn

from shardtune.compat.quiet import quiet_adapter_warnings
from shardtune.config.job import IA3, Adapter, LoRA, NoAdapter
from shardtune.core.model.active_experts import active_experts
from shardtune.core.model.adapter_size import require_plain_experts
from shardtune.core.model.architectures.ia3 import ia3_feedforward, ia3_targets
from shardtune.core.model.kind import kind_of
from shardtune.core.model.peft_wrapper import unwrap_model
from shardtune.engine.text_part import modules_beside_text
from shardtune.errors import ModelError, Problem, did_you_mean
from shardtune.kernels.autocast_forward import autocast_forward
from shardtune.models.added_tokens import ends
from shardtune.models.expert_layers import expert_weights
from shardtune.models.lora_targets import is_linear, lora_target_modules, never_adapted

ADAPTER_NAME = "default"
"""What peft calls an adapter that has no name of its own."""


def insert_adapters(model: nn.Module, adapter: Adapter) -> nn.Module:
    """The model with the adapters' modules in it; their weights are on the meta device."""
    if isinstance(adapter, NoAdapter):
        return model
    from peft import get_peft_model

    config = _lora(model, adapter) if isinstance(adapter, LoRA) else _ia3(model, adapter)
    with warnings.catch_warnings():
        quiet_adapter_warnings()
        adapted: nn.Module = get_peft_model(model, config, low_cpu_mem_usage=True)
    _tie_copies(adapted)
    if isinstance(adapter, LoRA) and adapter.variant == "pissa":
        # Told so at once, peft would decompose weights that may not be there yet. From here on
        # it stands in the saved configuration: whoever loads the adapter has to split as we do.
        config.init_lora_weights = "pissa"
    return adapted


def share_factors(adapted: nn.Module, adapter: Adapter, compute: torch.dtype) -> None:
    """Lets adapted experts be multiplied by groups, beside the factors of their adapters."""
    if isinstance(adapter, LoRA):
        from shardtune.models.experts.expert_lora import hand_over_factors  # peft: slow to import

        hand_over_factors(adapted, compute)


def autocast_answers(adapted: Any, adapter: Adapter, dtype: torch.dtype) -> None:
    """Lets a model with trained copies of whole modules answer: those are in fp32, what is around
    them in `dtype`."""
    if dtype != torch.float32 and isinstance(adapter, LoRA) and adapter.modules_to_save:
        autocast_forward(adapted.get_base_model(), dtype)


def describe_left_out(adapted: nn.Module, adapter: Adapter) -> str:
    """What of a model an adapter's default leaves out, in words; nothing where it means all."""
    if not isinstance(adapter, LoRA | IA3):
        return ""
    beside = [] if _is_named(adapter) else modules_beside_text(unwrap_model(adapted))
    said = [f"no adapters in {', '.join(beside)}, which text never goes through"] if beside else []
    if isinstance(adapter, LoRA) and adapter.adapts_experts and _has_frozen_experts(adapted):
        said.append("the experts stay frozen: LoRA can't adapt those of this family")
    return "; ".join(said)


def _has_frozen_experts(adapted: nn.Module) -> bool:
    """Whether there are experts and no weight of theirs is trained, as in families that keep them
    in a form of their own (DBRX)."""
    trained = [
        each.requires_grad for name, each in adapted.named_parameters() if ".experts." in name
    ]
    return bool(trained) and not any(trained)


def check_module_names(model: nn.Module, adapter: Adapter) -> None:
    """Refuses names of modules that the model doesn't have; it may be without weights. Whoever
    starts ranks asks for that, and does not wait for peft to be imported."""
    if isinstance(adapter, LoRA):
        _lora_targets(model, adapter)
    elif isinstance(adapter, IA3):
        _ia3_targets(model, adapter)


def check_experts(model: nn.Module, adapter: Adapter) -> None:
    """Refuses what LoRA can't do on experts, if it adapts any. The model gets adapters by it: it
    has to be one without weights that nobody needs any more."""
    if not isinstance(adapter, LoRA) or (adapter.variant, adapter.dropout) == ("plain", 0.0):
        return
    if not expert_weights(model):
        return
    from peft.tuners.lora.layer import ParamWrapper

    plain = adapter.model_copy(update={"variant": "plain", "dropout": 0.0})
    modules = insert_adapters(model, plain).modules()
    adapted = any(isinstance(module, ParamWrapper) for module in modules)
    require_plain_experts(adapted, adapter.dropout, adapter.variant)


def check_new_tokens_trained(model: Any, adapter: Adapter, tokens: int) -> None:
    """Refuses new tokens whose rows would stay as they start; the model may be without weights."""
    if not tokens or isinstance(adapter, NoAdapter):
        return
    saved = adapter.modules_to_save if isinstance(adapter, LoRA) else ()
    both = ends(model)
    names = [next(name for name, each in model.named_modules() if each is end) for end in both]
    frozen = [name for name in names if not any(_is_called(name, wanted) for wanted in saved)]
    if len({end.weight for end in both}) < len(names):  # tied: to train one is to train both
        frozen = frozen[:1] if len(frozen) == len(names) else []
    if frozen:
        short = [name.rsplit(".", 1)[-1] for name in frozen]
        fact = f"rows of new tokens ({tokens}) in {' and '.join(short)} would never be trained"
        fix = f"set adapter.modules_to_save: [{', '.join([*saved, *short])}]"
        if not isinstance(adapter, LoRA):
            fix = f"use adapter: {{type: lora, modules_to_save: [{', '.join(short)}]}}"
        raise ModelError(Problem("adapter.modules_to_save", fact, fix))


def _tie_copies(adapted: nn.Module) -> None:
    """Where an embedding is the output head too, so is the copy of it that is trained.

    peft sees to that itself, but not for modules on the meta device.
    """
    from peft.utils.other import ModulesToSaveWrapper

    first: dict[nn.Parameter, nn.Parameter] = {}
    for wrapper in adapted.modules():
        if isinstance(wrapper, ModulesToSaveWrapper) and hasattr(wrapper.original_module, "weight"):
            copy = wrapper.modules_to_save[ADAPTER_NAME]
            copy.weight = first.setdefault(wrapper.original_module.weight, copy.weight)


def initialize_adapters(
    part: nn.Module,
    prefix: str,
    adapter: Adapter,
    *,
    seed: int,
    device: str,
    absent: Collection[nn.Module] = (),
) -> None:
    """Gives the adapters in `part` their first values, on `device`, unless they have them already.

    The weights that they adapt have to be there already: some variants start from them, and a
    module that is trained whole starts as a copy. `prefix` is the part's name in the model;
    modules in `absent` stay as they are.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    copies: dict[nn.Parameter, nn.Parameter] = {}
    for name, layer in part.named_modules(prefix=prefix):
        if layer in absent:
            continue
        if isinstance(layer, ModulesToSaveWrapper):
            _copy(layer.original_module, layer.modules_to_save[ADAPTER_NAME], copies)
        elif isinstance(layer, BaseTunerLayer) and _materialize(layer):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_seed(seed, name))
                _first_values(layer, adapter, device)


def _copy(
    original: nn.Module, trained: nn.Module, copies: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Fills `trained` from `original`, in fp32; parameters that were one stay one."""
    for name, module in trained.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:  # peft has copied it already, in the model's precision
                parameter.data = parameter.data.float()
            else:
                source = original.get_submodule(name).get_parameter(leaf).detach()
                if parameter not in copies:
                    copies[parameter] = nn.Parameter(source.to(torch.float32, copy=True))
                setattr(module, leaf, copies[parameter])


def _materialize(layer: nn.Module) -> bool:
    """Memory on the CPU for the adapter's weights: the same numbers are drawn for every device.

    False if they have memory already. peft wraps experts once for each of their weights, one
    wrapper inside the other; each is a layer of its own, with its own name and values.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    wrapped = [each for each in layer.modules() if isinstance(each, BaseTunerLayer)][1:]
    others = {module for each in wrapped for module in each.modules()}
    found = False
    for module in (each for each in layer.modules() if each not in others):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.requires_grad and parameter.is_meta:
                empty = torch.empty_like(parameter, device="cpu", dtype=torch.float32)
                setattr(module, name, nn.Parameter(empty))
                found = True
    return found


def _first_values(layer: Any, adapter: Adapter, device: str) -> None:
    if isinstance(adapter, IA3):
        layer.reset_ia3_parameters(ADAPTER_NAME)
        _move(layer.ia3_l, device)
        return
    assert isinstance(adapter, LoRA)
    layer.reset_lora_parameters(ADAPTER_NAME, True)
    _move(layer.lora_A, device)
    _move(layer.lora_B, device)
    if adapter.variant == "pissa":
        layer.pissa_init(ADAPTER_NAME, "pissa")
    if adapter.variant == "dora":
        _magnitudes(layer, device)


def reset_dora_magnitudes(part: nn.Module, adapter: Adapter, device: str) -> None:
    """For adapters that start from the size of weights, which are others now."""
    from peft.tuners.lora import LoraLayer

    if isinstance(adapter, LoRA) and adapter.variant == "dora":
        for layer in part.modules():
            if isinstance(layer, LoraLayer):
                _magnitudes(layer, device)


def _magnitudes(layer: Any, device: str) -> None:
    layer.lora_variant[ADAPTER_NAME].init(layer, adapter_name=ADAPTER_NAME)
    _move(layer.lora_magnitude_vector, device)


def _move(adapter: nn.Module, device: str) -> None:
    """Brings trained weights to `device`, in fp32.

    Not by `Module.to`, which changes parameters in place: fake tensors can't do that.
    """
    for module in adapter.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            moved = parameter.detach().to(device=device, dtype=torch.float32)
            setattr(module, name, nn.Parameter(moved, requires_grad=parameter.requires_grad))


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1


# The configurations, as peft has them ----------------------------------------------------------


def _lora(model: Any, adapter: LoRA) -> Any:
    from peft import LoraConfig

    targets = _lora_targets(model, adapter)
    expert_rank = adapter.rank_of_experts(active_experts(model.config.to_dict()))
    adapted = expert_weights(model) if adapter.adapts_experts else []
    return LoraConfig(
        task_type=_task(model),
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=targets,
        exclude_modules=never_adapted(model, named=_is_named(adapter)),
        target_parameters=adapted or None,
        rank_pattern=dict.fromkeys(adapted, expert_rank),
        modules_to_save=_whole_names(model, adapter.modules_to_save) or None,
        # A head that is the embedding stays the embedding when that is trained.
        ensure_weight_tying=_saves_tied(model, adapter.modules_to_save),
        use_dora=adapter.variant == "dora",
        use_rslora=adapter.variant == "rslora",
        fan_in_fan_out=_transposed(model),
    )


def _whole_names(model: nn.Module, wanted: tuple[str, ...]) -> list[str]:
    """The modules to save as peft is told them. It takes whatever ends so (`input_layernorm` for
    `norm`, `shared_expert_gate` for `gate`): where that is more than is called so, whole names."""
    every = [name for name, _ in model.named_modules(remove_duplicate=False)]
    found: list[str] = []
    for each in wanted:
        called = [name for name in every if _is_called(name, each)]
        ambiguous = len(called) < sum(name.endswith(each) for name in every)
        found += called if ambiguous else [each]
    return found


def _lora_targets(model: Any, adapter: LoRA) -> str | list[str]:
    if adapter.targets != "all-linear":
        _check_names("adapter.targets", adapter.targets, model, is_linear, "linear layer")
    _check_names("adapter.modules_to_save", adapter.modules_to_save, model, _any, "module")
    return lora_target_modules(model, adapter.targets)


def _is_named(adapter: LoRA | IA3) -> bool:
    """Whether the job names the layers that are adapted."""
    return adapter.targets not in ("all-linear", "auto")


def _ia3_targets(model: Any, adapter: IA3) -> tuple[tuple[str, ...], tuple[str, ...]]:
    targets, feedforward = ia3_modules(model, adapter)
    _check_names("adapter.targets", targets, model, is_linear, "linear layer")
    return targets, feedforward


def _ia3(model: Any, adapter: IA3) -> Any:
    from peft import IA3Config

    targets, feedforward = _ia3_targets(model, adapter)
    return IA3Config(
        task_type=_task(model),
        target_modules=list(targets),
        feedforward_modules=list(feedforward),
        exclude_modules=never_adapted(model, named=_is_named(adapter)),
        fan_in_fan_out=_transposed(model),
    )


def _task(model: Any) -> Any:
    """What peft wraps the model as: it passes other arguments on to a decoder than to both."""
    from peft import TaskType

    both = kind_of(model.config) == "encoder_decoder"
    return TaskType.SEQ_2_SEQ_LM if both else TaskType.CAUSAL_LM


def ia3_modules(model: Any, adapter: IA3) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The linear layers that IA3 scales, and those of them whose input it scales."""
    family = model.config.get_text_config().model_type
    targets, feedforward = adapter.targets, adapter.feedforward
    if targets == "auto":
        targets = ia3_targets(family, _names_of(model, is_linear))
    if feedforward == "auto":
        feedforward = ia3_feedforward(family, targets)
    strangers = [name for name in feedforward if name not in targets]
    if strangers:
        fact = f"{', '.join(strangers)} not among the targets ({', '.join(targets)})"
        fix = "name them in adapter.targets too"
        raise ModelError(Problem("adapter.feedforward", fact, fix))
    return targets, feedforward


def _saves_tied(model: Any, names: tuple[str, ...]) -> bool:
    both = ends(model)
    if len(both) < 2 or both[0].weight is not both[1].weight:
        return False
    return any(
        module in both and _is_called(name, wanted)
        for name, module in model.named_modules()
        for wanted in names
    )


def _transposed(model: nn.Module) -> bool:
    """GPT-2 keeps its matrices the other way round; peft wants to be told."""
    return any(type(module).__name__ == "Conv1D" for module in model.modules())


def _any(module: nn.Module) -> bool:
    return True


def _names_of(model: nn.Module, kind: Callable[[nn.Module], bool]) -> set[str]:
    return {
        name.rsplit(".", 1)[-1] for name, module in model.named_modules() if name and kind(module)
    }


def _is_called(name: str, wanted: str) -> bool:
    """peft's rule for targets: a module's whole name or its last parts."""
    return name == wanted or name.endswith(f".{wanted}")


def _check_names(
    key: str,
    wanted: tuple[str, ...],
    model: nn.Module,
    kind: Callable[[nn.Module], bool],
    what: str,
) -> None:
    full = [name for name, module in model.named_modules() if kind(module)]
    known = _names_of(model, kind)
    problems = []
    for index, target in enumerate(wanted):
        if not any(_is_called(name, target) for name in full):
            near = did_you_mean(target, known)
            choices = sorted(name for name in known if not name.isdigit())
            fix = f"did you mean {near!r}?" if near else f"choose among {', '.join(choices)}"
            fact = f"the model has no {what} {target!r}"
            problems.append(Problem(f"{key}.{index}", fact, fix))
    if problems:
        raise ModelError(problems)
