"""Uploads, against a server on this machine that speaks the few endpoints of the hub."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from shardtune.checkpoint.seal import seal_folder
from shardtune.cli.main import main
from shardtune.errors import RunError
from shardtune.export.hub import prepare_upload, push_folder
from shardtune.export.source import ExportSource

TOKEN = "hf_" + "a" * 34


@dataclass
class Hub:
    """What the server has been told, and how it answers."""

    files: dict[str, bytes] = field(default_factory=dict)
    private: bool | None = None
    refuses: int = 0
    spoils: str = ""
    tokens: set[str] = field(default_factory=set)
    endpoint: str = ""

    def info(self) -> dict[str, Any]:
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": _blob(data)}
            for name, data in self.files.items()
        ]
        return {"id": "me/model", "private": self.private, "siblings": siblings, "sha": "0" * 40}


def _blob(data: bytes) -> str:
    return sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def hub() -> Iterator[Hub]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(state.info(), state.refuses or 200)

        def do_POST(self) -> None:
            size = int(self.headers.get("content-length") or 0)
            body = self.rfile.read(size) if size else self._chunks()
            state.tokens.add(self.headers.get("authorization", ""))
            if state.refuses:
                self._say({"error": "no"}, state.refuses)
            elif self.path.startswith("/api/repos/create"):
                if state.private is None:
                    state.private = json.loads(body).get(
                        "private", json.loads(body).get("visibility") == "private"
                    )
                self._say({"url": f"{state.endpoint}/me/model", "name": "me/model"})
            elif "/preupload/" in self.path:
                asked = json.loads(body)["files"]
                modes = {"uploadMode": "regular", "shouldIgnore": False}
                self._say({"files": [{"path": each["path"], **modes} for each in asked]})
            elif "/commit/" in self.path:
                for line in body.splitlines():
                    item = json.loads(line)
                    if item["key"] == "file":
                        name = item["value"]["path"]
                        data = base64.b64decode(item["value"]["content"])
                        state.files[name] = data + b" " if name == state.spoils else data
                url = f"{state.endpoint}/me/model/commit/1"
                self._say({"success": True, "commitOid": "1" * 40, "commitUrl": url})
            else:
                self._say({})

        def _chunks(self) -> bytes:
            found = b""
            while size := int(self.rfile.readline() or b"0", 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            return found

        def _say(self, answer: dict[str, Any], status: int = 200) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield state
    server.shutdown()
    server.server_close()


def _push(source: ExportSource, hub: Hub, *, private: bool = True) -> str:
    api = HfApi(endpoint=hub.endpoint, token=TOKEN)
    return push_folder(prepare_upload(source.run.result), "me/model", private=private, api=api)


def test_all_files_arrive_in_a_private_repository(source: ExportSource, hub: Hub) -> None:
    address = _push(source, hub)
    assert address.endswith("/me/model")
    assert hub.private is True
    assert hub.tokens == {f"Bearer {TOKEN}"}
    sealed = prepare_upload(source.run.result).files
    assert set(hub.files) == set(sealed)
    for name, data in hub.files.items():
        assert data == (source.run.result / name).read_bytes()
        assert TOKEN.encode() not in data


def test_a_file_that_arrives_otherwise_is_named(source: ExportSource, hub: Hub) -> None:
    hub.spoils = "adapter_config.json"
    with pytest.raises(RunError, match=r"adapter_config\.json arrived with other bytes"):
        _push(source, hub)


def test_a_public_repository_isnt_filled_by_accident(source: ExportSource, hub: Hub) -> None:
    hub.private = False
    with pytest.raises(RunError, match="is there already, and public"):
        _push(source, hub)
    assert not hub.files
    _push(source, hub, private=False)


@pytest.mark.parametrize(("status", "told"), [(401, "refuses to let"), (404, "answers 404")])
def test_errors_say_what_to_do_and_no_token(
    source: ExportSource, hub: Hub, status: int, told: str
) -> None:
    hub.refuses = status
    with pytest.raises(RunError, match=told) as error:
        _push(source, hub)
    assert TOKEN not in str(error.value)


def test_a_hub_that_cant_be_reached(source: ExportSource) -> None:
    api = HfApi(endpoint="http://127.0.0.1:9", token=TOKEN)
    with pytest.raises(RunError, match="can't be reached") as error:
        push_folder(prepare_upload(source.run.result), "me/model", private=True, api=api)
    assert TOKEN not in str(error.value)


def test_a_name_that_is_none(source: ExportSource, hub: Hub) -> None:
    api = HfApi(endpoint=hub.endpoint, token=TOKEN)
    with pytest.raises(RunError, match="OWNER/NAME"):
        push_folder(prepare_upload(source.run.result), "a/b/c", private=True, api=api)


def test_a_dry_run_lists_files(source: ExportSource, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(source.run.path), "me/model", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "adapter_model.safetensors" in said
    assert "README.md" in said
    assert "(private); nothing was sent" in said


def test_a_token_in_a_file_isnt_sent(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("a card")
    (tmp_path / "notes.json").write_text(json.dumps({"token": TOKEN}))
    seal_folder(tmp_path)
    with pytest.raises(RunError, match="looks like a token") as error:
        prepare_upload(tmp_path)
    assert TOKEN not in str(error.value)


def test_a_changed_file_isnt_sent(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("a card")
    seal_folder(tmp_path)
    (tmp_path / "README.md").write_text("another")
    with pytest.raises(RunError, match=r"README\.md"):
        prepare_upload(tmp_path)
