"""Searches runs by the values of their jobs: `strategy=fsdp lora rank=16 loss<2`.

A bare word has to occur in the run's name, its state or a value of its job. `key=value` compares a
value: the key is a path, or the end of one; a section stands for its type or name. With `<`, `<=`,
`>` and `>=` numbers are compared. A run is found if all words are true of it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from shardtune.core.files.yaml_leaves import Scalar
from shardtune.core.runs.run_history import JobValues

_TERM = re.compile(r"([\w.-]+)(<=|>=|!=|<|>|=)(.*)", re.DOTALL)
_COMPARED: dict[str, Callable[[float, float], bool]] = {
    "<": lambda found, asked: found < asked,
    "<=": lambda found, asked: found <= asked,
    ">": lambda found, asked: found > asked,
    ">=": lambda found, asked: found >= asked,
}


@dataclass(frozen=True)
class SearchedRun:
    """What a run is searched by."""

    name: str
    job: JobValues
    facts: Mapping[str, Scalar]
    """What isn't in the job: state, step, loss."""

    def values(self, key: str) -> Iterator[Scalar]:
        """All values that a key may mean."""
        if key in self.facts:
            yield self.facts[key]
        names = (key, f"{key}.type", f"{key}.name")
        ends = tuple(f".{name}" for name in names)
        for path, value in self.job.items():
            if (path := path.lower()) in names or path.endswith(ends):
                yield value


def matches(query: str, run: SearchedRun) -> bool:
    """Whether every word of the query is true of a run."""
    return all(_is_true(word, run) for word in _words(query.lower()))


def _words(query: str) -> list[str]:
    """Quotes hold a value with blanks together; where they aren't closed they are letters."""
    try:
        return shlex.split(query)
    except ValueError:
        return query.split()


def _is_true(word: str, run: SearchedRun) -> bool:
    term = _TERM.fullmatch(word)
    if term is None:
        texts = (run.name, *(_text(value) for value in (*run.facts.values(), *run.job.values())))
        return any(word in text.lower() for text in texts)
    key, sign, asked = term.groups()
    if sign == "!=":
        return not any(_equal(value, asked) for value in run.values(key))
    if sign == "=":
        return any(_equal(value, asked) for value in run.values(key))
    limit = _number(asked)
    found = (_number(value) for value in run.values(key))
    return limit is not None and any(
        _COMPARED[sign](each, limit) for each in found if each is not None
    )


def _equal(value: Scalar, asked: str) -> bool:
    found, limit = _number(value), _number(asked)
    if found is not None and limit is not None:
        return found == limit
    text = _text(value).lower()
    # A path is known by its last part, too: `model=smollm2` of `/models/smollm2`.
    return asked in (text, text.rsplit("/", 1)[-1])


def _text(value: Scalar) -> str:
    return "" if value is None else str(value)


def _number(value: Scalar) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
