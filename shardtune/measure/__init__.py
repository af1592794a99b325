"""What a run really does: time, throughput, memory."""
