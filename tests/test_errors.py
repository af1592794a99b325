"""Errors that a person can act on."""

from __future__ import annotations

import pickle

import pytest

from shardtune import errors
from shardtune.errors import JobError, Problem, ShardtuneError, did_you_mean

TWO = (Problem("job.yaml:3: train.steps", "is 0", "give at least 1"), Problem("a.jsonl:7", "bad"))


def test_a_problem_names_place_fact_and_fix() -> None:
    assert str(TWO[0]) == "job.yaml:3: train.steps: is 0\n    fix: give at least 1"
    assert str(TWO[1]) == "a.jsonl:7: bad"
    assert str(Problem("", "nothing works", "sleep")) == "nothing works\n    fix: sleep"


def test_an_error_is_a_list_of_problems() -> None:
    assert JobError(TWO).problems == TWO
    assert JobError(TWO[0]).problems == TWO[:1]
    assert JobError("too bad", fix="cry").problems == (Problem("", "too bad", "cry"),)
    assert str(JobError(TWO)) == f"{TWO[0]}\n{TWO[1]}"


@pytest.mark.parametrize("name", ["JobError", "DataError", "ModelError", "RunError", "LaunchError"])
def test_errors_cross_processes_whole(name: str) -> None:
    kind = getattr(errors, name)
    copy = pickle.loads(pickle.dumps(kind(TWO)))
    assert type(copy) is kind
    assert copy.problems == TWO
    assert issubclass(kind, ShardtuneError)
    assert copy.exit_code > 0


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = errors.__doc__ or ""
    for kind in ShardtuneError.__subclasses__():
        assert kind.__name__ in drawn


def test_only_a_near_word_is_meant() -> None:
    assert did_you_mean("stpes", ["steps", "seed"]) == "steps"
    assert did_you_mean("zebra", ["steps", "seed"]) == ""
    assert did_you_mean("x", []) == ""
