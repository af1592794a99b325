"""Files and YAML, read and written so that nothing is lost and nothing waits."""
