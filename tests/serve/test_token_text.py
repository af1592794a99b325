"""The texts and bytes of tokens, put together, are the text of all tokens."""

from __future__ import annotations

from typing import Any

from shardtune.models import tiny
from shardtune.serve.generation_request import Piece
from shardtune.serve.openai_answers import AnswerWriter
from shardtune.serve.sampling import TokenLogprob
from shardtune.serve.token_text import token_bytes, token_text


def sentence_piece() -> Any:
    """A tokenizer as Llama 2 and Mistral have it: blanks before words, bytes for other letters."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hi", "▁you", "▁▁", "▁"]
    vocabulary = {word: place for place, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def test_bytes_of_a_letter_come_apart_and_join_again() -> None:
    tokenizer, text = tiny.tokens(), "Größe 😀\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(token_bytes(tokenizer, token) for token in ids) == text.encode()
    tokenizer = sentence_piece()
    names = ["▁Hi", "▁▁", "▁you", "▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    ids = tokenizer.convert_tokens_to_ids(names)
    assert [token_text(tokenizer, token) for token in ids[:4]] == [" Hi", "  ", " you", " "]
    joined = b"".join(token_bytes(tokenizer, token) for token in ids)
    assert joined.decode() == " Hi   you 😀" == " " + tokenizer.decode(ids)


def test_the_likeliest_tokens_keep_their_own_figures_and_the_chosen_one_is_among_them() -> None:
    """Bytes 200 and 201 are halves of letters, and have one text."""
    writer = AnswerWriter("text", "tiny", tiny.tokens(), 2)
    half = TokenLogprob(200, -0.5, ((200, -0.5), (201, -1.5)))
    drawn = TokenLogprob(ord("c"), -3.0, ((ord("a"), -0.5), (ord("b"), -1.0)))
    found: Any = writer.whole(0, Piece("\ufffdc", (half, drawn), "stop"))["logprobs"]
    assert found["top_logprobs"] == [{"\ufffd": -0.5}, {"a": -0.5, "b": -1.0, "c": -3.0}]


def test_offsets_go_on_from_chunk_to_chunk() -> None:
    writer = AnswerWriter("text", "tiny", tiny.tokens(), 0)
    pieces = [Piece(text, (TokenLogprob(ord(text), -1.0),)) for text in "abc"]
    found: list[Any] = [writer.part(n, each)["logprobs"] for each in pieces for n in (0, 1)]
    assert [each["text_offset"] for each in found] == [[0], [0], [1], [1], [2], [2]]
