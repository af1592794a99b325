"""Detokenization of an answer: the prompt's last tokens, without which its first blank is lost.

A SentencePiece-like decoder strips the blank that a text begins with, and the tokens of an answer
are no text of their own: they go on with the prompt's. So they are decoded behind its last tokens,
whose text is cut off again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CONTEXT_TOKENS = 8
"""A letter has at most four tokens, so that the last one of a prompt is whole in these."""
_HALF = "\ufffd"  # what an incomplete letter decodes to
_BLANK = "\u2581"  # SentencePiece's


def decoding_context(tokenizer: Any, prompt: Sequence[int]) -> list[int]:
    """The tokens to decode an answer behind. None where it begins a text of its own."""
    if not prompt or _begins_anew(tokenizer, prompt[-1]):
        return []
    context: list[int] = []
    for token in reversed(prompt[-4 * CONTEXT_TOKENS :]):
        # Special tokens are skipped when an answer is decoded: they would be no context.
        if len(context) < CONTEXT_TOKENS and _text(tokenizer, [token]):
            context.insert(0, token)
    return [] if _text(tokenizer, context).endswith(_HALF) else context


def decode_behind(tokenizer: Any, context: Sequence[int], ids: Sequence[int]) -> str:
    """The text that `ids` add to their context."""
    before, whole = _text(tokenizer, context), _text(tokenizer, [*context, *ids])
    # Where a tokenizer tidies blanks up, a text may change by what follows it.
    return whole[len(before) :] if whole.startswith(before) else _text(tokenizer, ids)


def _begins_anew(tokenizer: Any, last: int) -> bool:
    """Whether text behind this special token is tokenized as the beginning of a text is: with a
    blank that nobody wrote."""
    if _text(tokenizer, [last]):
        return False
    special = str(tokenizer.decode([last], skip_special_tokens=False))
    found = list(tokenizer(special + "x", add_special_tokens=False)["input_ids"]) if special else []
    if len(found) < 2 or found[0] != last:
        return False
    return str(tokenizer.convert_ids_to_tokens(found[1])).startswith(_BLANK)


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True)) if ids else ""
