"""Fixes that the planner and the rules offer, pasted: each must do what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.random_jobs import Drawn, draw, draw_wide
from shardtune.cli.main import main
from shardtune.config.job import Job
from shardtune.config.job_file import load_job
from shardtune.config.rules import check
from shardtune.core.units import GIB
from shardtune.errors import ShardtuneError
from shardtune.plan.cluster import Cluster, parse_cluster
from shardtune.plan.forecast import Forecast, forecast
from shardtune.plan.on_cluster import resolve_as_asked
from shardtune.plan.remedies import OTHER_RESULT
from shardtune.plan.this_machine import offer

OFFER = re.compile(
    r"(?:--cluster (?P<cluster>\S+) ?)?(?P<words>[^(]*?)  \((?P<larger>a larger cluster; )?"
    r"(?P<how>the same result|another result); (?P<rest>.+)\)"
)
SET = re.compile(r"set (?P<key>[a-z_.]+): (?P<values>[a-z0-9_]+(?:(?:, | or )(?!or )[a-z0-9_]+)*)")


@dataclass(frozen=True)
class Asked:
    """A job as it is written and as it would run."""

    drawn: Drawn
    written: Job
    job: Job

    @property
    def found(self) -> Forecast:
        return forecast(self.job, self.drawn.shape, self.drawn.cluster)


def written(drawn: Drawn, words: list[str], folder: Path) -> Job:
    path = folder / "job.json"
    path.write_text(json.dumps(drawn.document), encoding="utf-8")
    return load_job(path, words).job


def resolved(drawn: Drawn, cluster: Cluster, words: list[str], folder: Path) -> Job:
    """The job with these overrides, as `estimate` would have it."""
    job = resolve_as_asked(written(drawn, words, folder), drawn.shape, cluster).job
    check(job, lambda key: ".".join(map(str, key)))
    return job


def too_large(jobs: Iterable[Drawn], folder: Path) -> Iterator[Asked]:
    """Random jobs that may run on their cluster, and don't fit there."""
    for drawn in jobs:
        if drawn.document["strategy"]["type"] == "auto":
            continue  # it takes a strategy that fits, and is slow to draw
        try:
            as_written = written(drawn, [], folder)
            asked = Asked(drawn, as_written, resolved(drawn, drawn.cluster, [], folder))
            fits = asked.found.fits
        except ShardtuneError:
            continue
        if not fits:
            yield asked


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "fixes"), [(1, 8), pytest.param(2, 80, marks=pytest.mark.long)])
def test_what_is_offered_fits_when_it_is_pasted(seed: int, fixes: int, tmp_path: Path) -> None:
    pasted = 0
    for asked in islice(too_large(draw(seed), tmp_path), fixes):
        drawn = asked.drawn
        text = offer(asked.job, drawn.shape, drawn.cluster, written=asked.written)
        if text.startswith("no cluster"):
            continue
        match = OFFER.fullmatch(text)
        assert match is not None, text
        cluster = parse_cluster(match["cluster"]) if match["cluster"] else drawn.cluster
        words = match["words"].split()
        job = resolved(drawn, cluster, words, tmp_path)
        found = forecast(job, drawn.shape, cluster)
        assert found.fits, (text, str(drawn))
        keys = [word.partition("=")[0] for word in words]
        changes = any(key.startswith((*OTHER_RESULT, "train.global_batch")) for key in keys)
        assert changes == (match["how"] == "another result"), text
        if leaves := re.match(r"leaves ([\d.]+) GiB", match["rest"]):
            left = -found.over / GIB
            assert left == pytest.approx(float(leaves[1]), abs=0.051), text
        pasted += 1
    assert pasted >= 0.75 * fixes


def as_people_write_them(seed: int) -> Iterator[Drawn]:
    """Every model and GPU; what of loss and kernels is best is left to us."""
    for drawn in draw_wide(seed):
        drawn.document["train"] |= {"loss": "auto", "kernels": "auto"}
        yield drawn


def test_what_is_left_is_what_is_left_where_the_rows_are_chosen_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows of `micro_batch: auto` are more where there is more room."""
    document = {
        "model": {"name": "llama-3.3-70b", "quantization": "nf4"},
        "adapter": {"type": "lora"},
        "strategy": {"type": "fsdp"},
        "data": {"train": [{"path": "a.jsonl", "format": "chat"}], "sequence_length": 1024},
        "train": {"global_batch": 16, "steps": 100},
    }
    (tmp_path / "job.json").write_text(json.dumps(document), encoding="utf-8")
    words = ["estimate", str(tmp_path / "job.json"), "--cluster", "2xRTX4090", "--json"]
    assert main(words) == 1
    offered = OFFER.fullmatch(json.loads(capsys.readouterr().out)["reasons"][-1])
    assert offered is not None
    assert main([*words, *offered["words"].split()]) == 0
    memory = json.loads(capsys.readouterr().out)["gpu_gib"]
    left = memory["capacity"] - memory["required"]
    assert offered["rest"].startswith(f"leaves {left:.1f} GiB")


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "fixes"), [(6, 8), pytest.param(5, 80, marks=pytest.mark.long)])
def test_every_family_has_a_fix_that_fits(seed: int, fixes: int, tmp_path: Path) -> None:
    for asked in islice(too_large(as_people_write_them(seed), tmp_path), fixes):
        drawn = asked.drawn
        text = offer(asked.job, drawn.shape, drawn.cluster, written=asked.written)
        match = OFFER.fullmatch(text)
        assert match is not None, (text, str(drawn))
        cluster = parse_cluster(match["cluster"]) if match["cluster"] else drawn.cluster
        job = resolved(drawn, cluster, match["words"].split(), tmp_path)
        assert forecast(job, drawn.shape, cluster).fits, (text, str(drawn))


def refused(seed: int, folder: Path) -> Iterator[tuple[Drawn, ShardtuneError]]:
    for drawn in draw(seed):
        drawn.document["train"] |= {"micro_batch": 1}
        if drawn.document["strategy"]["type"] == "auto":
            continue
        try:
            resolved(drawn, drawn.cluster, [], folder)
        except ShardtuneError as error:
            yield drawn, error


@pytest.mark.parametrize(("seed", "jobs"), [(3, 12), pytest.param(4, 200, marks=pytest.mark.long)])
def test_what_a_rule_says_to_set_is_accepted(seed: int, jobs: int, tmp_path: Path) -> None:
    """The same rule has nothing to say any more about the same key."""
    pasted = 0
    for drawn, error in islice(refused(seed, tmp_path), jobs):
        for problem in error.problems:
            match = SET.search(problem.fix)
            if match is None:
                continue
            for value in re.split(r", | or ", match["values"]):
                word = f"{match['key']}={value}"
                try:
                    resolved(drawn, drawn.cluster, [word], tmp_path)
                except ShardtuneError as again:
                    left = [(each.place, each.fact) for each in again.problems]
                    assert (problem.place, problem.fact) not in left, (word, problem)
                pasted += 1
    assert pasted >= jobs


def test_what_a_file_of_deepspeed_says_is_not_offered_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`train.micro_batch` would contradict it; a strategy without the file has its own."""
    own = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    (tmp_path / "ds.json").write_text(json.dumps(own), encoding="utf-8")
    document = {
        "model": {"name": "qwen2.5-7b"},
        "data": {"train": [{"path": "a.jsonl", "format": "chat"}], "sequence_length": 4096},
        "train": {"global_batch": 16, "steps": 100, "gradient_checkpointing": "none"},
    }
    (tmp_path / "job.json").write_text(json.dumps(document), encoding="utf-8")
    for spec in ("4xA100-40GB", "8xA100-40GB", "8xA40", "8xRTX4090"):
        words = ["estimate", str(tmp_path / "job.json"), "--cluster", spec]
        file = ["strategy.type=deepspeed", f"strategy.config={tmp_path / 'ds.json'}"]
        assert main([*words, *file]) == 1
        told = capsys.readouterr().err
        offered = re.search(r"fix: (.+?)  \(the same result", told)
        assert offered is not None, told
        assert main([*words, *file, *offered[1].split()]) == 0, offered[1]
        capsys.readouterr()
