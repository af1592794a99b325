"""Families of models (transformers' `model_type`) whose layers with one input can be computed
together, told by what their code does in between. The engine and the planner go by it."""

from __future__ import annotations

SHARED_INPUT_FAMILIES = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3", "granite", "olmo2"}
)
"""Attention and MLP use their input for these layers and its shape alone."""
ROPE_FAMILIES = frozenset({"llama", "mistral", "gemma", "granite"})
"""Every attention turns halves of whole heads, with nothing between that and its products."""
RESIDUAL_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})
"""What attention and MLP give is added, as it is, to what went past them; the MLP's activation is
`silu`."""
