"""Models: where they come from, how they are loaded, adapted and written."""
