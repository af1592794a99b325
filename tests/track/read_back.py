"""Reads what trackers hold by their own readers. Each returns every point that was written, in the
order of writing: `(curve, step, value)`."""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Iterator
from pathlib import Path

Point = tuple[str, int, float]


def tensorboard_points(folder: Path) -> list[Point]:
    """By TensorBoard's reader of a folder, which follows its files as the web page does."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return [
        (tag, each.step, each.value)
        for tag in found.Tags()["scalars"]
        for each in found.Scalars(tag)
    ]


def tensorboard_texts(folder: Path) -> dict[str, str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    found.Reload()
    return {
        tag: each.tensor_proto.string_val[0].decode()
        for tag in found.Tags()["tensors"]
        for each in found.Tensors(tag)
    }


def csv_points(folder: Path) -> list[Point]:
    with (folder / "points.csv").open(newline="", encoding="utf-8") as file:
        return [
            (row["name"], int(row["step"]), float(row["value"])) for row in csv.DictReader(file)
        ]


def mlflow_points(store: Path, run: str) -> list[Point]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=store.absolute().as_uri())
    names = client.get_run(run).data.metrics
    return [
        (name, each.step, each.value)
        for name in names
        for each in client.get_metric_history(run, name)
    ]


def wandb_rows(folder: Path) -> list[dict[str, object]]:
    """The rows of every offline file of W&B, parsed by its own protobuf classes."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for path in sorted(folder.rglob("*.wandb")):
        for data in _leveldb_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                items = record.history.item
                rows.append(
                    {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                )
    return rows


def wandb_points(folder: Path) -> list[Point]:
    return [
        (name, int(str(row["train/global_step"])), value)
        for row in wandb_rows(folder)
        for name, value in row.items()
        if name.startswith(("train/", "eval/", "task/"))
        and name != "train/global_step"
        and isinstance(value, int | float)
    ]


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    """A `.wandb` file is a log of LevelDB: 7 bytes of W&B's own, then blocks of 32 KiB with records
    `crc (4), length (2), type (1)`; type 1 is whole, 2 to 4 are first, middle and last parts."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        part = data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind == 1:
            yield part
        elif kind in (2, 3):
            parts = part if kind == 2 else parts + part
        elif kind == 4:
            yield parts + part


def trackio_points(run: str) -> list[Point]:
    from trackio.sqlite_storage import SQLiteStorage

    return [
        (name, row["step"], value)
        for row in SQLiteStorage.get_logs("shardtune", run)
        for name, value in row.items()
        if name.startswith(("train/", "eval/", "task/"))
    ]
