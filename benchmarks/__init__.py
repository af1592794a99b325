"""One command each; every one writes its table into docs/benchmarks/."""
