"""`shardtune track`: sends a run's figures to a tracker afterwards, or the rest of them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from shardtune.cli.arguments import Commands, add_command, add_run_directory
from shardtune.errors import JobError, Problem, RunError, did_you_mean

if TYPE_CHECKING:
    from shardtune.config.job import Job
    from shardtune.core.tracker import TrackerBase


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "track",
        track,
        "send a run's metrics to TensorBoard, W&B, MLflow or Trackio",
        """\
  shardtune track runs/quickstart --to tensorboard
  shardtune track runs/quickstart --to wandb project=mine mode=offline""",
    )
    add_run_directory(command)
    command.add_argument(
        "--to", required=True, metavar="TRACKER", help="tensorboard, wandb, mlflow, trackio or csv"
    )
    command.add_argument(
        "--new", action="store_true", help="send everything again, to a new run of the tracker"
    )
    change = "a setting of the tracker, as project=mine"
    command.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=change)


def track(arguments: argparse.Namespace) -> int:
    """Sends what the tracker lacks; from then on it has every point."""
    import os
    from importlib.util import find_spec

    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.checkpoint.run_guards import require_run, require_run_id
    from shardtune.core.redact import redact
    from shardtune.track.config_values import config_values
    from shardtune.track.feed import lacks_nothing
    from shardtune.track.open_feed import open_feed
    from shardtune.track.tracker_state import TRACK_FOLDER, read_tracker_state

    run = RunDir(arguments.directory)
    require_run(run)
    job = run.read_job()
    assert job is not None
    section = _section(job, arguments.to, arguments.overrides)
    missing = [need for need in section.needs if find_spec(need.package) is None]
    if missing:
        problems = [
            Problem(arguments.to, f"{n.package} is not installed", n.command) for n in missing
        ]
        raise JobError(problems)
    run_id, label, anew = require_run_id(run), arguments.to, arguments.new
    state = read_tracker_state(run.path, label, run_id)
    if state is not None and not anew and lacks_nothing(run.path, state):
        print(f"{label} has all of it already ({state.id}); --new sends it once more")
        return 0
    run.own(TRACK_FOLDER)
    try:
        with open_feed(section, run.path, run_id, label, config_values(job), anew=anew) as feed:
            feed.finish()
    except RunError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a tracker's library may raise
        fact = redact(f"{type(error).__name__}: {error}", os.environ)
        fix = "what had arrived is noted: the same command goes on from there"
        raise RunError(Problem(label, fact, fix)) from None
    print(f"sent {feed.lines:,} lines to {label} ({feed.id})")
    return 0


def _section(job: Job, label: str, overrides: list[str]) -> TrackerBase:
    """The tracker that the job has by this label, or one with defaults, changed by `overrides`."""
    from pydantic import ValidationError

    from shardtune.config.trackers import TRACKERS, tracker_labels, tracker_of
    from shardtune.core.files.yaml_document import parse_document

    own = dict(zip(tracker_labels(job.track), job.track, strict=True))
    known = [*TRACKERS, *(each for each in own if each not in TRACKERS)]
    if label not in known:
        near = did_you_mean(label, known)
        fix = f"did you mean {near}?" if near else f"name one of {', '.join(known)}"
        raise JobError(Problem("--to", f"there is no tracker {label!r}", fix))
    fields = own[label].model_dump(mode="json") if label in own else {"type": label}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise JobError(Problem("command line", f"{text!r} is not key=value", "write name=mine"))
        fields[key] = parse_document(value, key).value
    try:
        section = tracker_of(fields)
    except ValidationError as error:
        keys = ", ".join(TRACKERS[str(fields["type"])].model_fields)
        problems = [
            Problem(".".join(map(str, item["loc"])), item["msg"], f"{label} takes {keys}")
            for item in error.errors(include_url=False)
        ]
        raise JobError(problems) from None
    if secret := section.fields_with_secrets():
        fix = "leave it out; set it in the environment, as docs/track.md says"
        raise JobError([Problem(key, "has a password or a token in it", fix) for key in secret])
    return section
