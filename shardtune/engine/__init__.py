"""What really runs. An engine does one whole optimizer step; nothing above it asks how."""
