"""Tests of shardtune.evaluation."""
