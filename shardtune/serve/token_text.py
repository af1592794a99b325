"""What a token adds to an answer: its text, and its bytes, of which a letter may need several."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_BLANK = "\u2581"  # SentencePiece's
_HALF = "\ufffd"  # what an incomplete letter decodes to
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_text(tokenizer: Any, token: int) -> str:
    """As it stands in an answer. A token alone is decoded as the beginning of a text, of which
    SentencePiece-like decoders strip blanks."""
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    name = str(tokenizer.convert_ids_to_tokens(token))
    blanks = len(name) - len(name.lstrip(_BLANK))
    return " " * (blanks - (len(text) - len(text.lstrip(" ")))) + text


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Those of a letter's part as well: a client puts them together."""
    text = token_text(tokenizer, token)
    if _HALF not in text:
        return text.encode()
    name = str(tokenizer.convert_ids_to_tokens(token))
    if found := _BYTE_FALLBACK.fullmatch(name):
        return bytes([int(found[1], 16)])
    letters = _byte_letters()
    if letters.keys() >= set(name):
        return bytes(letters[letter] for letter in name)
    return text.encode()


@cache
def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level BPE writes bytes (GPT-2's table)."""
    themselves = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in themselves]
    return {chr(byte): byte for byte in themselves} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
