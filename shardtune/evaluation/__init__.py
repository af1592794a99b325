"""Benchmarks: tasks, metrics, judges, and how sure one can be of a figure."""
