"""Property tests are timed by the suite's own limit: a busy machine isn't a failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("shardtune", deadline=None)
settings.load_profile("shardtune")
