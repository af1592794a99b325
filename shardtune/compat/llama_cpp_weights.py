"""llama.cpp multiplies with weights as they lie in a file."""

from __future__ import annotations

from typing import Any

from shardtune.compat.versioned_change import TargetChanged, change


@change("llama-cpp-python", since="0.3", before="0.4", lost="8-bit files may crash it on some CPUs")
def without_repacking() -> None:
    """No copies in the order of a CPU's units, for which `Llama` has no argument: those for matrix
    tiles (AMX) end 0.3.36 with SIGILL, at its first product with 8-bit weights."""
    from llama_cpp import llama_cpp

    default = llama_cpp.llama_model_default_params
    if not hasattr(default(), "use_extra_bufts"):
        raise TargetChanged("llama.cpp's parameters of a model have no use_extra_bufts")

    def as_stored() -> Any:
        found = default()
        found.use_extra_bufts = False
        return found

    llama_cpp.llama_model_default_params = as_stored
