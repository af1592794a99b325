"""Weights that transformers computes from several tensors of the files, one at a time.

Files of mixtures of experts have a tensor for each expert; the model has one for all of them. What
becomes of the tensors is transformers' own conversion, applied to the weights of one part, so that
a model that is to be sharded never has to be whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class FusedWeight:
    """One weight, and the tensors that it is made of."""

    name: str
    sources: Mapping[str, str]
    """By a tensor's name, which pattern of the conversion it belongs to; experts in their order."""
    converter: Any
    """transformers' `WeightConverter`."""

    def compute(self, tensors: Mapping[str, Tensor], config: Any) -> Tensor:
        """The weight, from all its tensors."""
        converter = deepcopy(self.converter)
        for tensor, pattern in self.sources.items():
            converter.add_tensor(self.name, tensor, pattern, tensors[tensor])
        (found,) = converter.convert(self.name, config=config).values()
        value: Tensor = found[0] if isinstance(found, list) else found
        return value


def own_names(
    model: Any, tensors: Iterable[str]
) -> tuple[dict[str, str], dict[str, FusedWeight], list[str]]:
    """Each tensor by the name that the model has for it, after transformers' own renamings; the
    weights that are computed from several; and those that only a whole model can compute."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if not isinstance(step, WeightRenaming)]
    by_pattern = {pattern: step for step in converters for pattern in step.source_patterns}
    known = model.state_dict()
    own: dict[str, str] = {}
    sources: dict[str, dict[str, str]] = {}
    for tensor in sorted(tensors, key=_by_number):
        prefix = model.base_model_prefix
        name, pattern = rename_source_key(tensor, renamings, converters, prefix, known)
        if name not in known and tensor in known:
            name, pattern = tensor, None
        if pattern is None:
            own[name] = tensor
        else:
            sources.setdefault(name, {})[tensor] = pattern
    fused = {
        name: FusedWeight(name, parts, by_pattern[next(iter(parts.values()))])
        for name, parts in sources.items()
    }
    split = sorted(name for name, each in fused.items() if len(each.converter.target_patterns) > 1)
    return own, {name: each for name, each in fused.items() if name not in split}, split


def _by_number(name: str) -> list[tuple[int, str]]:
    """Puts expert 10 after expert 9."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"\.", name)]
