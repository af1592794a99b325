"""Starts `train(job)` on several processes, and joins them. Knows nothing of strategies."""
