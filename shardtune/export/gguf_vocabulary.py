"""A tokenizer as GGUF keeps it: tokens, their types, merges or scores, and llama.cpp's name of the
pre-tokenizer.

A fast tokenizer is described by its tokenizer.json. llama.cpp splits text by rules that it has in
code; `tokenizer.ggml.pre` chooses one. So the tokenizer's own rule is looked up among these, and
one that llama.cpp doesn't have is refused: ids would differ, and answers with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardtune.errors import Problem, RunError
from shardtune.export.gguf_hyperparameters import GgufMetadata
from shardtune.models.set_chat_template import end_of_turn

NORMAL, UNKNOWN, CONTROL_TOKEN, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens, as llama.cpp counts them."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_UNREACHABLE = -1e9  # the score of a token that no merge makes

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CASED = rf"{_LEAD}{_UPPER}*{_LOWER}+" + "{0}" + rf"|{_LEAD}{_UPPER}+{_LOWER}*" + "{0}"
_SLASH_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDINGS + _WORDS + r"|\p{N}{1,3}" + _REST
PRE_TOKENIZERS: Mapping[tuple[str, bool], str] = {
    (_LLAMA3, True): "llama-bpe",
    (_LLAMA3, False): "smaug-bpe",
    (_ENDINGS + _WORDS + r"|\p{N}" + _REST, False): "qwen2",
    (_CASED.replace("{0}", "") + r"|\p{N}" + _SLASH_REST, True): "tekken",
    (_CASED.replace("{0}", _ENDINGS + "?") + r"|\p{N}{1,3}" + _SLASH_REST, False): "gpt-4o",
}
"""llama.cpp's names, by the expression that splits a text and whether whole words skip merges."""


@dataclass(frozen=True)
class Vocabulary:
    """What GGUF says of a tokenizer, beside its special tokens."""

    model: str
    """`gpt2` is byte-level BPE, `llama` SentencePiece's BPE, `t5` its unigram model."""
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None = None
    scores: list[float] | None = None
    adds_blank: bool = False
    """Whether a text gets a blank before its first word."""


def tokenizer_metadata(tokenizer: Any, rows: int, stops: frozenset[int]) -> GgufMetadata:
    """Every key of the tokenizer, for an embedding of that many rows."""
    vocabulary = read_vocabulary(tokenizer, rows)
    found: GgufMetadata = {
        "ggml.model": vocabulary.model,
        "ggml.pre": vocabulary.pre,
        "ggml.tokens": vocabulary.tokens,
        "ggml.token_type": vocabulary.types,
        "ggml.add_space_prefix": vocabulary.adds_blank,
    }
    if vocabulary.merges is not None:
        found["ggml.merges"] = vocabulary.merges
    if vocabulary.scores is not None:
        found["ggml.scores"] = vocabulary.scores
    found |= _special_tokens(tokenizer, stops)
    if tokenizer.chat_template:
        found["chat_template"] = str(tokenizer.chat_template)
    return {f"tokenizer.{key}": value for key, value in found.items()}


def read_vocabulary(tokenizer: Any, rows: int) -> Vocabulary:
    """The vocabulary of a fast tokenizer; RunError for one that llama.cpp can't reproduce."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    model = backend["model"]
    added = {index: token.special for index, token in tokenizer.added_tokens_decoder.items()}
    # Text models of a family with images have its image tokens, too, and no embedding for them.
    words = {
        index: token
        for token, index in tokenizer.get_vocab().items()
        if index < rows or index not in added
    }
    if words and max(words) >= rows:
        fact = f"the tokenizer has token {max(words)}, and the model embeds {rows}"
        raise RunError(Problem("tokenizer", fact, "use the tokenizer of the result"))
    tokens = [words.get(index, f"[PAD{index}]") for index in range(rows)]
    types = [_type(index, words, added, model) for index in range(rows)]
    if model["type"] == "BPE" and _byte_level(backend):
        return Vocabulary("gpt2", _pre_tokenizer(backend), tokens, types, merges=_merges(model))
    if model["type"] == "BPE" and model.get("byte_fallback"):
        scores = _scores_of_merges(model, tokens)
        return Vocabulary("llama", "default", tokens, types, None, scores, _adds_blank(backend))
    if model["type"] == "Unigram":
        known = dict(model["vocab"])
        scores = [float(known.get(token, _UNREACHABLE)) for token in tokens]
        return Vocabulary("t5", "default", tokens, types, None, scores, _adds_blank(backend))
    fact = f"llama.cpp has no tokenizer like this one ({model['type']})"
    raise RunError(Problem("tokenizer", fact, "export --to hf"))


def _type(
    index: int, words: Mapping[int, str], added: Mapping[int, bool], model: Mapping[str, Any]
) -> int:
    if index not in words:
        return UNUSED
    word = words[index]
    if word == model.get("unk_token") or (model["type"] == "Unigram" and index == model["unk_id"]):
        return UNKNOWN
    if index in added:
        return CONTROL_TOKEN if added[index] else USER_DEFINED
    falls_back = model.get("byte_fallback")
    return BYTE if falls_back and _BYTE_TOKEN.fullmatch(word) else NORMAL


def composes_accents(tokenizer: Any) -> bool:
    """Whether it brings text to Unicode's composed form first (NFC), as Qwen's does. llama.cpp
    doesn't: there a letter and its accent, where they come as two characters, stay two."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    return any(step["type"] == "NFC" for step in _steps(backend["normalizer"], "normalizers"))


def _steps(part: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """The steps of a pre-tokenizer or normalizer, one after the other."""
    if part is None:
        return []
    return list(part[inner]) if part["type"] == "Sequence" else [part]


def _byte_level(backend: Mapping[str, Any]) -> bool:
    steps = _steps(backend["pre_tokenizer"], "pretokenizers")
    return any(step["type"] == "ByteLevel" for step in steps)


def _merges(model: Mapping[str, Any]) -> list[str]:
    if not model["merges"]:
        fact = "the tokenizer has no merges; llama.cpp refuses such a vocabulary"
        raise RunError(Problem("tokenizer", fact, "export --to hf"))
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]


def _pre_tokenizer(backend: Mapping[str, Any]) -> str:
    """llama.cpp's name for how a text is split before its pieces are merged."""
    steps = _steps(backend["pre_tokenizer"], "pretokenizers")
    whole_words = bool(backend["model"].get("ignore_merges"))
    match steps:
        case [{"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}]:
            found = None if whole_words else "gpt-2"
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False},
        ]:
            found = None if whole_words else "smollm"
        case [
            {"type": "Split", "pattern": {"Regex": pattern}},
            {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
        ]:
            found = PRE_TOKENIZERS.get((pattern, whole_words))
        case _:
            found = None
    if found is None:
        how = json.dumps(steps, ensure_ascii=False)
        fact = f"llama.cpp has no pre-tokenizer like this one: {how[:300]}"
        raise RunError(Problem("tokenizer", fact, "export --to hf"))
    return found


def _scores_of_merges(model: Mapping[str, Any], tokens: list[str]) -> list[float]:
    """SentencePiece's scores: the earlier a piece is merged, the higher.

    tokenizer.json keeps the order of the merges alone, and order is all that counts: llama.cpp
    merges the pair whose piece has the highest score.
    """
    rank: dict[str, int] = {}
    for place, pair in enumerate(model["merges"]):
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        rank.setdefault(left + right, place)
    return [float(-rank[token]) if token in rank else _UNREACHABLE for token in tokens]


def _adds_blank(backend: Mapping[str, Any]) -> bool:
    normal = _steps(backend["normalizer"], "normalizers")
    if any(step["type"] == "Prepend" for step in normal):
        return True
    for step in _steps(backend["pre_tokenizer"], "pretokenizers"):
        if step["type"] == "Metaspace":
            return bool(step.get("prepend_scheme", "always") != "never")
    return False


def _special_tokens(tokenizer: Any, stops: frozenset[int]) -> GgufMetadata:
    """Where texts begin and end. GGUF has three places for stop tokens."""
    last = end_of_turn(tokenizer) if tokenizer.chat_template else None
    first = tokenizer.eos_token_id if tokenizer.eos_token_id in stops else last
    ends = [each for each in dict.fromkeys([first, last, *sorted(stops)]) if each in stops]
    if not ends or len(ends) > 3:
        fact = f"{len(ends)} stop tokens, and GGUF has keys for 1 to 3"
        raise RunError(Problem("stop tokens", fact, "set model.stop_tokens and write the result"))
    places = ("ggml.eos_token_id", "ggml.eot_token_id", "ggml.eom_token_id")
    found: GgufMetadata = dict(zip(places, ends, strict=False))
    for name, key in (("bos", "bos"), ("unk", "unknown"), ("pad", "padding")):
        token = getattr(tokenizer, f"{name}_token_id")
        if token is not None:
            found[f"ggml.{key}_token_id"] = token
    ids = tokenizer("x")["input_ids"]
    found["ggml.add_bos_token"] = bool(ids) and ids[0] == tokenizer.bos_token_id
    found["ggml.add_eos_token"] = len(ids) > 1 and ids[-1] == tokenizer.eos_token_id
    return found
