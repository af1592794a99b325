"""DeepSpeed's access to files, which it compiles when it is first used; that takes minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path

# What one environment compiled, torch compiles anew for another: its headers lie elsewhere.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix, "torch_extensions")))
_LOAD = "from deepspeed.ops.op_builder import AsyncIOBuilder as Op; Op().load(verbose=False)"


def is_compiled() -> bool:
    return Path(os.environ["TORCH_EXTENSIONS_DIR"], "async_io", "async_io.so").exists()


def missing() -> str:
    """Why a test that swaps to files can't run now; nothing where it can."""
    if find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    if find_library("aio") is None:
        return "libaio is not installed"
    if not is_compiled():
        return "DeepSpeed's async_io isn't compiled; `pytest -m build` does so, for minutes"
    return ""


def compile_it() -> None:
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, "-c", _LOAD], env=environment, check=True, timeout=1500)
