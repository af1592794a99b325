"""`shardtune completion`: prints a script that completes commands, options and keys of a job.

The words stand in the script: a shell that had to start Python for each press of a key would be
slow. Who updates shardtune and loads the script at each login has the new words.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardtune.cli.arguments import Commands, add_command


@dataclass(frozen=True)
class CommandWords:
    """What can stand behind one command."""

    name: str
    summary: str
    options: tuple[str, ...]
    takes_keys: bool
    """Whether it takes changes of a job's values."""


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "completion",
        lambda arguments: _print(arguments, commands),
        "print a shell's completion of commands, options and keys",
        """\
  shardtune completion bash   in ~/.bashrc: source <(shardtune completion bash)
  shardtune completion zsh    in ~/.zshrc, after compinit: the same with zsh
  shardtune completion fish > ~/.config/fish/completions/shardtune.fish""",
    )
    command.add_argument("shell", choices=tuple(SCRIPTS), metavar="SHELL", help="bash, zsh or fish")


def _print(arguments: argparse.Namespace, commands: Commands) -> int:
    from shardtune.config.job_keys import override_keys

    print(SCRIPTS[arguments.shell](_words(commands), override_keys()), end="")
    return 0


def _words(commands: Commands) -> list[CommandWords]:
    summaries = {action.dest: action.help or "" for action in commands._choices_actions}
    found = []
    for name, parser in commands.choices.items():
        options = [option for action in parser._actions for option in action.option_strings]
        takes_keys = any(action.dest == "overrides" for action in parser._actions)
        words = tuple(option for option in options if option.startswith("--"))
        found.append(CommandWords(name, summaries.get(name, ""), words, takes_keys))
    return found


def _bash(commands: Sequence[CommandWords], keys: Sequence[str]) -> str:
    cases = "".join(
        f"    {each.name}) words={shlex.quote(' '.join(each.options))}"
        f"{'; keys=$_shardtune_keys' if each.takes_keys else ''} ;;\n"
        for each in commands
    )
    return f"""\
_shardtune_keys={shlex.quote(" ".join(f"{key}=" for key in keys))}
_shardtune() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} words='' keys=''
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W {shlex.quote(" ".join(each.name for each in commands))} -- "$cur"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}  esac
  case "$cur" in
    -*) COMPREPLY=($(compgen -W "$words" -- "$cur")) ;;
    ?*) COMPREPLY=($(compgen -W "$keys" -- "$cur")); [ -n "$COMPREPLY" ] && compopt -o nospace ;;
  esac
}}
complete -o default -F _shardtune shardtune
"""


def _zsh(commands: Sequence[CommandWords], keys: Sequence[str]) -> str:
    cases = "".join(
        f"    {each.name}) compadd -- {' '.join(each.options)}"
        f"{'; compadd -S = -- $_shardtune_keys' if each.takes_keys else ''} ;;\n"
        for each in commands
    )
    return f"""\
#compdef shardtune
typeset -ga _shardtune_keys=({" ".join(keys)})
_shardtune() {{
  if (( CURRENT == 2 )); then
    compadd -- {" ".join(each.name for each in commands)}
    return
  fi
  case "${{words[2]}}" in
{cases}  esac
  _files
}}
compdef _shardtune shardtune
"""


def _fish(commands: Sequence[CommandWords], keys: Sequence[str]) -> str:
    lines = []
    for each in commands:
        told = f"-a {each.name} -d {shlex.quote(each.summary)}"
        lines.append(f"complete -c shardtune -n __fish_use_subcommand -f {told}")
        seen = f"'__fish_seen_subcommand_from {each.name}'"
        lines += [
            f"complete -c shardtune -n {seen} -l {option.removeprefix('--')}"
            for option in each.options
        ]
    having = " ".join(each.name for each in commands if each.takes_keys)
    words = " ".join(f"{key}=" for key in keys)
    lines.append(
        f"complete -c shardtune -n '__fish_seen_subcommand_from {having}' -a {shlex.quote(words)}"
    )
    return "\n".join(lines) + "\n"


SCRIPTS: dict[str, Callable[[Sequence[CommandWords], Sequence[str]], str]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
