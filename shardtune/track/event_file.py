"""TensorBoard's event files, written without TensorBoard or protobuf.

A file is a sequence of records, each `length (8 bytes), crc of it, data, crc of the data`
(TFRecord); the crc is CRC-32C, rotated and shifted. The data is a protobuf message `Event` with a
time, a step and a `Summary` of values:

    Event:   1 wall_time (double), 2 step (int64), 3 file_version, 5 summary, 7 session_log
    Summary: 1 value, repeated: 1 tag, 2 simple_value (float), 8 tensor, 9 metadata

The format hasn't changed since version 2 of it, of 2016; the tests read it back by TensorBoard's
own reader.
"""

from __future__ import annotations

import os
import socket
import struct
import time as clock
from collections.abc import Iterable, Mapping
from pathlib import Path

_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed
_STRING = 7  # DT_STRING
_START = 1  # SessionLog.START: what an earlier file has from this step on is void


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _crc_table()


def masked_crc(data: bytes) -> bytes:
    """CRC-32C as TFRecord stores it: `rotate right by 15 bits, add 0xa282ead8`."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def record(data: bytes) -> bytes:
    """One TFRecord."""
    length = struct.pack("<Q", len(data))
    return length + masked_crc(length) + data + masked_crc(data)


# Protobuf ----------------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _number(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _double(field: int, number: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", number)


def _event(time: float, step: int, *parts: bytes) -> bytes:
    return _double(1, time) + _number(2, step) + b"".join(parts)


def _scalar(tag: str, value: float) -> bytes:
    number = _varint(2 << 3 | 5) + struct.pack("<f", value)
    return _bytes(1, _bytes(1, tag.encode()) + number)


def _text(tag: str, text: str) -> bytes:
    plugin = _bytes(1, _bytes(1, b"text"))
    tensor = _number(1, _STRING) + _bytes(2, _bytes(2, _number(1, 1))) + _bytes(8, text.encode())
    return _bytes(1, _bytes(1, tag.encode()) + _bytes(8, tensor) + _bytes(9, plugin))


class EventFile:
    """A new event file in a folder. TensorBoard reads those of a folder one after the other."""

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        """From `purge_step` on TensorBoard forgets what earlier files have."""
        folder.mkdir(parents=True, exist_ok=True)
        now = clock.time()
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}"
        number = sum(1 for _ in folder.glob("events.out.tfevents.*"))
        self._file = (folder / f"{name}.{number}").open("xb")
        self._write(_double(1, now) + _bytes(3, b"brain.Event:2"))
        if purge_step is not None:
            self._write(_event(now, purge_step, _bytes(7, _number(1, _START))))

    def scalars(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Points of several curves."""
        self._summary(step, (_scalar(tag, value) for tag, value in values.items()), time)

    def text(self, step: int, tag: str, text: str, time: float) -> None:
        """Markdown, for the tab of texts."""
        self._summary(step, [_text(tag, text)], time)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _summary(self, step: int, values: Iterable[bytes], time: float) -> None:
        self._write(_event(time, step, _bytes(5, b"".join(values))))

    def _write(self, data: bytes) -> None:
        self._file.write(record(data))
