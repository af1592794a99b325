"""Words that people know from Hugging Face, torch and accelerate, understood where they put them.

`bf16: true`, `gradient_checkpointing: true`, `deepspeed: zero2.json`, `sharding: HYBRID_SHARD`: at
the top of a job or in the section where it has the like. Each becomes the key that a job has for
it; `shardtune show` and the start of a run say what it became. Where the job says something else
as well it is refused, unless one of the two stands on the command line, which wins.
"""

from __future__ import annotations

import json
from typing import Any

from shardtune.core.files.yaml_document import KeyPath, dotted
from shardtune.errors import JobError, Problem
from shardtune.parallel.published_names import STRATEGY_KEYS, published_strategy, sharding_in

Keys = tuple[str, ...]
"""A path without places in lists."""
_PRECISION: Keys = ("train", "precision")
_CHECKPOINTING: Keys = ("train", "gradient_checkpointing")
_STRATEGY: Keys = ("strategy",)
_HOLDERS: tuple[Keys, ...] = ((), ("train",))
"""Where people put what has no section in other tools."""


def understand(
    value: dict[str, Any], origins: dict[KeyPath, str], command_line: str
) -> dict[KeyPath, str]:
    """Replaces such words in `value` and in `origins`; returns what each key of ours came from.
    Raises JobError where a job contradicts itself. `command_line` is the origin of overrides."""
    words = _Words(value, origins, command_line)
    for holder in _HOLDERS:
        words.find_precision(holder)
        words.find_checkpointing(holder)
        words.find_strategy(holder)
    words.find_sharding()
    if words.problems:
        raise JobError(words.problems)
    return words.understood


class _Words:
    def __init__(
        self, value: dict[str, Any], origins: dict[KeyPath, str], command_line: str
    ) -> None:
        self.value = value
        self.origins = origins
        self.command_line = command_line
        self.problems: list[Problem] = []
        self.understood: dict[KeyPath, str] = {}

    # What is looked for -----------------------------------------------------------------------

    def find_precision(self, holder: Keys) -> None:
        """`bf16` and `fp16`: true, false, or axolotl's auto. Neither is fp32, as in Hugging Face's
        Trainer; where the other may be, nothing is said."""
        section = self._section(holder)
        given = {
            word: section[word]
            for word in ("bf16", "fp16")
            if isinstance(section.get(word), bool) or section.get(word) == "auto"
        }
        if given == {"bf16": True, "fp16": True}:
            told = [word for word in given if self._is_override((*holder, word))]
            if len(told) == 1:
                given = {word: word == told[0] for word in given}
        if given == {"bf16": True, "fp16": True}:
            fact = "`bf16: true` and `fp16: true` ask for two precisions"
            path = (*holder, "fp16")
            place = f"{self.origins[path]}: {dotted(path)}"
            self.problems.append(Problem(place, fact, "keep one of them"))
            return
        for word, asked in given.items():
            path, there = (*holder, word), self._at(_PRECISION)
            if asked is True:
                self._put(_PRECISION, word, path)
            elif asked is False and there == word and not self._is_override(_PRECISION):
                self._contradiction(path, _PRECISION)
            elif asked is False and there is None and not {True, "auto"} & {*given.values()}:
                self._put(_PRECISION, "fp32", path)
            else:
                self._drop(path)

    def find_checkpointing(self, holder: Keys) -> None:
        """`gradient_checkpointing` or `activation_checkpointing`: true is every layer."""
        section = self._section(holder)
        for word in ("gradient_checkpointing", "activation_checkpointing"):
            if isinstance(section.get(word), bool):
                level = "full" if section[word] else "none"
                self._put(_CHECKPOINTING, level, (*holder, word))

    def find_strategy(self, holder: Keys) -> None:
        """A strategy that another tool calls by a key of its own."""
        section = self._section(holder)
        for word in [word for word in STRATEGY_KEYS if word in section]:
            path = (*holder, word)
            settings = published_strategy(word, section[word])
            if settings is not None:
                self._put_settings(settings, path)
            else:
                fact = f"`{self._said(path)}` names no strategy"
                place = f"{self.origins[path]}: {dotted(path)}"
                self.problems.append(Problem(place, fact, STRATEGY_KEYS[word]))

    def find_sharding(self) -> None:
        """torch's names in the section `strategy` itself."""
        section = self._section(_STRATEGY)
        found = sharding_in(section)
        if found is None:
            return
        word, settings = found
        path = (*_STRATEGY, word)
        if section.keys() == {"type", word}:  # NO_SHARD is another type than torch's other names
            self._drop((*_STRATEGY, "type"))
        self._put_settings(settings, path)

    # What becomes of it -----------------------------------------------------------------------

    def _put_settings(self, settings: dict[str, object], theirs: Keys) -> None:
        """Puts several keys of `strategy`, in the place of one of theirs."""
        said, place = self._said(theirs), self.origins[theirs]
        there, kind = self.value.get("strategy"), self._at((*_STRATEGY, "type"))
        if isinstance(there, str) or kind not in (None, settings["type"]):
            where = (*_STRATEGY, "type") if isinstance(there, dict) else _STRATEGY
            if self._is_override(where) and place != self.command_line:
                self._drop(theirs)
                return
            if place != self.command_line:
                self._contradiction(theirs, where)
                return
            self._forget(_STRATEGY)
        self._drop(theirs)
        for key, new in settings.items():
            self._put((*_STRATEGY, key), new, theirs, said, place)

    def _put(self, ours: Keys, new: object, theirs: Keys, said: str = "", place: str = "") -> None:
        """Writes a value under our key, unless the job has another one there."""
        said, place = said or self._said(theirs), place or self.origins[theirs]
        there = self._at(ours)
        if theirs != ours and there not in (None, new) and place != self.command_line:
            if not self._is_override(ours):
                self._contradiction(theirs, ours, said, place)
            self._drop(theirs)
            return
        if not isinstance(self.value.get(ours[0], {}), dict):
            return  # what stands there is told by the validation
        self._drop(theirs)
        if ours[0] not in self.value:
            self.value[ours[0]] = {}
            self.origins[ours[:1]] = place
        self.value[ours[0]][ours[1]] = new
        self.origins[ours] = f"{place} (`{said}`)"
        self.understood[ours] = f"`{said}`, {place}"

    def _is_override(self, path: Keys) -> bool:
        return self.origins.get(path) == self.command_line

    def _forget(self, section: Keys) -> None:
        """Removes a section that the command line replaces."""
        del self.value[section[0]]
        for path in [path for path in self.origins if path[: len(section)] == section]:
            del self.origins[path]

    def _drop(self, path: Keys) -> None:
        self._section(path[:-1]).pop(path[-1], None)
        self.origins.pop(path, None)

    def _contradiction(self, theirs: Keys, ours: Keys, said: str = "", place: str = "") -> None:
        there = f"`{dotted(ours)}: {_plain(self._at(ours))}` ({self.origins[ours]})"
        fact = f"`{said or self._said(theirs)}` and {there} contradict each other"
        key = dotted(ours)
        self.problems.append(
            Problem(place or self.origins[theirs], fact, f"keep one of them; `{key}` is ours")
        )

    # Small parts ------------------------------------------------------------------------------

    def _section(self, path: Keys) -> dict[str, Any]:
        found = self._at(path)
        return found if isinstance(found, dict) else {}

    def _at(self, path: Keys) -> Any:
        found: Any = self.value
        for part in path:
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def _said(self, path: Keys) -> str:
        return f"{path[-1]}: {_plain(self._at(path))}"


def _plain(value: object) -> str:
    """As YAML would have it, on one line."""
    return value if isinstance(value, str) else json.dumps(value)
