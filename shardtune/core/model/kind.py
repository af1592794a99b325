"""The kind of a model: a decoder alone (causal language model), or an encoder with a decoder
(sequence-to-sequence).

All that follows from it asks here: which class of transformers loads the model, how a row becomes
tokens, what its forward pass is told, which strategies take it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from shardtune.errors import ModelError, Problem

ModelKind = Literal["decoder", "encoder_decoder"]
"""`decoder` continues one sequence; `encoder_decoder` reads a source and writes a target."""

WITH_ENCODER = ("bart", "mt5", "t5")
"""Families (transformers' `model_type`) with an encoder that are trained. They have it unless their
config.json denies it."""
BIDIRECTIONAL = frozenset(
    {"bert", "bert-generation", "big_bird", "camembert", "cpmant", "data2vec-text", "electra",
     "ernie", "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
     "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"}
)  # fmt: skip
"""Families for which transformers has a causal language model, although theirs read a text in both
directions unless their config.json says otherwise (`is_decoder`; of XLM `causal`)."""


def kind_of(config: Any) -> ModelKind:
    """The kind that a configuration of transformers, or a config.json, describes."""
    if isinstance(config, Mapping):
        both = config.get("is_encoder_decoder", config.get("model_type") in WITH_ENCODER)
    else:
        both = getattr(config, "is_encoder_decoder", False)
    return "encoder_decoder" if both else "decoder"


def require_trained_family(config: Any, name: str) -> None:
    """Refuses models of families that aren't trained; `name` is the model's. Training would go
    wrong without a word.

    One that sees what comes after a token learns nothing from having to predict it. Targets of most
    encoder-decoders aren't made as sources are: the tokenizers of NLLB, M2M100 and mBART have a
    mode for them, which puts the language first.
    """
    read = config.get if isinstance(config, Mapping) else partial(getattr, config)
    family = read("model_type", None)
    if family in BIDIRECTIONAL and not (read("is_decoder", False) or read("causal", False)):
        fact = f"is {family!r}, which sees a whole text at once, the token to be predicted as well"
        raise ModelError(Problem(f"{name} config.json: model_type", fact, "choose a decoder"))
    if kind_of(config) == "decoder" or family in WITH_ENCODER:
        return
    fact = (
        f"is {family!r}, an encoder-decoder family that is not supported: its targets are untested"
    )
    fix = f"choose a model of a family that is trained: {', '.join(WITH_ENCODER)}"
    raise ModelError(Problem(f"{name} config.json: model_type", fact, fix))
