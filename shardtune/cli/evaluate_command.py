"""`shardtune evaluate`: benchmarks on the result of a run or on any model, before and after."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.cli.arguments import Commands, add_command, count

if TYPE_CHECKING:
    from shardtune.cli.measured_sides import Measurement
    from shardtune.evaluation.judge_client import JudgeClient
    from shardtune.launch.process_group import JoinedWorld


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "evaluate",
        evaluate,
        "score the result of a run, and its base model, on tasks",
        """\
  shardtune evaluate runs/quickstart --task gsm8k=gsm8k_test.jsonl --limit 200
  shardtune evaluate runs/quickstart --task exact=mine.jsonl --out scores.json
  shardtune evaluate runs/quickstart --forgetting --harness hellaswag""",
    )
    command.add_argument("model", metavar="RUN|MODEL", help="directory of a run, or a model's name")
    command.add_argument(
        "--task", action="append", default=[], metavar="TASK",
        help="task.yaml, METRIC=FILE.jsonl, or a recipe, as gsm8k[=FILE]: mmlu, "
        "humaneval, mbpp, bfcl; may be given several times",
    )  # fmt: skip
    command.add_argument(
        "--forgetting", action="store_true", help="loss on general texts that ship with shardtune"
    )
    command.add_argument(
        "--harness", default="", metavar="TASKS",
        help="lm-evaluation-harness tasks, by comma",
    )  # fmt: skip
    command.add_argument("--limit", type=count, metavar="N", help="use only the first N rows")
    command.add_argument("--shots", type=int, metavar="K", help="few-shot examples")
    command.add_argument(
        "--max-new-tokens", type=count, metavar="N", help="longest answer, in tokens"
    )
    command.add_argument(
        "--batch-size", type=count, default=16, metavar="N", help="rows per batch (16)"
    )
    command.add_argument(
        "--processes", type=count, default=1, metavar="N",
        help="ranks that share the rows, each with the model (1)",
    )  # fmt: skip
    command.add_argument(
        "--after-only", action="store_true", help="don't evaluate the run's base model"
    )
    command.add_argument(
        "--allow-code", action="store_true", help="run code that the model writes, in a sandbox"
    )
    command.add_argument(
        "--out", type=Path, metavar="FILE", help="write every question, answer and score as JSON"
    )

    judge = command.add_argument_group("judge: another model grades the answers, as in MT-bench")
    judge.add_argument(
        "--judge", metavar="FILE", help="questions: rows with `turns` and `category`"
    )
    judge.add_argument("--judge-url", metavar="URL", help="OpenAI-compatible endpoint, up to /v1")
    judge.add_argument("--judge-model", metavar="NAME", help="the judge's name at that endpoint")
    judge.add_argument(
        "--judge-key", default="OPENAI_API_KEY", metavar="VARIABLE",
        help="variable with its key (OPENAI_API_KEY)",
    )  # fmt: skip
    judge.add_argument(
        "--judge-mode", choices=("single", "pairwise", "both"), default="both", metavar="MODE",
        help="single (grades), pairwise (before, after), or both",
    )  # fmt: skip


def evaluate(arguments: argparse.Namespace) -> int:
    """Looks at everything that can be wrong before a model is loaded."""
    from shardtune.core.world import outside_ranks

    wanted, judge = _wanted(arguments), _judge(arguments)
    if outside_ranks() is None:  # once, not on each rank
        from shardtune.cli.evaluate_checks import require_measurable

        require_measurable(wanted, judge, arguments.out)
    if outside_ranks() is None and arguments.processes > 1:
        return _start_ranks(arguments.processes)
    if outside_ranks() is None:
        return _evaluate(arguments, wanted, judge, None)
    from shardtune.launch.error_file import reporting_errors
    from shardtune.launch.process_group import join_process_group

    with reporting_errors(), join_process_group(int(os.environ.get("OMP_NUM_THREADS", 1))) as world:
        return _evaluate(arguments, wanted, judge, world)


def _wanted(arguments: argparse.Namespace) -> Measurement:
    from shardtune.cli.measured_sides import Measurement
    from shardtune.errors import JobError, Problem
    from shardtune.evaluation.judge import read_questions
    from shardtune.evaluation.recipes import find_tasks
    from shardtune.evaluation.task import require_answerable

    if not (arguments.task or arguments.forgetting or arguments.harness or arguments.judge):
        fix = "--task gsm8k=FILE, --task exact=FILE.jsonl, --forgetting, --harness or --judge"
        raise JobError(Problem("evaluate", "nothing to measure is named", fix))
    if arguments.harness and arguments.processes > 1:
        fact = "lm-evaluation-harness runs on one process here"
        raise JobError(Problem("--harness", fact, "leave out --processes"))
    options = {
        "limit": arguments.limit,
        "shots": arguments.shots,
        "max_new_tokens": arguments.max_new_tokens,
    }
    tasks = [task.with_options(options) for spec in arguments.task for task in find_tasks(spec)]
    require_answerable(tasks, allow_code=arguments.allow_code)
    return Measurement(
        tasks,
        arguments.forgetting,
        [each.strip() for each in arguments.harness.split(",") if each.strip()],
        read_questions(arguments.judge)[: arguments.limit] if arguments.judge else (),
        arguments.limit,
        arguments.shots,
        arguments.max_new_tokens,
    )


def _judge(arguments: argparse.Namespace) -> JudgeClient | None:
    from shardtune.errors import JobError, Problem
    from shardtune.evaluation.judge_client import JudgeClient

    if not arguments.judge:
        return None
    if not arguments.judge_url or not arguments.judge_model:
        fix = "--judge-url http://HOST/v1 --judge-model NAME"
        raise JobError(Problem("--judge", "no endpoint and model are named", fix))
    key = os.environ.get(arguments.judge_key, "")
    return JudgeClient(arguments.judge_url, arguments.judge_model, key)


def _start_ranks(processes: int) -> int:
    """The same command on so many ranks."""
    import tempfile

    from shardtune.core.host.machine import Machine
    from shardtune.launch.supervisor import run_local

    with tempfile.TemporaryDirectory() as logs:
        return run_local(
            ["-m", "shardtune", *sys.argv[1:]],
            processes=processes,
            threads=max(1, Machine.here().cores // processes),
            logs=Path(logs),
        )


def _evaluate(
    arguments: argparse.Namespace,
    wanted: Measurement,
    judge: JudgeClient | None,
    world: JoinedWorld | None,
) -> int:
    from shardtune.cli.measured_sides import measure_sides
    from shardtune.cli.open_model import open_model
    from shardtune.cli.show_measured import (
        Judgement,
        judge_answers,
        show,
        show_judgement,
        write,
    )
    from shardtune.evaluation.task_rows import require_framed
    from shardtune.training.respondent_model import ModelRespondent

    speaks = world is None or world.is_main
    opened = open_model(arguments.model, device=world.device if world else None)
    with _shown(speaks) as status:
        asked = ModelRespondent(
            opened.model,
            opened.tokenizer,
            opened.stop_ids,
            opened.device,
            arguments.batch_size,
            progress=status,
            world=world,
            plain=opened.plain,
        )
        for task in wanted.tasks:  # refused before the first answer, if at all
            require_framed(task, has_template=asked.has_template, plain=opened.plain)
        before, after = measure_sides(wanted, opened, asked, before=not arguments.after_only)
    if not speaks:
        return 0
    found = Judgement()
    show(before, after)
    if arguments.out:  # before a judge can fail
        write(arguments.out, arguments.model, before, after, found)
    if judge is not None:
        try:
            judge_answers(wanted.questions, before, after, judge, arguments.judge_mode, found)
        finally:  # its verdicts are kept also where it fails later
            show_judgement(found)
            if arguments.out:
                write(arguments.out, arguments.model, before, after, found)
    return 0


@contextmanager
def _shown(speaks: bool) -> Iterator[Any]:
    """A line with progress and the time left, on a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not speaks or not console.is_terminal:
        yield None
        return
    with console.status("loading") as status:

        def told(done: int, total: int, seconds: float) -> None:
            minutes, rest = divmod(int(seconds), 60)
            status.update(f"{done} of {total}, {minutes}:{rest:02d} left")

        yield told
