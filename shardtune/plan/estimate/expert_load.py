"""Load imbalance of expert parallelism: how much more the busiest rank computes than the mean.

Routers don't choose experts evenly, and all ranks wait for the one whose experts are chosen most.
Which these are depends on model and data, so the planner assumes a spread.
"""

from __future__ import annotations

from math import pi, sqrt
from statistics import NormalDist

from shardtune.core.model.shape import ModelShape

GINI = 0.2
"""Gini coefficient of the tokens of a layer's experts. Measured on text for five published mixtures
by Ma et al., arXiv 2605.20982 (2026): 0.105 (DeepSeek-MoE-16B), 0.15 (Nemotron-30B), more than 0.24
(DeepSeek-V2-Lite, Qwen3.5-35B), Qwen3-30B in between. Chosen from the middle."""


def load_assumption(shape: ModelShape, ranks: int) -> list[str]:
    """What is assumed of it, for a person to read; nothing where ranks don't divide experts."""
    if shape.experts is None or ranks == 1:
        return []
    busiest = imbalance(shape, ranks)
    return [
        f"experts: the busiest of {ranks} ranks gets {busiest:.2f} x the mean of tokens and all "
        f"wait for it; assumed, by routers of published mixtures (Gini {GINI:g}, arXiv 2605.20982)"
    ]


def imbalance(shape: ModelShape, ranks: int) -> float:
    """Tokens of the busiest of so many ranks, over the mean.

    Loads of experts are taken as independent and normal, for which the deviation is Gini x sqrt(pi)
    of the mean. The experts of a rank even out: s = Gini sqrt(pi) / sqrt(experts of a rank). The
    largest of n such sums is expected s x z(n) above the mean, where z(n) is the quantile of the
    normal distribution at (n - 3/8) / (n + 1/4) (Blom).
    """
    if shape.experts is None or ranks == 1:
        return 1.0
    deviation = GINI * sqrt(pi) / sqrt(shape.experts.count / ranks)
    return 1 + deviation * NormalDist().inv_cdf((ranks - 3 / 8) / (ranks + 1 / 4))
