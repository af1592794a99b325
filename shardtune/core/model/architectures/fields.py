"""Reads a config.json: what is missing or of a wrong kind is collected and told at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardtune.errors import ModelError, Problem


class Fields:
    """The values of one config. Of several keys the first that is there counts: older configs
    call the same thing otherwise. A value that is null counts as missing."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self.name = name
        self.problems: list[Problem] = []

    def count(self, *keys: str, default: int | None = None) -> int:
        """A whole number of at least one."""
        given = self.optional(*keys, default=default)
        if given is None:
            fix = f"name the whole config.json of {self.name}"
            self._problem(keys[0], "is missing", fix)
            return 1
        if given < 1:
            self._problem(keys[0], f"is {given}; it must be at least 1", "correct the config")
            return 1
        return given

    def optional(self, *keys: str, default: int | None = None) -> int | None:
        """A whole number of at least zero, or `default`."""
        key, given = self._first(keys)
        if given is None:
            return default
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            self._problem(key, f"is {given!r}, not a whole number", "correct the config")
            return 1
        return given

    def share(self, *keys: str, default: float = 0.0) -> float:
        """A number from zero to one, such as a dropout."""
        key, given = self._first(keys)
        if given is None:
            return default
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
            self._problem(key, f"is {given!r}, not a number from 0 to 1", "correct the config")
            return default
        return float(given)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        given = self.config.get(key)
        if given is None:
            return default
        if not isinstance(given, bool):
            self._problem(key, f"is {given!r}, not true or false", "correct the config")
            return default
        return given

    def word(self, *keys: str, default: str) -> str:
        """A text."""
        key, given = self._first(keys)
        if given is None:
            return default
        if not isinstance(given, str):
            self._problem(key, f"is {given!r}, not a word", "correct the config")
            return default
        return given

    def items(self, key: str) -> list[Any] | None:
        """A list, if there is one."""
        given = self.config.get(key)
        if given is not None and not isinstance(given, list):
            self._problem(key, f"is {given!r}, not a list", "correct the config")
            return None
        return given

    def divided(self, key: str, whole: int, parts: int) -> int:
        """`whole` over `parts`, where the architecture needs that to be a whole number."""
        if whole % parts:
            fact = f"is {parts}, which doesn't divide {whole}"
            self._problem(key, fact, "correct the config")
        return max(whole // parts, 1)

    def done(self) -> None:
        """Raises what has been found."""
        if self.problems:
            raise ModelError(self.problems)

    def _first(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        for key in keys:
            if self.config.get(key) is not None:
                return key, self.config[key]
        return keys[0], None

    def _problem(self, key: str, fact: str, fix: str) -> None:
        self.problems.append(Problem(f"{self.name} config.json: {key}", fact, fix))
