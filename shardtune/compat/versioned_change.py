"""A change to another library: its versions, and what is lost where its target is another one."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_said: set[str] = set()


class TargetChanged(Exception):
    """What is to be changed isn't what the change was written for."""


def change(
    library: str, *, since: str, before: str, lost: str
) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """Marks a function that changes `library`, for versions from `since` and `before` another.

    Elsewhere, or where the target is another one (TargetChanged, ImportError, AttributeError), it
    changes nothing, returns None, and says once in one line what is `lost`.
    """

    def decorate(apply: Callable[P, T]) -> Callable[P, T | None]:
        @wraps(apply)
        def applied(*args: P.args, **kwargs: P.kwargs) -> T | None:
            try:
                require_version(library, since, before)
                return apply(*args, **kwargs)
            except (TargetChanged, ImportError, AttributeError) as error:
                say_once(f"{apply.__name__}: {error}; {lost}")
                return None

        return applied

    return decorate


def require_version(library: str, since: str, before: str) -> None:
    """Raises TargetChanged where another version is installed, or none."""
    try:
        found = version(library)
    except PackageNotFoundError:
        raise TargetChanged(f"{library} is not installed") from None
    if not _numbers(since) <= _numbers(found) < _numbers(before):
        raise TargetChanged(f"{library} {found} is not one of {since} to {before}")


def say_once(line: str) -> None:
    """Warns of what is lost; once in a process."""
    if line not in _said:
        _said.add(line)
        _LOG.warning("%s", " ".join(line.split()))


def _numbers(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])
