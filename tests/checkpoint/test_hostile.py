"""A checkpoint that somebody made to do harm: it is refused, and nothing of it is run."""

from __future__ import annotations

import ast
import io
import json
import pickle
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import shardtune
from shardtune.checkpoint.latest import latest_checkpoint
from shardtune.checkpoint.manifest import MANIFEST_FILE, seal
from shardtune.checkpoint.reader import Reader
from shardtune.errors import RunError
from shardtune.launch.process_group import JoinedWorld
from tests.checkpoint.together import save as save_checkpoint


class Canary:
    """Leaves a file behind if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def zipped(data: bytes) -> bytes:
    """As torch.save writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", data)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["pickle", "zip", "torch", "other tensors", "huge header"])
def test_a_forged_file_is_refused_and_nothing_is_run(tmp_path: Path, kind: str) -> None:
    """Its hash is in the manifest, and the manifest is sealed: only reading can find out."""
    folder, canary = tmp_path / "checkpoints", tmp_path / "canary"
    save_checkpoint(folder, 3, ranks=1, file_size=1 << 20)
    evil = pickle.dumps(Canary(canary))
    buffer = io.BytesIO()
    torch.save({"weight": Canary(canary)}, buffer)
    data = {
        "pickle": evil,
        "zip": zipped(evil),
        "torch": buffer.getvalue(),
        "other tensors": save({"weight.a.b": torch.ones(2, 2)}),
        "huge header": (1 << 62).to_bytes(8, "little") + evil,
    }[kind]
    path = next((folder / "step-000003").glob("*.safetensors"))
    path.write_bytes(data)
    manifest = path.parent / MANIFEST_FILE
    body = json.loads(manifest.read_text())
    del body["seal"]
    body["files"][path.name] = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    manifest.write_text(seal(body))

    found = latest_checkpoint(folder, "run", JoinedWorld()).checkpoint
    assert found is not None, "to the manifest it is good"
    state = Reader(*found)
    for key in state:
        with pytest.raises(RunError, match="can't be read"):
            state[key]
    assert not canary.exists()
    pickle.loads(evil)
    assert canary.exists(), "the canary itself works"


FORBIDDEN = {
    "pickle", "cPickle", "dill", "marshal", "shelve", "joblib", "torch.load", "os.system",
    "os.popen", "eval", "exec", "shell", "read_pickle", "allow_pickle",
}  # fmt: skip


def names_in(tree: ast.AST) -> set[str]:
    """Modules imported, functions called, and permissions given to them."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
            given = {k.arg for k in node.keywords if k.arg and ast.unparse(k.value) != "False"}
            found |= given & {"shell", "allow_pickle"}
    return found


@pytest.mark.slow
def test_no_line_of_ours_unpickles_or_calls_a_shell() -> None:
    for path in sorted(Path(shardtune.__file__).parent.rglob("*.py")):
        found = names_in(ast.parse(path.read_text(encoding="utf-8")))
        assert (path, found & FORBIDDEN) == (path, set())
    example = ast.parse("import pickle\ntorch.load(f)\nrun(c, shell=True)")
    assert names_in(example) >= {"pickle", "torch.load", "shell"}, "the gate can fail"
