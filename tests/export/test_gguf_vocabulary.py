"""Vocabularies in GGUF: tokens, types, scores, stop tokens, and llama.cpp's pre-tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shardtune.errors import RunError
from shardtune.export.gguf_hyperparameters import hyperparameters
from shardtune.export.gguf_vocabulary import PRE_TOKENIZERS, read_vocabulary, tokenizer_metadata
from shardtune.export.gguf_weights import gguf_tensors
from shardtune.export.gguf_write import write_gguf
from shardtune.models import tiny
from tests.export.tuned import PROMPTS, ROWS, TEXT, bpe_tokenizer, family_model


def sentencepiece() -> Any:
    """BPE as SentencePiece trains it: a mark for blanks, and bytes for what it doesn't know."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=310, special_tokens=special, show_progress=False)
    backend.train_from_iterator([TEXT], trainer)
    vocabulary = backend.get_vocab()
    # Trained with bytes among the special tokens; a real one has them in its vocabulary alone.
    state = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(backend),
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    state.normalizer = backend.normalizer
    state.add_special_tokens([AddedToken(each, special=True) for each in special[:3]])
    return PreTrainedTokenizerFast(
        tokenizer_object=state, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def _merges(backend: Any) -> list[tuple[str, str]]:
    import json

    return [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]


def test_sentencepiece_scores_give_the_same_tokens(tmp_path: Path) -> None:
    tokenizer = sentencepiece()
    found = read_vocabulary(tokenizer, ROWS)
    assert found.model == "llama"
    assert found.adds_blank
    assert found.types[:4] == [2, 3, 3, 6]
    assert found.types[-1] == 5
    model = family_model("llama")
    metadata = hyperparameters(model.config) | tokenizer_metadata(tokenizer, ROWS, frozenset([2]))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", metadata, lambda: gguf_tensors(model.config, weights), "f32")
    back = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in [*PROMPTS, "naïve things, 天気 then"]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert back(text, add_special_tokens=False)["input_ids"] == ids


def test_unigram_scores_are_kept() -> None:
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.5), ("b", -2.0)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    found = read_vocabulary(tokenizer, 4)
    assert (found.model, found.adds_blank) == ("t5", True)
    assert found.scores is not None
    assert found.scores[:3] == [0.0, -1.5, -2.0]
    assert found.types == [2, 1, 1, 5]


@pytest.mark.parametrize(("pattern", "name"), PRE_TOKENIZERS.items(), ids=PRE_TOKENIZERS.values())
def test_pre_tokenizers_by_their_expression(pattern: tuple[str, bool], name: str) -> None:
    from tokenizers import Regex

    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    backend.model.ignore_merges = pattern[1]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern[0]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert read_vocabulary(tokenizer, 3).pre == name


def test_a_pre_tokenizer_that_llama_cpp_lacks_is_refused() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe_tokenizer().backend_tokenizer)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    with pytest.raises(RunError, match=r"no pre-tokenizer like this one.*Punctuation"):
        read_vocabulary(tokenizer, ROWS)


def test_a_vocabulary_without_merges_is_refused() -> None:
    with pytest.raises(RunError, match=r"no pre-tokenizer|no merges"):
        read_vocabulary(tiny.tokens(), 320)


def test_more_tokens_than_rows_are_refused() -> None:
    with pytest.raises(RunError, match="the model embeds 100"):
        read_vocabulary(bpe_tokenizer(), 100)


def test_added_tokens_without_an_embedding_are_left_out() -> None:
    """As the image tokens of a text model, whose family has images."""
    tokenizer = sentencepiece()
    rows = len(tokenizer)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    assert len(tokenizer) == rows + 1
    assert "<image>" not in read_vocabulary(tokenizer, rows).tokens


def test_stop_tokens() -> None:
    tokenizer = bpe_tokenizer()
    keys = tokenizer_metadata(tokenizer, ROWS, frozenset([0, 2]))
    assert keys["tokenizer.ggml.eos_token_id"] == 2
    assert keys["tokenizer.ggml.eot_token_id"] == 0
    assert keys["tokenizer.ggml.add_bos_token"] is False
    with pytest.raises(RunError, match="4 stop tokens"):
        tokenizer_metadata(tokenizer, ROWS, frozenset([0, 1, 2, 3]))
