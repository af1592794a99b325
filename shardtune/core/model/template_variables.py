"""Variables of a chat template, and defaults for them in its own text (`chat_template_kwargs`).

In the text, a value goes wherever the template goes: into training, the result's tokenizer, and
every server that reads it. Whoever asks may still set the variable otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shardtune.core.model.chat_templates import GIVEN_VARIABLES

_FUNCTIONS = {"raise_exception", "strftime_now"}
_ASKS = {"defined", "undefined", "default", "d"}
"""Tests and filters for what may not be there."""


class _Generation(Extension):
    """`{% generation %}`, around what a model writes itself: a tag of transformers."""

    tags = {"generation"}  # noqa: RUF012  jinja's own

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols])


def read_names(template: str) -> set[str]:
    """Every name that the template may read before it has set it, but for functions."""
    read = jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(template))
    return read - _ENVIRONMENT.globals.keys() - _FUNCTIONS


def variables(template: str) -> set[str]:
    """The names of these that are meant to be set from outside: those that the template never sets,
    or asks whether they are set."""
    tree = _ENVIRONMENT.parse(template)
    own = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    asked = {
        each.node.name
        for each in tree.find_all((nodes.Test, nodes.Filter))
        if each.name in _ASKS and isinstance(each.node, nodes.Name)
    }
    return read_names(template) - GIVEN_VARIABLES - (own - asked)


def with_defaults(template: str, values: Mapping[str, Any]) -> str:
    """The template, which takes these values where it is given no others."""
    lines = [
        # The end of a line behind a tag isn't written, and keeps the first line a line.
        f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}\n"
        for name, value in values.items()
    ]
    own = "".join(lines)
    return template if template.startswith(own) else own + template


def _literal(value: Any) -> str:
    """The value as jinja writes it."""
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value, ensure_ascii=False)  # jinja takes JSON's escapes, but no surrogates
