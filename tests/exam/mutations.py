"""What can become of a run directory: files removed, renamed, torn, swapped, replaced by odd kinds,
and files of other people among them."""

from __future__ import annotations

import os
import random
import shutil
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shardtune.checkpoint.run_marker import MARKER_FILE

Snapshot = dict[str, tuple[str, bytes]]
"""Of each path in a folder: its kind, and its bytes, or where a link leads."""


def snapshot(folder: Path) -> Snapshot:
    """Everything in a folder; nothing is opened but regular files."""
    found: Snapshot = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            found[str(path.relative_to(folder))] = _kind(path)
    return found


def _kind(path: Path) -> tuple[str, bytes]:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return "link", os.fsencode(path.readlink())
    if stat.S_ISDIR(mode):
        return "folder", b""
    return ("file", path.read_bytes()) if stat.S_ISREG(mode) else ("odd", b"")


@dataclass
class State:
    """A run directory, and which files in it are somebody's."""

    place: Path
    run: Path
    other: Path
    """The directory of another run."""
    foreign: set[Path] = field(default_factory=set)

    def changed(self, before: Snapshot, after: Snapshot) -> list[str]:
        """Files that aren't the run's and are no longer as they were. A folder of the run that was
        set aside may have taken them with it."""
        outside = {name for name in before if name.split("/")[0] in ("users", "rows.jsonl")}
        inside = {str(path.relative_to(self.place)) for path in self.foreign}
        wrong = []
        for name in sorted(outside | inside):
            places = [name, *(n for n in after if _set_aside(name, n))]
            if name in before and before[name] not in [after.get(each) for each in places]:
                wrong.append(name)
        return wrong


def _set_aside(name: str, now: str) -> bool:
    """Whether `now` is `name` in a folder that was set aside, or in a run that was put back, or
    first the one and then the other."""
    one, two = name.split("/"), now.split("/")
    back = [part for part in one if not part.endswith(".overwritten")]
    if back != one:
        return back == two or _set_aside("/".join(back), now)
    apart = [k for k in range(min(len(one), len(two))) if one[k] != two[k]]
    if len(one) != len(two) or len(apart) != 1:
        return False
    end = two[apart[0]].removeprefix(one[apart[0]])
    return end.startswith((".damaged", ".of-another-run")) and end != two[apart[0]]


Mutation = Callable[[random.Random, State], str | None]
"""Does something to the directory; says what, or nothing if it couldn't."""


def _pick(draw: random.Random, about: State, *, folders: bool = False) -> Path | None:
    """A path of the run, the small files at its top as likely as all that is below."""
    paths = [p for p in sorted(about.run.rglob("*")) if p not in about.foreign]
    paths = [p for p in paths if folders or (p.is_file() and not p.is_symlink())]
    top = [p for p in paths if p.parent == about.run]
    pool = top if top and draw.random() < 0.5 else paths
    return draw.choice(pool) if pool else None


def _name(about: State, path: Path) -> str:
    return str(path.relative_to(about.run))


def _erase(about: State, path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        about.foreign -= set(path.rglob("*"))
        shutil.rmtree(path)
    else:
        path.unlink()


def remove(draw: random.Random, about: State) -> str | None:
    if (path := _pick(draw, about, folders=True)) is None:
        return None
    _erase(about, path)
    return _name(about, path)


def rename(draw: random.Random, about: State) -> str | None:
    """What has another name isn't the run's any more."""
    if (path := _pick(draw, about, folders=True)) is None:
        return None
    target = path.with_name(f"{path.name}{draw.choice(('.bak', '~', ' copy'))}")
    if target.exists():
        return None
    moved = {target / each.relative_to(path) for each in about.foreign if path in each.parents}
    about.foreign = {each for each in about.foreign if path not in each.parents} | moved
    path.rename(target)
    inside = [each for each in target.rglob("*") if each.is_file()] if target.is_dir() else [target]
    about.foreign |= set(inside)
    return f"{_name(about, path)} to {target.name}"


def truncate(draw: random.Random, about: State) -> str | None:
    if (path := _pick(draw, about)) is None:
        return None
    data = path.read_bytes()
    path.write_bytes(data[: draw.choice((0, len(data) // 2, max(0, len(data) - 1)))])
    return _name(about, path)


def flip(draw: random.Random, about: State) -> str | None:
    if (path := _pick(draw, about)) is None or not path.stat().st_size:
        return None
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return _name(about, path)


def scribble(draw: random.Random, about: State) -> str | None:
    """A line too many, or a file of another kind altogether."""
    if (path := _pick(draw, about)) is None:
        return None
    odd = (
        b"{\n",
        b"null\n",
        b"[1]\n",
        b"\xff\xfe\n",
        b"{}\n",
        b"[" * 5000 + b"\n",
        b'{"step": "x"}\n',
    )
    data = draw.choice(odd)
    path.write_bytes(data if draw.random() < 0.5 else path.read_bytes() + data)
    return _name(about, path)


def swap(draw: random.Random, about: State) -> str | None:
    one, two = _pick(draw, about), _pick(draw, about)
    if one is None or two is None or one == two:
        return None
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    return f"{_name(about, one)} and {_name(about, two)}"


def of_another_run(draw: random.Random, about: State) -> str | None:
    """The same file of another run."""
    if (path := _pick(draw, about)) is None:
        return None
    source = about.other / path.relative_to(about.run)
    if not source.is_file():
        return None
    path.write_bytes(source.read_bytes())
    return _name(about, path)


def odd_kind(draw: random.Random, about: State) -> str | None:
    """Something else in the place of a file or a folder."""
    if (path := _pick(draw, about, folders=True)) is None:
        return None
    _erase(about, path)
    kind = draw.choice(("fifo", "loop", "dangling", "to users", "to a folder", "folder", "socket"))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to(about.place / "not" / "there")
    elif kind == "to users":
        path.symlink_to(about.place / "users" / "thesis.txt")
    elif kind == "to a folder":
        path.symlink_to(about.place / "users")
    elif kind == "folder":
        path.mkdir()
        (path / "mine.txt").write_text("mine\n", "utf-8")
        about.foreign.add(path / "mine.txt")
    else:
        here = Path.cwd()
        os.chdir(path.parent)  # the name of a socket may not be long
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
        finally:
            os.chdir(here)
    return f"{_name(about, path)} is {kind}"


def add_foreign(draw: random.Random, about: State) -> str | None:
    """A file of somebody's, anywhere."""
    folders = [about.run, *(p for p in sorted(about.run.rglob("*")) if p.is_dir())]
    folders = [p for p in folders if not p.is_symlink()]
    names = ("thesis.txt", ".x.partial", ".x.replaced", "notes.md", ".hidden", "step-notes", "x/y",
             "result.damaged", "manifest.json.bak", "README", ".step-9.partial")  # fmt: skip
    path = draw.choice(folders) / draw.choice(names)
    if path.exists() or path.parent.is_file():
        return None
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"mine {draw.random()}\n", "utf-8")
    about.foreign.add(path)
    return _name(about, path)


def foreign_checkpoint(draw: random.Random, about: State) -> str | None:
    """A checkpoint of another run, under its own number or as one that is yet to come."""
    source = draw.choice(sorted((about.other / "checkpoints").iterdir()))
    target = about.run / "checkpoints" / source.name
    if target.exists() or target.is_symlink() or not target.parent.is_dir():
        return None
    shutil.copytree(source, target)
    about.foreign |= set(target.iterdir())
    return _name(about, target)


def lose_checkpoints(draw: random.Random, about: State) -> str | None:
    """A disk that isn't mounted."""
    folder = about.run / "checkpoints"
    if not folder.is_dir() or folder.is_symlink():
        return None
    _erase(about, folder)
    if draw.random() < 0.5:
        folder.mkdir()
    return ""


def lose_result(draw: random.Random, about: State) -> str | None:
    folder = about.run / "result"
    if not folder.is_dir() or folder.is_symlink():
        return None
    _erase(about, folder)
    return ""


def lose_marker(draw: random.Random, about: State) -> str | None:
    path = about.run / MARKER_FILE
    if not path.is_file() or path.is_symlink():
        return None
    path.unlink()
    return ""


def leftovers(draw: random.Random, about: State) -> str | None:
    """What a killed save leaves."""
    folder = about.run / "checkpoints"
    if not folder.is_dir() or folder.is_symlink():
        return None
    (folder / ".step-000003.partial").mkdir(exist_ok=True)
    (folder / ".step-000003.partial" / "rank-00000-000.safetensors").write_bytes(b"half")
    (about.run / ".report.json.partial").write_text("{", "utf-8")
    return ""


MUTATIONS: tuple[Mutation, ...] = (
    remove, remove, rename, truncate, truncate, flip, scribble, swap, of_another_run, odd_kind,
    odd_kind, add_foreign, add_foreign, add_foreign, foreign_checkpoint, lose_checkpoints,
    lose_result, lose_marker, leftovers,
)  # fmt: skip
