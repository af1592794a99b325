"""What a person sees: the live view of a run, and its summary."""
