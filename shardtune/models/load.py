"""Loads a model and its tokenizer, from a folder or the hub, without running anybody's code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from shardtune.config.job import Adapter, ModelSection, NoAdapter, TrainSection
from shardtune.core.setup import Precision
from shardtune.errors import ModelError, Problem
from shardtune.models.added_tokens import Growth, add_tokens, grow
from shardtune.models.catalogue import resolve
from shardtune.models.peft_adapters import check_module_names, check_new_tokens_trained
from shardtune.models.weight_files import INDEX, read_index

PLACE = "model.name"
_FIX = (
    "name a built-in model (`shardtune models list`), a folder in Hugging Face's format with "
    "safetensors weights, or a hub id that this machine can reach"
)
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""What a computation is in, of the parts that aren't stored otherwise."""


def load_config(section: ModelSection) -> Any:
    """The configuration of the model, with its new tokens."""
    config = _own_config(section)
    if section.add_tokens:
        config.get_text_config().vocab_size = _growth(section, config).rows
    return config


def growth(section: ModelSection) -> Growth:
    """What the job's new tokens mean for the model."""
    return _growth(section, _own_config(section))


def _growth(section: ModelSection, config: Any) -> Growth:
    tokens = len(load_tokenizer(section))
    return Growth(len(section.add_tokens), tokens, config.get_text_config().vocab_size)


def _own_config(section: ModelSection) -> Any:
    """What the model's files say; refuses what needs code of its own, unless that is allowed."""
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    with explaining(PLACE, section.name, _FIX):
        found, _ = PretrainedConfig.get_config_dict(resolve(section.name), **_where(section))
        # A model that transformers knows itself needs none of the code that its repository ships.
        known = found.get("model_type") in CONFIG_MAPPING
        if found.get("auto_map") and not known and not section.trust_remote_code:
            fact = f"{section.name!r} runs Python code of its own: {sorted(found['auto_map'])}"
            fix = "read that code; if you trust it, set model.trust_remote_code: true"
            raise ModelError(Problem(PLACE, fact, fix))
        return AutoConfig.from_pretrained(
            resolve(section.name), trust_remote_code=section.trust_remote_code, **_where(section)
        )


def config_from(found: Mapping[str, Any]) -> Any:
    """The configuration that a config.json describes, of a family that transformers knows."""
    from transformers import AutoConfig

    with explaining(PLACE, str(found.get("model_type")), "estimate without --dry-run"):
        return AutoConfig.for_model(**found)


def load_tokenizer(section: ModelSection) -> Any:
    """The tokenizer that the model was trained with, and the job's new tokens in it."""
    from transformers import AutoTokenizer

    folder = Path(resolve(section.name))
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        fact = f"the folder {section.name!r} has no tokenizer: no tokenizer.json, nor an older kind"
        fix = "save the tokenizer of the model that it comes from there: tokenizer.save_pretrained"
        raise ModelError(Problem(PLACE, fact, fix))
    with explaining(PLACE, section.name, _FIX):
        tokenizer = AutoTokenizer.from_pretrained(
            resolve(section.name), trust_remote_code=section.trust_remote_code, **_where(section)
        )
    add_tokens(tokenizer, section)
    return tokenizer


def check_fits_data(config: Any, tokenizer: Any, sequence_length: int) -> None:
    """Refuses rows and tokens that the model has no place for."""
    problems = []
    config = config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and sequence_length > longest:
        problems.append(
            Problem(
                "data.sequence_length",
                f"{sequence_length} tokens a row, but the model has positions for {longest}",
                f"set data.sequence_length to at most {longest}",
            )
        )
    if len(tokenizer) > config.vocab_size:
        problems.append(
            Problem(
                PLACE,
                f"the tokenizer has {len(tokenizer)} tokens, the model embeds {config.vocab_size}",
                "use the tokenizer that belongs to the model",
            )
        )
    if problems:
        raise ModelError(problems)


def check_weights(section: ModelSection, adapter: Adapter, config: Any) -> None:
    """Refuses weights that can't be read, and adapters that the model has no place for.

    The model is built without its weights, which takes no memory and well under a second.
    """
    from transformers import AutoModelForCausalLM

    folder = Path(resolve(section.name))
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        found = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "missing"
        fact = f"the folder {section.name!r} has no *.safetensors; its weights are {found}"
        fix = "save the model again with save_pretrained, which writes safetensors"
        raise ModelError(Problem(PLACE, fact, fix))
    if (index := folder / INDEX).is_file():
        read_index(index)
    other = "eager" if section.attention == "sdpa" else "sdpa"
    with explaining("model.attention", section.name, f"attention: {other}"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            attn_implementation=section.attention,
            trust_remote_code=section.trust_remote_code,
        )
    check_module_names(model, adapter)
    check_new_tokens_trained(model, adapter, len(section.add_tokens))


def stop_ids(section: ModelSection, tokenizer: Any) -> frozenset[int]:
    """The tokens at which generation ends: what the job says, or what the model's files say."""
    if section.stop_tokens != "auto":
        return frozenset(_token_id(token, tokenizer) for token in section.stop_tokens)
    found = {tokenizer.eos_token_id}
    generation = load_generation_config(section)
    if generation is not None and generation.eos_token_id is not None:
        ids = generation.eos_token_id
        found.update(ids if isinstance(ids, list) else [ids])
    return frozenset(found - {None})


def load_generation_config(section: ModelSection) -> Any | None:
    """What the model's files say about generation; many have nothing to say."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(resolve(section.name), **_where(section))
    except OSError:
        return None


def held_precision(adapter: Adapter, train: TrainSection) -> Precision:
    """What the model's own weights are held in while they are trained, or adapted."""
    return "fp32" if isinstance(adapter, NoAdapter) else train.precision


def load_base(section: ModelSection, precision: Precision) -> Any:
    """The pretrained model, with rows for new tokens, in eval mode, on the CPU."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    config = _own_config(section)
    logging.disable_progress_bar()  # one bar per rank and per reload is noise
    with explaining(PLACE, section.name, _FIX):
        model = AutoModelForCausalLM.from_pretrained(
            resolve(section.name),
            config=config,
            dtype=DTYPES[precision],
            attn_implementation=section.attention,
            use_safetensors=True,
            trust_remote_code=section.trust_remote_code,
            **_where(section),
        )
    if section.add_tokens:
        grow(model, _growth(section, config).rows)
    generation = model.generation_config
    if generation is not None and not generation.do_sample:
        # Some models came out with settings of sampling but without sampling. transformers reads
        # such files and refuses to write them, which must not happen at the end of a run.
        generation.temperature = generation.top_p = generation.top_k = None
    return model


def own_dtype(section: ModelSection) -> torch.dtype:
    """What the model's own files are written in; fp32 where they don't say."""
    dtype = load_config(section).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _where(section: ModelSection) -> dict[str, Any]:
    return {"revision": section.revision} if section.revision else {}


def _token_id(token: str, tokenizer: Any) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    if found is None or found == tokenizer.unk_token_id:
        raise ModelError(
            Problem(
                "model.stop_tokens",
                f"{token!r} is not a single token of this tokenizer",
                f"choose among its special tokens: {', '.join(tokenizer.all_special_tokens)}",
            )
        )
    return int(found)


@contextmanager
def explaining(place: str, name: str, fix: str) -> Iterator[None]:
    """Turns the many ways in which transformers fails to load a thing into one that says what."""
    try:
        yield
    except (ImportError, OSError, ValueError, RuntimeError, SafetensorError) as error:
        first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [
            repr(error)
        ]
        reason = " ".join([first, *others]) if first.endswith(":") else first  # a list follows
        fact = f"{name!r} can't be loaded: {reason}"
        raise ModelError(Problem(place, fact, fix)) from error
