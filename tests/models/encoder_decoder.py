"""T5, mT5 and BART of a few kilobytes with a byte-level tokenizer, written as anybody would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardtune.models.tiny import tokens

PAD, START, END = 256, 258, 259
"""Ids: the bytes come first, then `tiny`'s four special tokens. `START` begins a target of BART."""
VOCABULARY = 260
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,  # not as many as the encoder: they can't be mixed up
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "dropout_rate": 0.0,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "decoder_start_token_id": PAD,
}
_V1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "pad_token_id": PAD,
    "bos_token_id": START,
    "eos_token_id": END,
    "decoder_start_token_id": END,
    "forced_eos_token_id": END,
}

FAMILIES = ("t5", "flan_t5", "mt5", "bart")


def config(family: str, **changes: Any) -> Any:
    """A small configuration: `t5` has its embedding as output head, `flan_t5` and `mt5` another."""
    import transformers

    return {
        "t5": lambda: transformers.T5Config(**_T5 | changes),
        "flan_t5": lambda: transformers.T5Config(**_T5 | _V1_1 | changes),
        "mt5": lambda: transformers.MT5Config(**_T5 | _V1_1 | changes),
        "bart": lambda: transformers.BartConfig(**_BART | changes),
    }[family]()


def tokenizer(family: str) -> Any:
    """Bytes, and what the family's own tokenizer puts around a text: T5's ends it, BART's also
    begins it."""
    from tokenizers.processors import TemplateProcessing

    found = tokens()
    found.chat_template = None
    names = {START: "<|im_start|>", END: "<|im_end|>"}
    single = f"{names[START]} $A {names[END]}" if family == "bart" else f"$A {names[END]}"
    used = [(name, number) for number, name in names.items()]
    found.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=used)
    return found


def write(folder: Path, family: str, **changes: Any) -> Any:
    """Writes a model with random weights, and its tokenizer, to `folder`; returns the model."""
    from transformers import AutoModelForSeq2SeqLM

    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForSeq2SeqLM.from_config(config(family, **changes))
        for parameter in model.parameters():  # also those that usually start at zero or one
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer(family).save_pretrained(folder)
    return model
