"""The machine under a run: what it has, its network, its processes."""
