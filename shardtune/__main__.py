"""`python -m shardtune`."""

from shardtune.cli import program

program()
