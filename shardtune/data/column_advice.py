"""Columns that make no format as they are: what such a set is, and what its owner can do.

For sets that people bring from other kinds of training, or in shapes that one command mends.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

PREFERRED, REJECTED = "chosen", "rejected"
HEADER_WORDS = 40  # letters from which a column's name is taken for a row

_ANSWERS = f"format: instruction, columns: {{instruction: prompt, output: {PREFERRED}}}"
_TURNS = f"format: chat, columns: {{messages: {PREFERRED}}}"
_TEXTS = f"format: completion, columns: {{text: {PREFERRED}}}"


@dataclass(frozen=True)
class ColumnAdvice:
    """What is told beside the columns' names, and the fix."""

    fact: str
    fix: str


def preference_advice(
    columns: Collection[str], *, turns: bool | None = None
) -> ColumnAdvice | None:
    """For pairs of a better and a worse answer (DPO); `turns` says whether they are turns or texts,
    where that is known."""
    if not {PREFERRED, REJECTED} <= {*columns}:
        return None
    fact = f"{PREFERRED!r} and {REJECTED!r} are pairs for preference training (DPO), which "
    fact += "shardtune doesn't do"
    texts = _ANSWERS if "prompt" in columns else _TEXTS
    ways = {False: texts, True: _TURNS, None: f"{texts}; or, where they are turns, {_TURNS}"}
    return ColumnAdvice(fact, f"to train on the better answers: {ways[turns]}")


def judged_advice(name: str) -> ColumnAdvice:
    """For answers of which a column says whether they are good (KTO)."""
    fact = f"{name!r} says which answers are good (KTO), and shardtune would train on all of them"
    return ColumnAdvice(
        fact, f"keep the good ones: jq -c 'select(.{name}) | del(.{name})' OLD > NEW"
    )


def parted_turns_advice(prompt: str, answer: str) -> ColumnAdvice:
    """For turns that lie in two columns, as TRL has them."""
    fact = f"{prompt!r} and {answer!r} hold turns of one conversation"
    earlier = f".{prompt} | map(. + {{weight: 0}})"
    joined = f"jq -c '{{messages: (({earlier}) + .{answer})}}' OLD > NEW"
    return ColumnAdvice(fact, f"put them into one list of turns, `messages`: {joined}")


def nested_advice(name: str, keys: Collection[str], listed: bool) -> ColumnAdvice:
    """For columns that lie in an object, or in each of a list of them."""
    inner = ", ".join(map(repr, list(keys)[:8]))
    fact = f"{name!r} holds objects with {inner}, and columns are looked for at the top"
    each = f".{name}[]" if listed else f".{name}"
    return ColumnAdvice(fact, f"take them to the top: jq -c '. + {each}' OLD > NEW")


def number_advice(names: Collection[str]) -> ColumnAdvice:
    """For columns by the right names in which there are numbers."""
    fact = f"{' and '.join(map(repr, names))} hold numbers, and a row's parts are text"
    changes = "; ".join(f".{name} |= tostring" for name in names).replace("; ", " | ")
    return ColumnAdvice(fact, f"write them as text: jq -c '{changes}' OLD > NEW")


def header_advice(name: str) -> ColumnAdvice:
    """For a table without a first line that names its columns."""
    fact = f"the first line has to name the columns, and begins with {name[:HEADER_WORDS]!r}..."
    return ColumnAdvice(fact, "put a line with their names before it: sed -i '1i NAME,NAME' FILE")
