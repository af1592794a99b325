"""Starts `train(job)` on several processes, and sees them to their end. Knows no strategy."""

# Not settings: how our launcher speaks to the ranks that it starts.
LAUNCHER_PID = "SHARDTUNE_LAUNCHER_PID"  # tells a rank that its parent is ours
HEARTBEAT_FD = "SHARDTUNE_PULSE_FD"  # the open file in which it shows what it is doing
STACK_FILE = "SHARDTUNE_STACK_FILE"  # where it writes its stack when it is asked to
SECRET = "SHARDTUNE_SECRET"  # noqa: S105  # holds what all processes of a run know
STORE_FILE = "SHARDTUNE_STORE_FILE"  # through which the ranks of one machine find each other
INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C
PREEMPTED = 143  # for one ended by SIGTERM
