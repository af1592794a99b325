"""Tests of shardtune.track."""
