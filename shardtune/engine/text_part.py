"""Models that also take pictures or sounds, of which only the text part is trained here."""

from __future__ import annotations

from torch import nn

from shardtune.core.model.kind import kind_of
from shardtune.core.model.peft_wrapper import unwrap_model


def weights_beside_text(model: nn.Module) -> list[str]:
    """The names of weights that text never goes through: those of the encoders of pictures and
    sounds, and of what leads from them into the decoder. None where a model takes text alone."""
    causal = unwrap_model(model)
    config = getattr(causal, "config", None)
    if config is None or config.get_text_config() is config or kind_of(config) != "decoder":
        return []
    ends = (causal.get_decoder(), causal.get_output_embeddings())
    used = {each for end in ends if end is not None for each in end.parameters()}
    return [name for name, each in model.named_parameters() if each not in used]


def modules_beside_text(model: nn.Module) -> list[str]:
    """The outermost modules that have no other weights."""
    beside = frozenset(weights_beside_text(model))
    found: list[str] = []
    for name, module in model.named_modules() if beside else ():
        own = [weight for weight, _ in module.named_parameters(prefix=name)]
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if own and not inside and beside.issuperset(own):
            found.append(name)
    return found
