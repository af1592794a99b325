"""`shardtune dashboard`: a local page over all runs in a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardtune.cli.arguments import Commands, add_command
from shardtune.cli.web_options import access_rules, add_address, require_packages
from shardtune.errors import LaunchError, Problem

_DRAIN_SECONDS = 2  # a page that is open asks again by itself


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "dashboard",
        _dashboard,
        "show all runs of a folder live in a browser",
        """\
  shardtune dashboard
  shardtune dashboard /shared/runs --port 8090
  SHARDTUNE_API_KEY=... shardtune dashboard runs --host 0.0.0.0""",
    )
    command.add_argument(
        "folder", type=Path, nargs="?", default=Path("runs"), metavar="DIR",
        help="folder with runs, up to 5 levels deep (runs)",
    )  # fmt: skip
    add_address(command, 8070)


def _dashboard(arguments: argparse.Namespace) -> int:
    require_packages("dashboard")
    access = access_rules(arguments.host)
    folder: Path = arguments.folder.expanduser()
    if not folder.is_dir():
        fact = "is no folder" if folder.exists() else "no such folder"
        fix = "name the folder that holds your runs: `shardtune dashboard DIR`"
        raise LaunchError(Problem(str(folder), fact, fix))
    from shardtune.dashboard.dashboard_app import Dashboard
    from shardtune.web.run_server import run_server

    dashboard = Dashboard(folder, access)

    def ready(address: str) -> None:
        print(f"runs in {folder}\npage         {address}/\nCtrl-C ends it", flush=True)

    run_server(
        dashboard.app,
        arguments.host,
        arguments.port,
        drain_seconds=_DRAIN_SECONDS,
        ready=ready,
        draining=dashboard.stop,
    )
    return 0
