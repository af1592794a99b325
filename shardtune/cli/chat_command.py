"""`shardtune chat`: a dialogue with the result of a run, or with any model, in the terminal."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from shardtune.cli.arguments import Commands, add_command, text
from shardtune.cli.serve_command import add_loading
from shardtune.errors import ModelError, Problem

if TYPE_CHECKING:
    from shardtune.serve.served_model import ServedModel


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "chat",
        _chat,
        "chat with the result of a run, and with its base model",
        """\
  shardtune chat runs/quickstart
  shardtune chat runs/quickstart --temperature 0 --system "Be brief."
  shardtune chat smollm2-135m-instruct --load 4bit""",
    )
    command.add_argument(
        "source", metavar="RUN|MODEL", help="directory of a run, a model's folder or hub id"
    )
    command.add_argument(
        "--system", type=text, default="", metavar="TEXT", help="the system prompt"
    )
    command.add_argument(
        "--temperature", type=float, metavar="T", help="0 is greedy (the model's own, or 0.7)"
    )
    command.add_argument(
        "--top-p", type=float, metavar="P", help="nucleus sampling (the model's own, or 1)"
    )
    command.add_argument(
        "--top-k", type=int, metavar="K", help="sample from the top K (the model's own, or all)"
    )
    command.add_argument(
        "--max-tokens", type=int, default=512, metavar="N", help="longest answer, in tokens (512)"
    )
    command.add_argument("--seed", type=int, metavar="N", help="random seed")
    add_loading(command)


def _chat(arguments: argparse.Namespace) -> int:
    from shardtune.cli.load_served import ServingMemory, load_before, load_served
    from shardtune.serve.terminal_chat import ChatSettings, TerminalChat

    given = {name: getattr(arguments, name) for name in ("temperature", "top_p", "top_k")}
    chosen = {name: value for name, value in given.items() if value is not None}
    settings = ChatSettings(**chosen, max_tokens=arguments.max_tokens, seed=arguments.seed)
    if told := settings.problem():
        arguments.parser.error(told)
    memory = ServingMemory(arguments.load, arguments.dtype, max_rows=1)
    after, *bases = load_served([arguments.source], memory)
    if after.render is None:
        fact = "its tokenizer has no chat template, so there is no dialogue with it"
        fix = "continue a text with: shardtune generate RUN --raw --prompt TEXT"
        raise ModelError(Problem(arguments.source, fact, fix))

    def before() -> ServedModel:
        # An adapter's base is loaded with it; where all weights were trained it is another model.
        return bases[0] if bases else load_before(after, memory)

    with suppress(ImportError):
        import readline  # noqa: F401  which gives `input` editing and a history
    settings = replace(settings, **(after.defaults.taken | chosen))
    if said := after.defaults.told:
        _write(f"sampled {said}; options and /set win\n")
    trained = after.base != after.source
    TerminalChat(
        after, before if trained else None, settings, input, _write, arguments.system
    ).run()
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
