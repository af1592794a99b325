"""One file a strategy: its fields, the layout that declares it, and the engine that it builds.

A new strategy is one file here and one member of this union.
"""

from __future__ import annotations

from shardtune.strategies.ddp import DDP

Strategy = DDP
"""Every strategy that a job can name. The next one makes this a union discriminated on `type`."""

__all__ = ["DDP", "Strategy"]
