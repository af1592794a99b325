"""shardtune plans a fine-tuning run, trains it, and proves the plan against what it measured."""

__version__ = "0.1.0"
