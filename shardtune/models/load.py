"""Loads a pretrained model, and checks before that what can be wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardtune.compat.quiet import hide_loading_bars
from shardtune.config.job import Adapter, NoAdapter, TrainSection
from shardtune.core.model.family_support import require_attention
from shardtune.core.model.kind import kind_of
from shardtune.core.model.known_models import MODEL_NAME
from shardtune.core.model.row_length import row_problems
from shardtune.core.setup import Precision
from shardtune.errors import ModelError, Problem
from shardtune.models.added_tokens import grow
from shardtune.models.experts.grouped_experts import multiply_odd_experts_apart
from shardtune.models.model_files import LOADING_FIX, ModelFiles, auto_class, explaining
from shardtune.models.peft_adapters import (
    check_experts,
    check_module_names,
    check_new_tokens_trained,
)
from shardtune.models.required_weights import missing_weights, refuse_missing
from shardtune.models.rope_by_document import rotate_by_document

COMPUTE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""What a computation is in, of the parts that aren't stored otherwise."""


def config_from(found: Mapping[str, Any]) -> Any:
    """The configuration that a config.json describes, of a family that transformers knows."""
    from transformers import AutoConfig

    with explaining(MODEL_NAME, str(found.get("model_type")), "estimate without --dry-run"):
        config = AutoConfig.for_model(**found)
    if kind_of(config) == "encoder_decoder" and _decoder_start(config) is None:
        config.decoder_start_token_id = 0  # the catalogue has sizes alone; any token is as large
    return config


def _decoder_start(config: Any) -> int | None:
    """The token that a decoder behind an encoder starts with."""
    found: int | None = getattr(config, "decoder_start_token_id", None)
    return found


def check_fits_data(
    files: ModelFiles, sequence_length: int, target_length: int | None = None
) -> None:
    """Refuses rows and tokens that the model has no place for."""
    config, tokenizer = files.config.get_text_config(), files.tokenizer
    longest = getattr(config, "max_position_embeddings", None)
    lengths = {"sequence_length": sequence_length, "target_length": target_length or 0}
    problems = row_problems(longest, lengths)
    if target_length is not None and _decoder_start(config) is None:
        fact = "config.json has no decoder_start_token_id: a decoder can't begin without one"
        fix = "write it there: pad_token_id for T5 and mT5, eos_token_id for BART"
        problems.append(Problem(MODEL_NAME, fact, fix))
    if len(tokenizer) > config.vocab_size:
        problems.append(
            Problem(
                MODEL_NAME,
                f"the tokenizer has {len(tokenizer)} tokens, the model embeds {config.vocab_size}",
                "use the tokenizer that belongs to the model",
            )
        )
    if problems:
        raise ModelError(problems)


def check_weights(files: ModelFiles, adapter: Adapter) -> None:
    """Refuses weights that can't be read, and adapters that the model has no place for.

    The model is built without its weights, which takes no memory and well under a second.
    """
    section, config, folder = files.section, files.config, Path(files.path)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        found = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "missing"
        fact = f"the folder {section.name!r} has no *.safetensors; its weights are {found}"
        fix = "save the model again with save_pretrained, which writes safetensors"
        raise ModelError(Problem(MODEL_NAME, fact, fix))
    require_attention(config.model_type, section.attention)
    with explaining("model.attention", section.name, "attention: auto"), torch.device("meta"):
        model = auto_class(config).from_config(
            config,
            attn_implementation=section.attn_implementation,
            trust_remote_code=section.trust_remote_code,
        )
    if folder.is_dir() and getattr(config, "quantization_config", None) is None:
        model.tie_weights()
        refuse_missing(section.name, missing_weights(model, files.weights.file_of))
    check_module_names(model, adapter)
    check_new_tokens_trained(model, adapter, len(section.add_tokens))
    check_experts(model, adapter)


def held_precision(adapter: Adapter, train: TrainSection) -> Precision:
    """What the model's own weights are held in while they are trained, or adapted."""
    return "fp32" if isinstance(adapter, NoAdapter) else train.compute_precision


def merged_dtype(files: ModelFiles, computed: Precision) -> torch.dtype:
    """What a merged model is written in unless somebody chooses: what the run `computed` in, so
    that it answers as the adapter did. Weights may exceed fp16, which gets the base model's own."""
    return files.dtype if computed == "fp16" else COMPUTE_DTYPES[computed]


def result_dtype(files: ModelFiles, computed: Precision) -> torch.dtype:
    """What all weights of a full fine-tune are written in: the base model's own, and fp32 after a
    run in fp32, whose small updates 16 bits would round away."""
    return torch.float32 if computed == "fp32" else files.dtype


def load_base(files: ModelFiles, precision: Precision) -> Any:
    """The pretrained model, with rows for new tokens, in eval mode, on the CPU. ModelError where
    its files lack a weight: transformers would draw it at random."""
    section = files.section
    hide_loading_bars()
    with explaining(MODEL_NAME, section.name, LOADING_FIX):
        model, found = auto_class(files.own_config).from_pretrained(
            files.path,
            config=files.own_config,
            dtype=COMPUTE_DTYPES[precision],
            attn_implementation=section.attn_implementation,
            use_safetensors=True,
            trust_remote_code=section.trust_remote_code,
            output_loading_info=True,
            adapter_kwargs=files.hub_arguments,  # for the adapter that it looks for beside it
            **files.hub_arguments,
        )
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    refuse_missing(section.name, sorted(weights & set(found["missing_keys"])))
    multiply_odd_experts_apart(model)
    rotate_by_document(model)
    if section.add_tokens:
        grow(model, files.growth.rows)
    generation = model.generation_config
    if generation is not None and generation.do_sample is False:
        # Some models came out with settings of sampling and `do_sample: false`. transformers reads
        # such files and refuses to write them, which must not happen at the end of a run.
        generation.temperature = generation.top_p = generation.top_k = None
    return model
