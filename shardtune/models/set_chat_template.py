"""Puts a job's chat template into the tokenizer, so that training and inference use the same."""

from __future__ import annotations

from typing import Any

import jinja2

from shardtune.core.host.render_limit import render_limit
from shardtune.core.model.chat_templates import (
    TEMPLATE_KEY,
    TEMPLATE_TOKENS,
    read_chat_template,
)
from shardtune.errors import JobError, Problem

_ANSWER = "<ANSWER>"  # no template says this by itself


def set_chat_template(tokenizer: Any, asked: str) -> None:
    """Gives the tokenizer the template with that name, or from that file; JobError if it can't
    write it."""
    template = read_chat_template(asked)
    vocabulary = tokenizer.get_vocab()
    lacking = [token for token in TEMPLATE_TOKENS.get(asked, ()) if token not in vocabulary]
    if lacking:
        fact = f"{asked!r} writes {', '.join(lacking)}, which the tokenizer doesn't have"
        plain = ", ".join(name for name, tokens in TEMPLATE_TOKENS.items() if not tokens)
        quoted = ", ".join(f'"{token}"' for token in lacking)
        fix = f"choose one that needs no tokens of its own ({plain}), or add these: "
        raise JobError(Problem(TEMPLATE_KEY, fact, f"{fix}model.add_tokens: [{quoted}]"))
    if asked in TEMPLATE_TOKENS and _opens_texts(tokenizer):
        template = "{{- bos_token -}}\n" + template
    tokenizer.chat_template = template
    _require_sound(tokenizer, asked)


def end_of_turn(tokenizer: Any) -> int | None:
    """The special token with which the tokenizer's chat template ends an answer, if it does."""
    _, _, end = _rendered(tokenizer).rpartition(_ANSWER)
    ids = tokenizer(end.strip(), add_special_tokens=False)["input_ids"]
    return int(ids[0]) if ids and ids[0] in tokenizer.added_tokens_decoder else None


def _opens_texts(tokenizer: Any) -> bool:
    """Whether the tokenizer puts its beginning-of-text token before a text."""
    first = tokenizer("x")["input_ids"][0]
    return tokenizer.bos_token_id is not None and bool(first == tokenizer.bos_token_id)


def _require_sound(tokenizer: Any, asked: str) -> None:
    """Refuses a template that can't write a question and its answer."""
    try:
        _rendered(tokenizer)
    except jinja2.TemplateError as error:
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        fact = f"{asked} fails with a question and an answer{line}: {error.message or error}"
        if "eos_token" in str(error):
            fact = f"{asked!r} ends answers with eos_token, and the tokenizer has none"
        raise JobError(Problem(TEMPLATE_KEY, fact, "correct the template")) from None


def _rendered(tokenizer: Any) -> str:
    question, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}
    with render_limit():
        return str(tokenizer.apply_chat_template([question, answer], tokenize=False))
