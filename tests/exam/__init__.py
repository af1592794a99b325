"""The fault exam: what a run promises when something goes wrong, put to the test."""
