"""Text that comes token by token is the text of all tokens."""

from __future__ import annotations

import random

import pytest

from shardtune.models import tiny
from shardtune.serve.sampling import RequestSampling
from shardtune.serve.text_stream import TextStream

TEXT = "Grüße, 世界! 👩‍👩‍👧 end\n"


def streamed(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    tokenizer = tiny.tokens()
    stream = TextStream(tokenizer, stop)
    parts = []
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        parts.append(stream.add(token))
        if stream.stopped:
            break
    return [*parts, stream.end()], stream.stopped


def test_letters_of_several_tokens_come_whole() -> None:
    parts, _ = streamed(TEXT)
    assert "".join(parts) == TEXT
    assert not any("\ufffd" in part for part in parts)
    assert "世" in parts


@pytest.mark.parametrize("stop", ["界", "!", "世界", "end", "Grü", "\n"])
def test_a_stop_string_ends_before_itself(stop: str) -> None:
    parts, stopped = streamed(TEXT, (stop, "never"))
    assert stopped
    assert "".join(parts) == TEXT[: TEXT.index(stop)]


def test_the_beginning_of_a_stop_string_is_held_back_and_given_out() -> None:
    parts, stopped = streamed("a STO b STOP c", ("STOP",))
    assert (stopped, "".join(parts)) == (True, "a STO b ")
    parts, stopped = streamed("ends with STO", ("STOP",))
    assert (stopped, "".join(parts)) == (False, "ends with STO")
    assert parts[-1] == "STO"


def test_what_is_no_letter_is_given_out_in_the_end() -> None:
    stream = TextStream(tiny.tokens())
    assert "".join([stream.add(200) for _ in range(20)]) + stream.end() == "\ufffd" * 20


def test_top_p_and_top_k_draw_among_the_likeliest() -> None:
    import torch

    draw = random.Random(1)
    logits = torch.tensor([draw.gauss(0, 2) for _ in range(3000)])
    chances, order = logits.softmax(-1).sort(descending=True)
    kept = set(order[: int((chances.cumsum(0) < 0.5).sum()) + 1].tolist())
    found = {RequestSampling(top_p=0.5, seed=n).choose(logits).token for n in range(200)}
    assert found <= kept
    assert len(found) > 20
    assert {RequestSampling(top_k=2, seed=n).choose(logits).token for n in range(50)} == set(
        order[:2].tolist()
    )
    # Colder is likelier: with 0 there is one token alone.
    assert RequestSampling(temperature=0, seed=1).choose(logits).token == int(order[0])
    flat = torch.zeros(5000)  # no 1024 tokens reach 0.9 of it
    assert max(RequestSampling(top_p=0.9, seed=n).choose(flat).token for n in range(50)) < 5000
