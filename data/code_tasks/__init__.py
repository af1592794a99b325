"""The hand-written task templates of the code set, one module per subject."""

from __future__ import annotations

from . import (
    algorithms,
    dates,
    files,
    lists,
    mappings,
    numbers,
    parsing,
    recursion,
    regexes,
    sets,
    shell,
    sorting,
    sql,
    strings,
)
from .task import Task

_MODULES = (
    strings,
    parsing,
    lists,
    mappings,
    sets,
    numbers,
    dates,
    files,
    sorting,
    recursion,
    algorithms,
    sql,
    shell,
    regexes,
)

TASKS: dict[str, Task] = {
    f"{module.__name__.rpartition('.')[2]}/{task.name}": task
    for module in _MODULES
    for task in module.TASKS
}
