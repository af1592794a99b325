"""Starts `train(job)` on several processes, and joins them. Knows nothing of strategies."""

STARTED_BY_US = "SHARDTUNE_LAUNCHER_PID"  # not a setting: tells a rank that its parent is ours
INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C
