"""A job as a table."""

from __future__ import annotations

from shardtune.config.job import Job
from shardtune.config.job_file import leaves
from shardtune.core.files.yaml_document import KeyPath, dotted
from shardtune.report.job_table import print_job
from tests.report.screen import plain_console, shown, squeezed
from tests.synthetic import make_job

REASONS: dict[KeyPath, str] = {("launch", "threads"): "two cores"}


def origin(path: KeyPath) -> str:
    places: dict[KeyPath, str] = {
        ("train", "learning_rate"): "command line",
        ("adapter", "targets"): "jobs/[a].yaml:3",
    }
    return places.get(path, "default")


def table(job: Job) -> str:
    console = plain_console()
    print_job(job, REASONS, origin, console)
    return squeezed(shown(console))


def test_every_value_is_there_with_where_it_came_from() -> None:
    job = make_job(
        "runs/a",
        train={"learning_rate": 1e-5, "max_grad_norm": None},
        adapter={"type": "lora", "targets": ["q_proj", "v_proj"]},
    )
    found = table(job)
    lines = found.splitlines()
    for line in (
        "key value where it came from",
        "model.name tiny default",
        "adapter.targets [q_proj, v_proj] jobs/[a].yaml:3",  # neither is markup
        "train.learning_rate 1e-05 command line",
        "train.max_grad_norm null default",
        "train.optimizer.betas [0.9, 0.95] default",
        "launch.threads 1 auto: two cores",
        "data.train.0.path d.jsonl default",
        "data.eval [] default",
        "data.packing auto default",
    ):
        assert line in lines
    for path, _ in leaves(job.model_dump(mode="json")):
        assert any(line.split(" ")[0] == dotted(path) for line in lines)


def test_keys_and_values_of_any_length_leave_80_columns_readable() -> None:
    strategy = {"type": "deepspeed", "zero_optimization": {"stage": 3}}
    job = make_job("runs/a", strategy=strategy, model={"name": "smollm2-135m-instruct"})
    console = plain_console()
    reasons: dict[KeyPath, str] = {("train", "micro_batch"): "a rank has 16 rows a step " * 3}
    print_job(job, reasons, lambda path: f"recipes/zero3_full.yaml:{len(path)}", console)
    lines = shown(console).splitlines()
    long = "strategy.zero_optimization.stage3_gather_16bit_weights_on_model_save"
    assert long in lines, "a long key has a line of its own"
    after = lines[lines.index(long) + 1].split()
    assert after == ["null", "recipes/zero3_full.yaml:3"]
    assert any(line.endswith(" smollm2-135m-instruct") for line in lines)
    start = lines[0].index("where it came from")
    reason = [line[start:] for line in lines if "rank has" in line or "16 rows a" in line]
    assert all(len(part) > 12 for part in reason), "no column is a few letters wide"
    for path, _ in leaves(job.model_dump(mode="json")):
        assert any(line.split(" ")[0] == dotted(path) for line in lines)


def test_a_long_value_is_wrapped_and_not_cut_off() -> None:
    directory = "runs/" + "Ω" * 200
    console = plain_console()
    print_job(make_job(directory), REASONS, origin, console)
    assert shown(console).count("Ω") == 200
