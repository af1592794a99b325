"""The entry point: reads the command line, runs one command, and turns errors into exit codes.

Each command has a file of its own, with its parser. None imports anything heavy before it is run,
so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from shardtune import __version__
from shardtune.cli import (
    bench_command,
    chat_command,
    completion_command,
    dashboard_command,
    data_command,
    diagnose_command,
    doctor_command,
    evaluate_command,
    export_command,
    init_command,
    models_command,
    plan_command,
    push_command,
    report_command,
    result_command,
    schema_command,
    serve_command,
    show_command,
    slurm_command,
    track_command,
    train_command,
    verify_command,
)
from shardtune.compat.quiet import quiet_imports
from shardtune.core.files.atomic_write import DISK_FULL
from shardtune.errors import Problem, ShardtuneError, did_you_mean
from shardtune.launch import INTERRUPTED, LAUNCHER_PID
from shardtune.launch.output_stream import drain_output, open_missing_streams

COMMANDS = (
    init_command, train_command, diagnose_command, doctor_command, slurm_command, plan_command,
    bench_command, data_command, show_command, schema_command, report_command, dashboard_command,
    result_command, evaluate_command, chat_command, serve_command, export_command, push_command,
    track_command, verify_command, models_command, completion_command,
)  # fmt: skip
"""In the order in which `--help` lists them."""

PATH_ERRORS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EACCES)
"""A path that a person gave can't be used: no fault of the program, wherever it is found."""
OTHERS_COMMANDS = {
    "sft": "train", "finetune": "train", "fine-tune": "train", "tune": "train", "run": "train",
    "fit": "train", "infer": "generate", "inference": "generate", "predict": "generate",
    "eval": "evaluate", "preprocess": "data", "config": "show", "validate": "doctor",
    "check": "doctor", "api": "serve", "webui": "dashboard", "merge-lora": "merge",
    "merge_lora": "merge", "upload": "push", "env": "doctor", "download": "models pull",
}  # fmt: skip
"""What other tools call the same."""
JOB_OPTIONS = frozenset({"-c", "--config", "--config_file", "--config-file", "--job", "--yaml"})
"""Options by which other tools are given their file."""
DISK_ERRORS = (*DISK_FULL, errno.EROFS)
"""The disk takes no more."""
NO_HOME = "Could not determine home directory."
"""What `Path.expanduser` says of a user that it doesn't know."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Without any it says what there is."""
    if not (sys.argv[1:] if argv is None else argv):
        _parser()[0].print_help()
        return 0
    arguments = parse(argv)
    quiet_imports()
    try:
        _require_docstrings()
        code = int(arguments.run(arguments))
        sys.stdout.flush()  # here, where it is known what to do if it can't be written
        return code
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
        _discard_output()
        return 0
    except RuntimeError as error:
        if str(error) != NO_HOME:
            raise
        told = Problem(
            "~NAME", "a path begins with a user who isn't here", "write ~/NAME, or the whole path"
        )
        print(f"error: {told}", file=sys.stderr)
        return ShardtuneError.exit_code
    except OSError as error:
        if error.filename is not None and error.errno in (*PATH_ERRORS, *DISK_ERRORS):
            full = error.errno in DISK_ERRORS
            fix = (
                "make room, or write elsewhere" if full else "correct the path, or what lies there"
            )
            told = Problem(str(error.filename), str(error.strerror), fix)
            print(f"error: {_printable(str(told))}", file=sys.stderr)
            return ShardtuneError.exit_code
        if error.errno not in DISK_FULL or error.filename is not None:
            raise
        _discard_output()
        print(f"error: {Problem('standard output', str(error.strerror))}", file=sys.stderr)
        return 1


def _require_docstrings() -> None:
    """transformers and peft put their own docstrings together, and fail far from the cause where
    Python has thrown them away."""
    if sys.flags.optimize > 1:
        fact = "python -OO (PYTHONOPTIMIZE=2) removes docstrings, which transformers needs"
        raise ShardtuneError(Problem("python", fact, "leave it out; -O does no harm"))


def program() -> NoReturn:
    """`main`, and out."""
    open_missing_streams()
    leave(main())


def _discard_output() -> None:
    """Python would complain once more of what it couldn't write, when it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave(code: int) -> NoReturn:
    """Ends the process.

    To take a large interpreter down can take seconds. A launcher waits for its ranks, and whoever
    sent a signal for both, so these leave at once: `main` has closed what was to be closed. So does
    one with a thread that may still wait for a node that is gone: it would abort the interpreter.
    """
    drain_output()
    waiting = any(thread.daemon for thread in threading.enumerate())
    if code > 128 or waiting or LAUNCHER_PID in os.environ:
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


class _CommandList(argparse.RawDescriptionHelpFormatter):
    """Each command on one line: argparse forgets the indent of the longest names, and breaks."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = 14


class _Parser(argparse.ArgumentParser):
    """Argparse, with errors in our form, and without guessing at shortened options."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    @property
    def options(self) -> list[str]:
        return list(self._option_string_actions)

    def error(self, message: str, fix: str = "") -> NoReturn:
        fix = fix or f"`{self.prog} --help` shows what there is, and an example"
        self.exit(2, f"error: {_printable(str(Problem(self.prog, message, fix)))}\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says. argparse takes a command's KEY=VALUE words only before its
    options; people mix them."""
    parser, commands = _parser()
    _require_command(parser, commands, sys.argv[1:] if argv is None else argv)
    arguments, rest = parser.parse_known_args(argv)
    if unknown := [word for word in rest if word.startswith("-")]:
        known = did_you_mean(unknown[0], arguments.parser.options)
        hint = f" (did you mean {known}?)" if known else ""
        fix = "" if known or not hasattr(arguments, "overrides") else _as_values(unknown)
        arguments.parser.error(f"unknown option: {' '.join(unknown)}{hint}", fix)
    if rest and not hasattr(arguments, "overrides"):
        arguments.parser.error(f"unknown argument: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _require_command(parser: _Parser, known: Collection[str], words: Sequence[str]) -> None:
    """Says which command was meant, by its spelling or by what other tools call it."""
    if not words or words[0].startswith("-") or words[0] in known:
        return
    if near := OTHERS_COMMANDS.get(words[0]) or did_you_mean(words[0], known):
        parser.error(f"unknown command: {words[0]}", f"did you mean `shardtune {near}`?")


def _as_values(options: Sequence[str]) -> str:
    """What options are that other tools have, and a job has as values; empty for others."""
    from shardtune.config.foreign_keys import OTHERS_KEYS
    from shardtune.config.job_keys import all_keys
    from shardtune.core.files.yaml_document import dotted

    if JOB_OPTIONS & {option.partition("=")[0] for option in options}:
        return "the job file is the first argument, without an option: `shardtune train job.yaml`"
    words = [option.lstrip("-").partition("=")[0] for option in options]
    leads = [f"--{word}: {OTHERS_KEYS[word]}" for word in words if word in OTHERS_KEYS]
    ours = [dotted(key) for word in words for key in all_keys() if word in (key[-1], dotted(key))]
    if not leads and not ours:
        return ""
    example = f"{ours[0]}=VALUE" if ours else "train.learning_rate=1e-4"
    return "; ".join([f"values of a job are written without dashes, as {example}", *leads])


def _parser() -> tuple[_Parser, Collection[str]]:
    """The program's parser, and the names of its commands."""
    parser = _Parser(
        prog="shardtune",
        formatter_class=_CommandList,
        description="Fine-tunes large language models on one GPU or many nodes.",
        epilog="""\
a first run, on any machine with the repository at hand:
  shardtune data recipes/quickstart.yaml       see which tokens are trained
  shardtune train recipes/quickstart.yaml      train it on 2 processes
  shardtune generate runs/quickstart --prompt "Reverse a string in Python."
`shardtune COMMAND --help` shows a command's options and an example.""",
    )
    parser.add_argument("--version", action="version", version=f"shardtune {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser, commands.choices
