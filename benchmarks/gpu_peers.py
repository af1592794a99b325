"""How others train, for `benchmarks.gpu`: each as its users run it, on the same numbers as we.

Every one of them gets bf16 weights on the device, its batches there ahead of time, torch's fused
AdamW and the gradient clipped to 1, as Hugging Face's Trainer does it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_cases import Case, Peer
from benchmarks.gpu_data import BASE, Batch, config_of, draw, lora_of
from shardtune.core.model.active_experts import active_experts
from shardtune.core.model.peft_wrapper import unwrap_name
from shardtune.models.expert_layers import expert_weights
from shardtune.models.fused.activation_checkpointing import checkpoint_whole_layers
from shardtune.models.lora_targets import lora_target_modules
from shardtune.models.materialize import decoder_layers
from shardtune.models.peft_adapters import initialize_adapters

Step = Callable[[int], Tensor]
"""One optimizer step on the batch of that number; the mean loss of its trained tokens."""
Losses = Callable[[Batch], Iterable[Callable[[], Tensor]]]
"""The parts of a step, one after the other; their losses add up to the mean of the step."""


def build(case: Case, peer: Peer, data: list[Batch], device: str, *, tiny: bool) -> Step:
    """The method, ready for its first step."""
    config = config_of(case, tiny=tiny)
    make = {"hf": _hf, "torchtune": _torchtune, "unsloth": _unsloth}[peer.tool]
    model, losses = make(case, peer, config, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    prepared = [list(losses(batch)) for batch in data]

    def step(number: int) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for part in prepared[number % len(prepared)]:
            with torch.autocast(device, BASE, enabled=peer.fp32_adapters):
                loss = part()
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return total

    return step


# Hugging Face, with or without Liger and torch.compile --------------------------------------------


def _hf(case: Case, peer: Peer, config: Any, device: str) -> tuple[nn.Module, Losses]:
    if peer.liger or (peer.compiled and not peer.own_loss):
        _apply_liger(case, layers=peer.liger, experts=not peer.experts)
    if peer.budget is not None:
        import torch._functorch.config as functorch

        functorch.activation_memory_budget = peer.budget
    asked = case.attention if peer.attention == "sdpa" else peer.attention
    model = _filled(config, case, device, asked, peer.experts)
    layers = decoder_layers(model)
    if case.lora:
        model = with_lora(model, case, device, torch.float32 if peer.fp32_adapters else BASE)
    if peer.checkpointing:
        checkpoint_whole_layers(model)
    if peer.compiled:
        for layer in layers:
            layer.compile()
    model.train()
    return model, hf_losses(model, case, peer, device)


def _apply_liger(case: Case, *, layers: bool, experts: bool) -> None:
    """Liger's loss, and its layers where they are wanted; what it has for the family. Where
    transformers is told how to multiply experts, Liger's own stay out."""
    from inspect import signature

    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[case.family]
    fused = case.family != "granite"  # of which it says that there is none
    losses = {"cross_entropy": not fused, "fused_linear_cross_entropy": fused}
    known = signature(apply).parameters
    names = [name for name in ("rope", "rms_norm", "swiglu", "geglu") if name in known]
    chosen = dict.fromkeys(names, layers)
    if not experts:
        chosen |= {"swiglu": False}
    apply(**losses, **chosen)


def _filled(
    config: Any, case: Case, device: str, attention: str = "sdpa", experts: str = ""
) -> Any:
    """The model on the device, each weight drawn by its name; layers in NF4 one at a time."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    asked = {"attn_implementation": attention}
    asked |= {"experts_implementation": experts} if experts else {}
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=BASE, **asked)
    model.tie_weights()  # the context above made two parameters of a shared one
    model.requires_grad_(not case.lora)
    drawn: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        if case.base == "nf4" and isinstance(module, nn.Linear) and ".layers." in name:
            model.set_submodule(name, _nf4(f"{name}.weight", module, device))
            continue
        for leaf, old in list(module.named_parameters(recurse=False)):
            if old not in drawn:
                values = draw(f"{name}.{leaf}", tuple(old.shape), device)
                drawn[old] = nn.Parameter(values, requires_grad=old.requires_grad)
            setattr(module, leaf, drawn[old])
        for leaf, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, leaf, buffer.to(device))
    model.config.use_cache = False
    model.is_loaded_in_4bit = case.base == "nf4"  # peft has other adapters for such layers
    return model


def _nf4(name: str, linear: nn.Linear, device: str) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    made = Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        compute_dtype=BASE,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    made.weight = Params4bit(
        draw(name, tuple(linear.weight.shape), device),
        requires_grad=False,
        quant_type="nf4",
        compress_statistics=True,
        module=made,
    ).to(device)
    return made


def with_lora(model: Any, case: Case, device: str, dtype: torch.dtype) -> Any:
    """peft's adapters, which start from the numbers that ours start from. Those of a mixture's
    experts (`target_parameters`) have the rank of ours."""
    from peft import LoraConfig, get_peft_model

    adapter = lora_of(case)
    experts = expert_weights(model) if adapter.adapts_experts else []
    rank = adapter.rank_of_experts(active_experts(model.config.to_dict()))
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        use_dora=adapter.variant == "dora",
        target_modules=lora_target_modules(model, case.targets or "all-linear"),
        target_parameters=experts or None,
        rank_pattern=dict.fromkeys(experts, rank),
    )
    adapted = get_peft_model(model, config, low_cpu_mem_usage=True)
    initialize_adapters(adapted, "", adapter, seed=0, device=device)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted


def hf_losses(model: Any, case: Case, peer: Peer, device: str) -> Losses:
    """Rows as they are, packed by their positions alone, or padded with a mask."""

    def losses(batch: Batch) -> Iterable[Callable[[], Tensor]]:
        if peer.padded:
            for tokens, mask, labels in batch.padded():
                given = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
                yield _call(model, given, device, num_items_in_batch=batch.ours.labels)
            return
        given = {"input_ids": batch.ours.input_ids, "labels": batch.labels}
        if case.packed:
            given["position_ids"] = batch.ours.position_ids
            if peer.attention != "sdpa":
                yield _call(model, flattened(given), device, **_longest(batch))
                return
        yield _call(model, given, device)

    return losses


def flattened(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows as one, with the places where documents begin, as transformers' collator for
    FlashAttention has them: without them it keeps apart in one row only, and may pass a tensor
    where the kernels' package wants a number."""
    made = {name: tensor.flatten()[None] for name, tensor in given.items()}
    starts = (made["position_ids"][0] == 0).nonzero().flatten()
    bounds = nn.functional.pad(starts, (0, 1), value=made["position_ids"].numel()).int()
    return made | {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}


def _longest(batch: Batch) -> dict[str, int]:
    """No document is longer; one number for all batches, so that nothing is compiled again."""
    longest = batch.ours.input_ids.shape[1]
    return {"max_length_q": longest, "max_length_k": longest}


def _call(model: Any, given: dict[str, Tensor], device: str, **extra: int) -> Callable[[], Tensor]:
    here = {name: tensor.to(device) for name, tensor in given.items()}
    return lambda: model(**here, **extra).loss


# torchtune ----------------------------------------------------------------------------------------


def _torchtune(case: Case, peer: Peer, config: Any, device: str) -> tuple[nn.Module, Losses]:
    """Its model code and its loss, each layer compiled, as its recipe for one device does it."""
    from torchtune.models.convert_weights import hf_to_tune
    from torchtune.models.llama3_1 import lora_llama3_1
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    with torch.device("meta"):
        made = lora_llama3_1(
            ["q_proj", "k_proj", "v_proj", "output_proj"],
            apply_lora_to_mlp=True,
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            embed_dim=config.hidden_size,
            max_seq_len=case.length,
            intermediate_dim=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
            rope_base=500_000,
            lora_rank=lora_of(case).rank,
            lora_alpha=lora_of(case).alpha,
        )
    source = with_lora(_filled(config, case, device), case, device, BASE)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.hidden_size)
    weights: dict[str, Tensor] = {}
    for name, tensor in source.named_parameters():
        own = unwrap_name(name)
        module, _, lora = own.partition(".lora_")
        if lora:  # a pair of matrices lies beside the weight, under the name of its module
            place = next(iter(hf_to_tune({f"{module}.weight": _PLACE}, 1, 1, 2, 2)))
            place = place.removesuffix("weight")
            weights[f"{place}lora_{lora[0].lower()}.weight"] = tensor.detach()
        else:
            weights |= hf_to_tune({own: tensor.detach()}, *heads)
    del source
    made.load_state_dict(weights, assign=True, strict=False)
    _tables(made, device)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_("lora_" in name)
    for layer in made.layers:
        layer.compile()
    loss = CEWithChunkedOutputLoss()
    made.set_num_output_chunks(loss.num_output_chunks)
    loss.compute_cross_entropy = torch.compile(loss.compute_cross_entropy)
    made.train()

    def losses(batch: Batch) -> Iterable[Callable[[], Tensor]]:
        tokens, targets = batch.ours.input_ids.to(device), batch.ours.targets.to(device)
        yield lambda: loss(made(tokens), targets)

    return made, losses


_PLACE = torch.zeros(2, 2)  # only its name is looked up


def _tables(made: nn.Module, device: str) -> None:
    """torchtune's tables of positions, which are computed when a module is made, on the device."""
    for module in made.modules():
        if hasattr(module, "rope_init"):
            with torch.device(device):
                module.rope_init()


# Unsloth ------------------------------------------------------------------------------------------


def _unsloth(case: Case, peer: Peer, config: Any, device: str) -> tuple[nn.Module, Losses]:
    """It starts from files only, so the drawn weights are written for it first."""
    from unsloth import FastLanguageModel

    with tempfile.TemporaryDirectory() as folder:
        # By another process: here Unsloth has changed transformers already.
        writer = [sys.executable, "-m", "benchmarks.gpu_run", case.name, "--write", folder]
        subprocess.run(writer + (["--tiny"] if device == "cpu" else []), check=True)
        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=case.length, dtype=BASE, load_in_4bit=False
        )
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    adapted = FastLanguageModel.get_peft_model(
        model,
        r=lora_of(case).rank,
        lora_alpha=lora_of(case).alpha,
        lora_dropout=lora_of(case).dropout,
        target_modules=list(names),
        use_gradient_checkpointing="unsloth" if peer.checkpointing else False,
    )
    adapted.train()
    return adapted, hf_losses(adapted, case, peer, device)


def write_checkpoint(case: Case, folder: Path, device: str, *, tiny: bool) -> None:
    """A row's weights as files, with a tokenizer that knows nothing, which no step asks."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model = _filled(config_of(case, tiny=tiny), case, device)
    model.save_pretrained(folder, max_shard_size="4GB")
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    ).save_pretrained(folder)
