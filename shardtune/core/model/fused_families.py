"""Model families (transformers' `model_type`) whose layers can be fused, by what their code does.
The fused layers and the planner go by it."""

from __future__ import annotations

SHARED_INPUT_FAMILIES = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3"),
        *("granite", "olmo2", "starcoder2", "phi3", "mixtral", "qwen3_moe", "olmoe", "gpt_oss"),
    }
)
"""Layers with a shared input (Q, K, V; gate, up) can be one GEMM: attention and MLP use their input
for these layers and its shape alone. Phi-3 has them as one layer already."""
ROPE_FAMILIES = frozenset({"llama", "mistral", "gemma", "gemma2", "granite"})
"""RoPE rotates halves of whole heads, right behind the Q and K projections."""
RESIDUAL_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3"})
"""The outputs of attention and MLP are added to the residual as they are; the MLP is SwiGLU."""
OWN_GATE_FAMILIES = frozenset({"gpt_oss"})
"""Experts have biases, or another activation than SwiGLU's."""
LARGEST_EXPERT_RANK = 4
"""Of LoRA on SwiGLU experts that are computed by `models/experts/swiglu_experts.py`: beyond it a
product of its own is faster."""
