"""Puts a job's chat template into the tokenizer, so that training and inference use the same."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

import jinja2

from shardtune.core.host.render_limit import TEMPLATE_ERRORS, render_limit
from shardtune.core.model.chat_templates import (
    GIVEN_VARIABLES,
    KWARGS_KEY,
    TEMPLATE_KEY,
    TEMPLATE_TOKENS,
    read_chat_template,
)
from shardtune.core.model.template_variables import read_names, variables, with_defaults
from shardtune.errors import JobError, Problem, did_you_mean

_ANSWER = "<ANSWER>"  # no template says this by itself
_TRUTHS = {"yes", "no", "on", "off", "true", "false"}
"""Words for which YAML has others, or none any more: as texts all of them are true."""


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


def set_template_defaults(tokenizer: Any, values: Mapping[str, Any]) -> None:
    """Puts values of variables into the tokenizer's chat template, or templates; JobError if none
    of them reads one."""
    if not values:
        return
    own = tokenizer.chat_template
    if not own:
        fact = f"sets {', '.join(values)}, and the tokenizer has no chat template"
        fix = f"set {TEMPLATE_KEY} too, or leave this out"
        raise JobError(Problem(KWARGS_KEY, fact, fix))
    texts = own if isinstance(own, dict) else {"": own}
    _require_read(tokenizer, list(texts.values()), values)
    failed = _failure(tokenizer)
    changed = {name: with_defaults(text, values) for name, text in texts.items()}
    tokenizer.chat_template = changed if isinstance(own, dict) else changed[""]
    if not failed and (failed := _failure(tokenizer)):
        fact = f"with {_shown(values)} the template fails with a question and an answer: {failed}"
        fix = "give values that it takes, as the model's card has them"
        raise JobError(Problem(KWARGS_KEY, fact, fix))


def _require_read(tokenizer: Any, texts: list[str], values: Mapping[str, Any]) -> None:
    """Refuses names that would change nothing, and words that aren't what they look like."""
    # Tokens of the tokenizer's own (`image_token`) are given to a template as well.
    given = GIVEN_VARIABLES | inspect.signature(tokenizer.apply_chat_template).parameters.keys()
    given |= tokenizer.special_tokens_map.keys()
    try:
        read = set().union(*map(read_names, texts)) - given
        known = sorted(set().union(*map(variables, texts)) - given)
    except jinja2.TemplateSyntaxError as error:
        fact = f"is no valid template (line {error.lineno}): {error.message}"
        fix = f"{TEMPLATE_KEY}: another one, as a file or by name"
        raise JobError(Problem("the chat template", fact, fix)) from None
    for name, value in values.items():
        if name in given:
            fact = f"{name} is given to every template, and can't be set"
            raise JobError(Problem(KWARGS_KEY, fact, "leave it out"))
        if name not in read:
            near = did_you_mean(name, known)
            fact = f"the chat template never reads {name!r}; "
            fact += f"it reads {', '.join(known)}" if known else "it reads no variables"
            fix = f"did you mean {near!r}?" if near else "leave it out"
            raise JobError(Problem(KWARGS_KEY, fact, fix))
        if _looks_like_a_truth(value, texts):
            fact = f"{name} is the text {value!r}, which is as true as any text"
            raise JobError(Problem(KWARGS_KEY, fact, f"write {name}: true, or {name}: false"))


def _looks_like_a_truth(value: Any, texts: list[str]) -> bool:
    """Whether this is a word for true or false, and no template compares anything with it."""
    return (
        isinstance(value, str)
        and value.lower() in _TRUTHS
        and not any(f"{quote}{value}{quote}" in text for text in texts for quote in "'\"")
    )


def _failure(tokenizer: Any) -> str:
    """Why its template can't write a question and its answer; nothing where it can."""
    try:
        _rendered(tokenizer)
    except TEMPLATE_ERRORS as error:
        return str(error) or type(error).__name__
    return ""


def _shown(values: Mapping[str, Any]) -> str:
    """As a job has them."""
    return json.dumps(dict(values), ensure_ascii=False)


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
