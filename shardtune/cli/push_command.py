"""`shardtune push`: a run's result, or an export, to the model hub."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardtune.cli.arguments import Commands, add_command
from shardtune.cli.result_command import open_result


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "push",
        _push,
        "upload a run's result or an export to the Hugging Face hub",
        """\
  shardtune push runs/quickstart me/quickstart --dry-run
  shardtune push out/gguf me/quickstart-gguf""",
    )
    command.add_argument("directory", type=Path, metavar="RUN", help="a run, or an export's folder")
    command.add_argument("repo", metavar="REPO", help="where to, as OWNER/NAME")
    command.add_argument(
        "--public", action="store_true", help="make the repository public (private)"
    )
    command.add_argument("--dry-run", action="store_true", help="list the files, send nothing")


def _push(arguments: argparse.Namespace) -> int:
    from shardtune.export.folder import EXPORT_FILE
    from shardtune.export.hub import prepare_upload, push_folder

    folder = arguments.directory
    if not (folder / EXPORT_FILE).is_file():
        run, _ = open_result(folder)
        folder = run.result
    upload = prepare_upload(folder)
    seen = "public" if arguments.public else "private"
    if arguments.dry_run:
        for name in sorted(upload.files):
            print(f"{upload.files[name].bytes:>14,}  {name}")
        print(f"{upload.bytes:>14,}  bytes for {arguments.repo} ({seen}); nothing was sent")
        return 0
    address = push_folder(upload, arguments.repo, private=not arguments.public)
    print(f"pushed {len(upload.files)} files, {upload.bytes:,} bytes, to {address} ({seen})")
    print("compared: the hub has every file as it lies here")
    return 0
