"""The first blank of an answer is kept, by decoders that strip the one a text begins with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from shardtune.core.model.decoding_context import decode_behind, decoding_context
from shardtune.models import tiny
from shardtune.models.batched_generation import Stopping, complete
from shardtune.serve.text_stream import TextStream

PIECES = ["<unk>", "▁Hello", "▁world", "▁", "▁▁▁▁", "return", "▁return", "x", "▁x", "\n"]
ASKS = len(PIECES)  # a special token


def sentencepiece(*, anew: bool = False) -> Any:
    """As Llama's: `anew` writes a blank behind each special token, as older files do."""
    made = Tokenizer(models.Unigram([(each, -len(PIECES) + len(each)) for each in PIECES], 0))
    if anew:
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken("<|ask|>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=made)


def ids(*pieces: str) -> list[int]:
    return [ASKS if each == "<|ask|>" else PIECES.index(each) for each in pieces]


def streamed(tokenizer: Any, prompt: list[int], answer: list[int]) -> str:
    stream = TextStream(tokenizer, (), prompt)
    return "".join([stream.add(token) for token in answer]) + stream.end()


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        (["▁Hello"], ["▁world"], " world"),
        (["▁Hello", "\n"], ["▁▁▁▁", "return"], "    return"),
        (["▁Hello", "▁"], ["x"], "x"),
        (["▁Hello", "<|ask|>"], ["▁▁▁▁", "return"], "    return"),
        (["▁Hello", "<|ask|>", "\n"], ["▁world", "<|ask|>"], " world"),
        (["<|ask|>"], ["▁world"], "world"),  # nothing but special tokens: it begins the text
    ],
)
def test_the_first_blank_is_the_answers(prompt: list[str], answer: list[str], text: str) -> None:
    tokenizer = sentencepiece()
    context = decoding_context(tokenizer, ids(*prompt))
    assert decode_behind(tokenizer, context, ids(*answer)) == text
    assert streamed(tokenizer, ids(*prompt), ids(*answer)) == text


def test_a_blank_that_the_tokenizer_writes_is_nobodys() -> None:
    tokenizer = sentencepiece(anew=True)
    assert tokenizer("<|ask|>x", add_special_tokens=False)["input_ids"] == ids("<|ask|>", "▁x")
    assert streamed(tokenizer, ids("▁Hello", "<|ask|>"), ids("▁x")) == "x"
    assert streamed(tokenizer, ids("▁Hello", "<|ask|>", "\n"), ids("▁x")) == " x"


def test_letters_that_end_a_prompt_are_no_part_of_an_answer() -> None:
    tokenizer = tiny.tokens()
    for prompt in ("世", "é世👩", "a"):
        asked = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        said = tokenizer(" 界!", add_special_tokens=False)["input_ids"]
        assert streamed(tokenizer, asked, said) == " 界!"
        # Half a letter: the answer begins with its other half.
        assert streamed(tokenizer, [*asked, 0xE4], [0xB8, 0x96, 33]).endswith("!")


def test_batched_answers_keep_it_and_stop_at_it() -> None:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=ASKS + 1, num_attention_heads=2, **shape)
    model, tokenizer = LlamaForCausalLM(config).eval(), sentencepiece()
    torch.nn.init.zeros_(model.lm_head.weight)  # it says one token
    said = torch.tensor(ids("▁world"))
    model.lm_head.register_forward_hook(lambda _, __, logits: logits.index_fill(-1, said, 1.0))
    prompt = ids("▁Hello")
    (found,) = complete(model, tokenizer, [prompt], stopping=Stopping(2))
    assert (found.ids, found.text) == ((2, 2), " world world")
    (found,) = complete(model, tokenizer, [prompt], stopping=Stopping(9, stop_strings=(" wo",)))
    assert (found.ids, found.text, found.reason) == ((2,), "", "stop")
    (found,) = complete(model, tokenizer, [prompt], stopping=Stopping(2, stop_strings=("Hello",)))
    assert found.reason == "length", "the prompt is no answer"
