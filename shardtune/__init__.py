"""shardtune plans a fine-tuning run, trains it, and compares the plan with what it measures.

    from shardtune import Job, load_job, train, forecast, rank_strategies, load_result

Each name is imported when it is first used: `import shardtune` loads neither torch nor pydantic.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardtune.api import forecast, load_job, load_result, rank_strategies, train
    from shardtune.config.job import Job

__version__ = "0.1.0"
__all__ = ["Job", "forecast", "load_job", "load_result", "rank_strategies", "train"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "shardtune.config.job" if name == "Job" else "shardtune.api"
    found = getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """The import system binds each submodule to its package. Here `train` is the public function:
    the module `shardtune.train`, a run from top to bottom, doesn't replace it."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
