"""Which modules are a decoder layer or hold some: adapters train parts of layers, no whole one."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from shardtune.errors import ModelError, Problem

_KEY = "adapter.modules_to_save"


def require_parts_of_layers(modules: Iterable[str], wanted: Collection[str]) -> None:
    """Refuses names in `wanted` that stand for whole layers: they are what strategies shard, and
    the trained copy that peft sets beside the frozen one is none of them.

    `modules` are the full names of all that the model has.
    """
    every = list(modules)
    layers = dict.fromkeys(layer for name in every if (layer := _layer_of(name)))
    problems = []
    for index, each in enumerate(wanted):
        called = [name for name in every if name == each or name.endswith(f".{each}")]
        held = [
            layer for layer in layers if any(f"{layer}.".startswith(f"{name}.") for name in called)
        ]
        if held:
            place = f"{_KEY}.{index}"
            problems.append(Problem(place, _fact(each, len(held)), _fix(held, every)))
    if problems:
        raise ModelError(problems)


def _layer_of(name: str) -> str | None:
    """`model.layers.3` of `model.layers.3.mlp`."""
    parts = name.split(".")
    numbered = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return None if not numbered else ".".join(parts[: numbered + 1])


def _fact(name: str, layers: int) -> str:
    what = "is a whole layer" if layers == 1 else f"holds {layers:,} layers"
    return f"{name!r} {what}, which can't be trained as one module beside an adapter"


def _fix(layers: list[str], modules: list[str]) -> str:
    if len(layers) > 1:
        return "train all weights with adapter: {type: none}, or name parts of layers, as mlp"
    start = f"{layers[0]}."
    parts = [name for name in modules if name.startswith(start) and "." not in name[len(start) :]]
    short = [part.split(".", 1)[1] if part.startswith("model.") else part for part in parts]
    return f"name its parts: [{', '.join(short)}]"
