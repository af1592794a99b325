"""Control tokens in a row's own text: refused, read as text, or taken, by `data.control_tokens`.

A tokenizer turns `<|im_end|>` in a user's words into the token that ends a turn, and `<s>` in a web
page into the beginning of a text. So a row could end its own answer, or speak as the system, and
nobody would see it. What the chat template writes itself is never meant, nor are the job's own new
tokens or an end-of-text token that ends a text.

To read them as text, those of the rows are hidden from the chat template behind characters that no
text uses, as many as they have, so that no place in the text moves. Then the template's own get
names of that kind, and the engine reads whatever looks like a control token as ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from shardtune.data.conversation import Conversation
from shardtune.data.encode import Text
from shardtune.data.records import CONTROL_IN_TEXT, Unreadable

ControlPolicy = Literal["refuse", "text", "token"]

_HIDDEN = 0x100000  # the planes for private use: control tokens of the rows ...
_OWN = 0xF0000  # ... and those of the template


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of a tokenizer, and what to do with them in the text of rows."""

    policy: ControlPolicy
    tokens: tuple[str, ...]
    """All special tokens of the tokenizer."""
    refused: tuple[str, ...]
    """Those that a row may not bring along: all but the job's own."""
    end: str | None
    """What may stand at the end of a text that isn't a conversation."""

    @staticmethod
    def of(tokenizer: Any, policy: ControlPolicy, own: tuple[str, ...] = ()) -> ControlTokens:
        """`own` are the tokens that the job adds to the tokenizer."""
        added = tokenizer.added_tokens_decoder.values()
        tokens = sorted((str(each) for each in added if each.special), key=len, reverse=True)
        refused = tuple(token for token in tokens if token not in own)
        return ControlTokens(policy, tuple(tokens), refused, tokenizer.eos_token)

    @property
    def settings(self) -> tuple[str, ...]:
        """What decides the documents, for the key of the cache."""
        return (self.policy, *sorted(set(self.tokens) - set(self.refused)))

    def apply(self, found: Any) -> Any:
        """What a format has read of a row, as the policy wants it; Unreadable where it refuses."""
        if self.policy == "token" or not self.refused:
            return found
        if isinstance(found, str):
            return self._text(found)
        if isinstance(found, Text):
            return replace(found, text=self._text(found.text))
        if isinstance(found, tuple):  # a source and its target
            return tuple(map(self._text, found))
        if isinstance(found, Conversation):
            return Conversation(self._inside(found.messages), self._inside(found.tools))
        return found  # token ids, which are what they are

    def _text(self, text: str) -> str:
        ended = self.end is not None and text.endswith(self.end)
        inner = text[: -len(self.end)] if ended and self.end else text
        return str(self._inside(inner)) + text[len(inner) :]

    def _inside(self, value: Any) -> Any:
        """The value with each text in it, however deep, as the policy wants it."""
        if isinstance(value, str):
            return self._pattern.sub(self._replace, value)
        if isinstance(value, list):
            return [self._inside(each) for each in value]
        if isinstance(value, Mapping):
            return {self._inside(key): self._inside(each) for key, each in value.items()}
        return value

    def _replace(self, found: re.Match[str]) -> str:
        token = found.group()
        if self.policy == "refuse":
            raise Unreadable(
                f"{CONTROL_IN_TEXT} {token!r}; data.control_tokens: text reads it "
                "as text, token as that token"
            )
        return _stand_in(_HIDDEN, self.tokens.index(token), token)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.refused)))

    # To read them as text ---------------------------------------------------------------------

    def engine(self, tokenizer: Any) -> Any:
        """The tokenizer's engine; a copy that takes control tokens for text where that is asked."""
        if self.policy != "text":
            return tokenizer.backend_tokenizer
        from tokenizers import AddedToken, Tokenizer

        engine = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        known = {str(each): each for each in tokenizer.added_tokens_decoder.values()}
        engine.add_tokens(
            [
                AddedToken(
                    _stand_in(_OWN, number, token),
                    single_word=known[token].single_word,
                    lstrip=known[token].lstrip,
                    rstrip=known[token].rstrip,
                    normalized=False,
                    special=False,
                )
                for number, token in enumerate(self.tokens)
            ]
        )
        engine.encode_special_tokens = True
        return engine

    def shown(self, text: str) -> str:
        """The text as `engine` is to read it."""
        if self.policy != "text":
            return text
        for number, token in enumerate(self.tokens):
            text = text.replace(token, _stand_in(_OWN, number, token))
        for number, token in enumerate(self.tokens):
            text = text.replace(_stand_in(_HIDDEN, number, token), token)
        return text

    def renames(self, engine: Any) -> dict[int, int]:
        """The ids that stand in for the template's own control tokens, and whose they are."""
        if self.policy != "text":
            return {}
        stand_ins = [_stand_in(_OWN, number, token) for number, token in enumerate(self.tokens)]
        ids = map(engine.token_to_id, self.tokens)
        return dict(zip(map(engine.token_to_id, stand_ins), ids, strict=True))


AS_TOKENS = ControlTokens("token", (), (), None)
"""Texts as they are, for whoever knows what stands in them."""


def _stand_in(plane: int, number: int, token: str) -> str:
    """A text as long as the token, of a character that is used for nothing else."""
    return chr(plane + number) * len(token)
