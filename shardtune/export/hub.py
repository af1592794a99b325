"""Uploads a result or an export to the model hub, with its card, and compares what arrived.

The token is `huggingface_hub`'s own affair (HF_TOKEN, or `hf auth login`): it is neither read nor
written here. Files that look as if they hold one aren't sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.checkpoint.hashed_file import FileDigest
from shardtune.checkpoint.manifest import MANIFEST_FILE, Damaged
from shardtune.checkpoint.model_card import CARD_FILE
from shardtune.checkpoint.seal import files_of, folder_faults
from shardtune.errors import Problem, RunError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{30,}\b")
_SEARCHED = 2**22  # larger files are weights
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


@dataclass(frozen=True)
class Upload:
    """What is sent, or would be."""

    folder: Path
    files: dict[str, FileDigest]

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.files.values())


def prepare_upload(folder: Path) -> Upload:
    """The files of a sealed folder; RunError if one was changed, has no card, or holds a token."""
    try:
        files = files_of(folder)
        faults = list(folder_faults(folder, files))
    except Damaged as error:
        faults = [str(error)]
    if faults:
        fix = "write it again; only what was checked is sent"
        raise RunError([Problem(str(folder), fault, fix) for fault in faults[:5]])
    if CARD_FILE not in files:
        fact = f"there is no {CARD_FILE}, the model card"
        raise RunError(Problem(str(folder), fact, "write the result again with this version"))
    for name in sorted(files):
        if files[name].bytes <= _SEARCHED and _TOKEN.search((folder / name).read_bytes()):
            fact = "holds what looks like a token of the hub"
            raise RunError(Problem(str(folder / name), fact, "take it out, and revoke it"))
    return Upload(folder, files)


def push_folder(upload: Upload, repo: str, *, private: bool, api: HfApi | None = None) -> str:
    """Sends all files in one commit and returns the repository's address; RunError if it fails.

    A repository that is there already keeps its visibility; one that is public is refused while a
    private one is asked for.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # Its first base is the error of the HTTP library, whichever that is in this version.
    transport_error: type[Exception] = HfHubHTTPError.__bases__[0]
    api = api or HfApi()
    try:
        address = str(api.create_repo(repo, private=private, exist_ok=True))
        found = api.model_info(repo)
        if private and not found.private:
            fact = "is there already, and public"
            raise RunError(Problem(repo, fact, "add --public, or name another repository"))
        api.upload_folder(
            repo_id=repo,
            folder_path=upload.folder,
            allow_patterns=sorted(upload.files),
            commit_message="Upload by shardtune",
        )
        arrived = api.model_info(repo, files_metadata=True).siblings or []
    except HFValidationError as error:
        raise RunError(Problem(repo, str(error).split("\n")[0], "write it as OWNER/NAME")) from None
    except (OSError, transport_error) as error:
        raise RunError(_explained(repo, error)) from None
    faults = list(_differences(upload, arrived))
    if faults:
        fix = "push it again; files that are there already aren't sent twice"
        raise RunError([Problem(repo, fault, fix) for fault in faults[:5]])
    return address


def _differences(upload: Upload, arrived: list[Any]) -> Iterator[str]:
    """Files that the hub has otherwise than they lie here."""
    there = {each.rfilename: each for each in arrived}
    for name, digest in upload.files.items():
        if name == MANIFEST_FILE:
            continue
        found = there.get(name)
        if found is None:
            yield f"{name} didn't arrive"
        elif found.lfs is not None:
            if found.lfs.sha256 != digest.sha256:
                yield f"{name} arrived with another sha256"
        elif found.blob_id is not None and found.blob_id != _git_hash(upload.folder / name):
            yield f"{name} arrived with other bytes"


def _git_hash(path: Path) -> str:
    """The id that git, and so the hub, gives to a file."""
    data = path.read_bytes()
    return sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _explained(repo: str, error: Exception) -> Problem:
    """What went wrong, without the request: its headers hold the token."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if status in (401, 403) or type(error).__name__ == "LocalTokenNotFoundError":
        return Problem(repo, "the hub refuses to let this account write there", _LOGIN)
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    fact = f"the hub answers {status}" if status else f"the hub can't be reached: {reason}"
    return Problem(repo, _TOKEN.sub(b"hf_...", fact.encode()).decode(), "try again later")
