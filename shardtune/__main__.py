"""`python -m shardtune`."""

from shardtune.cli.main import program

program()
