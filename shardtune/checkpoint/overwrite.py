"""Overwriting a run: the old one is moved aside, and deleted when the new one has begun.

Until then it can be put back, and is: by the process that moved it if the new run doesn't come to
its beginning, or by the next one if that process was killed. What isn't the run's is never moved:
a run whose folders hold anything else is refused. A folder that is a link to another disk stays
one: what the run has behind it is deleted there when the new one has begun.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from shardtune.checkpoint.commit_by_rename import (
    QUARANTINED,
    foreign_files,
    is_unnamed,
    remove,
    run_of,
    set_aside,
)
from shardtune.checkpoint.disk_space import size_of
from shardtune.checkpoint.manifest import MANIFEST_FILE, Damaged
from shardtune.checkpoint.run_dir import RunDir, holds, new_marker, remove_tree
from shardtune.checkpoint.run_marker import (
    MARKER_FILE,
    PROFILED,
    RunMarker,
    read_marker,
    write_marker,
)
from shardtune.checkpoint.seal import files_of
from shardtune.core.files.atomic_write import restore_replaced
from shardtune.errors import Problem, RunError

_ASIDE = ".overwritten"
_NAMED = re.compile(r"step-\d{6,}(\.damaged(-\d+)?)?")
_LOG = re.compile(r"events(-\d+)?\.jsonl")
_ATTEMPT = re.compile(r"attempt-\d+")
_OUTPUT = re.compile(r"(rank|stack|error|worker)-\d+\.(log|txt|json)|beat-\d+|end")
"""What the ranks leave, and on Ray their watchdog."""
_TRACKER = re.compile(r"[a-z][a-z0-9_-]*")
_TRACKED = re.compile(rf"{_TRACKER.pattern}\.(json|log)|\.{_TRACKER.pattern}\.json\.partial")
_MOVE_IT = "move that elsewhere, or set save.directory to another folder"


@contextmanager
def overwriting(
    run: RunDir, *, wanted: bool, say: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """Moves the run in the folder aside, if that is wanted. If no other has begun there when the
    block ends, or it can't be moved as a whole, it is put back."""
    if not wanted:
        yield
        return
    try:
        move_aside(run)
        yield
    finally:
        if settle(run):
            say(f"{run.path}: the new run did not begin; the one that was there is back")


def require_only_ours(run: RunDir, *, links: bool = True) -> None:
    """Refuses a run in whose files and folders something else lies; without `links` it isn't asked
    what lies behind folders that are links."""
    marker = run.marker()
    if marker is not None and (foreign := foreign_in(run.path, marker, links=links)):
        raise RunError(Problem(str(run.path), holds(foreign), _MOVE_IT))


def move_aside(run: RunDir) -> None:
    """Makes room for another run. Each name is in one of two places, whenever we are killed."""
    marker = run.marker()
    if marker is None or not marker.begun:
        return
    restore_replaced(run.result)  # it is this run's, not the next one's
    require_only_ours(run)
    aside = _make_aside(run, marker)
    write_marker(aside, marker)
    for name in marker.names:
        path = run.path / name
        if path.exists() and not path.is_symlink():
            _rename_aside(path, aside / name)
    write_marker(run.path, new_marker())


def _rename_aside(path: Path, target: Path) -> None:
    """A folder that is a disk of its own, or may not be written to, stays where it is."""
    try:
        path.rename(target)
    except OSError as error:
        fact = f"can't be moved aside: {error.strerror}"
        raise RunError(Problem(str(path), fact, "set save.directory to another folder")) from None


def is_unsettled(run: RunDir) -> bool:
    """Whether an overwrite was cut short."""
    return bool(_moved_aside(run))


def settle(run: RunDir) -> bool:
    """Deletes a run that was moved aside if another one has begun; else puts it back. True if it
    did that. A process that is killed here leaves the rest to the next call."""
    restored = False
    for aside, old in _moved_aside(run):
        now = read_marker(run.path)
        if now is not None and now.run != old.run and now.begun:
            if not foreign_in(aside, old):  # else somebody has put something there meanwhile
                _delete_behind_links(run, old)
                _delete_files(aside, old)
                _remove_empty(aside)
            continue
        if now is not None and now.run != old.run:
            require_only_ours(run, links=False)
            _delete_files(run.path, now)  # what the new one wrote before its beginning
        write_marker(run.path, old)  # from here on the names here are the old run's
        for name in old.names:
            if _lies_there(aside / name):
                (aside / name).rename(run.path / name)
        _remove_empty(aside)
        restored = True
    return restored


def set_aside_unless_ours(result: Path) -> Path | None:
    """Makes room for another result. One that we wrote may be replaced; a folder that holds
    anything else gets another name, which is returned."""
    if not _lies_there(result):
        return None
    if result.is_dir() and not result.is_symlink() and not list(_in_result(result)):
        return None
    return set_aside(result, QUARANTINED)


def size_aside(run: RunDir) -> int:
    """Bytes that will be free when the run that is moved aside is deleted."""
    return sum(size_of(aside) for aside, _ in _moved_aside(run))


def foreign_in(folder: Path, marker: RunMarker, *, links: bool = True) -> list[str]:
    """What lies in a run's own files and folders, and isn't the run's, by its path in `folder`."""
    found = []
    for name in marker.names:
        path = folder / name
        if not _lies_there(path) or (path.is_symlink() and not links):
            continue
        inside = _KINDS.get(name)
        if inside is None:
            found += [] if path.is_file() and not path.is_symlink() else [name]
        elif not path.is_dir():
            found.append(name)
        else:
            found += [f"{name}/{each}" for each in inside(path, marker.run)]
    return found


def _in_checkpoints(folder: Path, run: str) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        unnamed = is_unnamed(path)
        named = unnamed or _NAMED.fullmatch(path.name)
        if not named or path.is_symlink() or not path.is_dir():
            yield path.name
        elif foreign := foreign_files(path):
            yield from (f"{path.name}/{name}" for name in foreign)
        elif run_of(path) != run and not unnamed:
            yield path.name


def _in_result(folder: Path, run: str = "") -> Iterator[str]:
    try:
        known = {MANIFEST_FILE, *files_of(folder)}
    except Damaged:
        known = set()
    for path in sorted(folder.iterdir()):
        if path.name not in known or path.is_symlink() or not path.is_file():
            yield path.name


def _in_logs(folder: Path, run: str) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        if _ATTEMPT.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            for each in sorted(path.iterdir()):
                if not _OUTPUT.fullmatch(each.name):
                    yield f"{path.name}/{each.name}"
        elif not _LOG.fullmatch(path.name):
            yield path.name


def _in_track(folder: Path, run: str) -> Iterator[str]:
    """What lies inside a tracker's folder is the tracker's."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not (_TRACKER if path.is_dir() else _TRACKED).fullmatch(path.name):
            yield path.name


def _in_profile(folder: Path, run: str) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        if not PROFILED.fullmatch(path.name) or path.is_symlink() or not path.is_file():
            yield path.name


_KINDS = {
    "checkpoints": _in_checkpoints,
    "result": _in_result,
    "logs": _in_logs,
    "track": _in_track,
    "profile": _in_profile,
}


def _moved_aside(run: RunDir) -> list[tuple[Path, RunMarker]]:
    found = []
    if run.path.is_dir():
        for aside in sorted(run.path.glob(f".*{_ASIDE}")):
            marker = None if aside.is_symlink() else read_marker(aside)
            if marker is not None and _is_aside_of(marker.run, aside.name):
                found.append((aside, marker))
    return found


def _make_aside(run: RunDir, marker: RunMarker) -> Path:
    """An overwrite that died early may have left an empty folder of the name, or one in which
    somebody else's files are."""
    for number in count(1):
        aside = run.path / f".{marker.run}{f'-{number}' * (number > 1)}{_ASIDE}"
        if not _lies_there(aside):
            aside.mkdir()
            break
        plain = aside.is_dir() and not aside.is_symlink()
        if plain and {path.name for path in aside.iterdir()} <= {f".{MARKER_FILE}.partial"}:
            break
    return aside


def _is_aside_of(run: str, name: str) -> bool:
    return re.fullmatch(rf"\.{re.escape(run)}(-\d+)?{re.escape(_ASIDE)}", name) is not None


def _delete_behind_links(run: RunDir, old: RunMarker) -> None:
    """The checkpoints and the result of a run whose folders are links. The logs stay: those of the
    new run lie among them."""
    if run.checkpoints.is_symlink() and run.checkpoints.is_dir():
        for path in run.checkpoints.iterdir():
            if _NAMED.fullmatch(path.name) and not path.is_symlink() and run_of(path) == old.run:
                with suppress(OSError):  # something of somebody else's is in it
                    remove(path)
    if run.result.is_symlink() and run.result.is_dir() and not list(_in_result(run.result)):
        for path in run.result.iterdir():
            path.unlink()


def _delete_files(folder: Path, marker: RunMarker) -> None:
    """What a run wrote to `folder`. That nothing else is there was asked before."""
    for name in marker.names:
        if not (folder / name).is_symlink():
            remove_tree(folder / name)


def _remove_empty(aside: Path) -> None:
    (aside / MARKER_FILE).unlink(missing_ok=True)
    with suppress(OSError):  # something else lies in it
        aside.rmdir()


def _lies_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()
