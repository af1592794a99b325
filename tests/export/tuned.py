"""Runs for the tests of exports: a tiny model of a family with a trained BPE tokenizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from shardtune.checkpoint.export import save_result
from shardtune.checkpoint.run_dir import RunDir
from shardtune.config.job import Adapter, LoRA, ModelSection, TrainSection
from shardtune.core.model.chat_templates import read_chat_template
from shardtune.core.setup import Precision, Quantization
from shardtune.export.source import ExportSource
from shardtune.models.model_files import ModelFiles
from tests.jobs import make_environment
from tests.models.families import CONFIGS
from tests.synthetic import load_model, make_job, trained

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ROWS = 320
PROMPTS = ["the quick brown fox jumps over 12 lazy dogs", "and then there were 3 other things"]
TEXT = "the quick brown fox jumps over the lazy dog, and then the other things that were there "
_SIZES = {"vocab_size": ROWS, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
_IDS = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}


@cache
def bpe_tokenizer() -> Any:
    """A byte-level BPE tokenizer that takes digits one by one, as SmolLM2's does."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator([TEXT * 3], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=read_chat_template("chatml"),
        clean_up_tokenization_spaces=False,
    )


def family_model(family: str, **changes: Any) -> Any:
    """A random model of a family whose every weight matters, norms too."""
    settings = CONFIGS[family] | _SIZES | _IDS | changes
    if family == "granite":
        settings.pop("head_dim")
    if family.startswith("gemma"):
        settings["query_pre_attn_scalar"] = settings["head_dim"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            mean = 0.0 if "norm" not in name or family.startswith("gemma") else 1.0
            weight.copy_(mean + 0.2 * torch.randn(weight.shape, generator=draw))
    return model


def write_model(folder: Path, family: str, **changes: Any) -> Path:
    model = family_model(family, **changes)
    model.save_pretrained(folder)
    bpe_tokenizer().save_pretrained(folder)
    return folder


def finished(
    folder: Path,
    family: str = "llama",
    adapter: Adapter | None = None,
    *,
    quantization: Quantization = "none",
    precision: Precision = "fp32",
    **changes: Any,
) -> ExportSource:
    """A run on a tiny model of the family, as training leaves it."""
    adapter = adapter or LoRA(rank=4)
    base = write_model(folder / "base", family, **changes)
    section = ModelSection(name=str(base), quantization=quantization)
    run = RunDir(folder / "run")
    job = make_job(
        str(run.path),
        train={"precision": precision},
        adapter=adapter.model_dump(mode="json"),
        model=section.model_dump(mode="json"),
    )
    run.begin(job, make_environment())
    model = load_model(section, adapter, TrainSection(precision=precision), device="cpu")
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.05 * torch.randn(weight.shape, generator=draw)
    tokenizer = bpe_tokenizer()
    stops = frozenset([tokenizer.eos_token_id])
    save_result(
        model,
        trained(model),
        tokenizer,
        stops,
        run.result,
        dtype=torch.float32,
        base=ModelFiles(section),
        card="---\nlibrary_name: peft\n---\n\n# A LoRA adapter for base\n",
    )
    return ExportSource(run, job, PROMPTS)
