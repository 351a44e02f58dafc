"""Curves of a run as files: CSV for tables, and event files that TensorBoard reads. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Final

from memoire.dashboard.collect.history import History
from memoire.loggers import first_event, scalars

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


def events_of(history: History, run: str, names: Sequence[str]) -> Iterator[bytes]:
    """The means of these figures as a TensorBoard event file; its steps are the run's."""
    steps = {(time, width): point.greatest for time, width, point in history.all(run, "steps")}
    yield first_event()
    buffer = bytearray()
    for name in names:
        newest = 0
        for time, width, point in history.all(run, name):
            newest = max(newest, int(steps.get((time, width), newest)))
            buffer += scalars({name: point.mean}, newest, float(time))
            if len(buffer) > CHUNK:
                yield bytes(buffer)
                buffer.clear()
    yield bytes(buffer)
