"""Curves of a run as files: CSV for tables, and event files that TensorBoard reads. Pure."""

from __future__ import annotations

import csv
import io
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from memoire.dashboard.collect.history import History

CHUNK: Final = 64 << 10


def csv_of(history: History, run: str, names: Sequence[str]) -> Iterator[bytes]:
    """Lines "time,seconds,steps,NAME,NAME (least),NAME (greatest),...": each bucket once, as finely as it is kept."""
    columns = {name: {(time, width): point for time, width, point in history.all(run, name)} for name in names}
    steps = {(time, width): point.greatest for time, width, point in history.all(run, "steps")}
    keys = sorted({key for column in columns.values() for key in column})
    text = io.StringIO()
    write = csv.writer(text).writerow
    write(
        ["time", "seconds", "steps", *(f"{name}{part}" for name in names for part in ("", " (least)", " (greatest)"))]
    )
    for key in keys:
        row: list[object] = [key[0], key[1], steps.get(key, "")]
        for name in names:
            point = columns[name].get(key)
            row += ["", "", ""] if point is None else [repr(point.mean), repr(point.least), repr(point.greatest)]
        write(row)
        if text.tell() > CHUNK:
            yield text.getvalue().encode()
            text.seek(0)
            text.truncate()
    yield text.getvalue().encode()


# An event file is a row of records: length, checksum of the length, bytes, checksum of the bytes; each record is a
# protocol buffer `Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5 }`, with
# `Summary { repeated Value value = 1 }` and `Value { string tag = 1; float simple_value = 2 }`.


def events_of(history: History, run: str, names: Sequence[str]) -> Iterator[bytes]:
    """The means of these figures as a TensorBoard event file; its steps are the run's."""
    steps = {(time, width): point.greatest for time, width, point in history.all(run, "steps")}
    yield _record(_double(1, 0.0) + _bytes(3, b"brain.Event:2"))
    buffer = bytearray()
    for name in names:
        newest = 0
        for time, width, point in history.all(run, name):
            newest = max(newest, int(steps.get((time, width), newest)))
            value = _bytes(1, name.encode()) + _float(2, point.mean)
            buffer += _record(_double(1, float(time)) + _varint_field(2, newest) + _bytes(5, _bytes(1, value)))
            if len(buffer) > CHUNK:
                yield bytes(buffer)
                buffer.clear()
    yield bytes(buffer)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def _double(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return bytes([field << 3 | 5]) + struct.pack("<f", value)


def _varint_field(field: int, value: int) -> bytes:
    return bytes([field << 3]) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _masked(data: bytes) -> int:
    checksum = crc32c(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _table() -> tuple[int, ...]:
    def entry(value: int) -> int:
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        return value

    return tuple(entry(value) for value in range(256))


_CRC: Final = _table()


def crc32c(data: Iterable[int]) -> int:
    """The Castagnoli checksum (RFC 3720, appendix B.4)."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _CRC[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF
