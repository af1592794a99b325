"""`launch.storage`: a run directory copied to a file system and to a real S3-compatible server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardtune.errors import LaunchRefused

pytestmark = pytest.mark.long  # to import ray takes seconds
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip


def copy(folder: Path, target: str) -> None:
    pytest.importorskip("ray", reason="ray is not installed (shardtune[ray])")
    from shardtune.cli.start.train_on_ray import _copy

    _copy(folder, target)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "result").mkdir(parents=True)
    (folder / "job.yaml").write_text("model: {name: tiny}\n")
    (folder / "result" / "weights.safetensors").write_bytes(bytes(range(256)) * 4096)
    return folder


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Any]]:
    """Where a server listens, and a client of it."""
    moto = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    boto3 = pytest.importorskip("boto3")
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
        client.create_bucket(Bucket="runs")
        yield f"{host}:{port}", client
    finally:
        server.stop()


def test_a_file_system(run: Path, tmp_path: Path) -> None:
    copy(run, f"file://{tmp_path}/elsewhere/mine")
    there = tmp_path / "elsewhere" / "mine"
    names = [path.relative_to(run) for path in run.rglob("*") if path.is_file()]
    assert len(names) == 2
    assert all((there / name).read_bytes() == (run / name).read_bytes() for name in names)


def test_s3(run: Path, s3: tuple[str, Any]) -> None:
    address, client = s3
    copy(run, f"s3://runs/mine?scheme=http&endpoint_override={address}")
    keys = {each["Key"] for each in client.list_objects_v2(Bucket="runs")["Contents"]}
    assert {"mine/job.yaml", "mine/result/weights.safetensors"} <= keys
    found = client.get_object(Bucket="runs", Key="mine/result/weights.safetensors")["Body"].read()
    assert found == (run / "result" / "weights.safetensors").read_bytes()


def test_what_cannot_be_written_is_said(run: Path, s3: tuple[str, Any]) -> None:
    address, _ = s3
    with pytest.raises(LaunchRefused, match="the run itself is complete"):
        copy(run, f"s3://no-such-bucket/x?scheme=http&endpoint_override={address}")
