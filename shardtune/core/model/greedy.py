"""Where sampling is none."""

GREEDY_BELOW = 1e-5
"""Temperatures that draw nothing but the likeliest token, and by which logits may overflow."""
