"""One stream for all tabs: each overview is put into words once, and the same bytes go to everybody who listens.

Who is too slow loses the oldest: the next overview says everything again. Who comes back says which one was the last
that he has (Last-Event-ID), and gets those since, as far as they are kept.

Curves of a run as files: CSV for tables, and event files that TensorBoard reads.
"""

from __future__ import annotations

import asyncio
import csv
import io
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Final

import msgspec

from memoire.dashboard.collect.answers import Overview
from memoire.dashboard.collect.history import History
from memoire.loggers import first_event, scalars

MAX_LISTENERS = 200
MAX_KEPT_OVERVIEWS = 600
"""Newest overviews that are sent again to a listener that comes back; each is whole: older ones are not missed."""
BEHIND = 16
"""Overviews that wait for a listener."""
KEEP_ALIVE_INTERVAL = 15.0
"""Seconds of silence after which a comment is sent, so that nobody in between hangs up."""


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


class TooManyListeners(Exception):
    """Too many listen already."""


class ListenerHub:
    """Everybody who listens. `put` may be called from any thread, the rest belongs to the loop."""

    def __init__(self) -> None:
        self._frames: deque[tuple[int, bytes]] = deque(maxlen=MAX_KEPT_OVERVIEWS)
        self._listeners: set[asyncio.Queue[bytes | None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def listeners(self) -> int:
        """How many listen."""
        return len(self._listeners)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send on this loop from now on."""
        self._loop = loop

    def put(self, overview: Overview) -> None:
        """Tell everybody."""
        frame = b"id: %d\nevent: overview\ndata: %b\n\n" % (overview.number, msgspec.json.encode(overview))
        self._frames.append((overview.number, frame))
        if self._loop is not None and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._send, frame)
            except RuntimeError:
                pass  # the loop has just ended

    def close(self) -> None:
        """End all streams; from any thread."""
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._send, None)
            except RuntimeError:
                pass

    def _send(self, frame: bytes | None) -> None:
        for queue in self._listeners:
            while queue.qsize() >= BEHIND:
                queue.get_nowait()
            queue.put_nowait(frame)

    async def listen(self, last: int | None) -> AsyncGenerator[bytes, None]:
        """Frames for one listener, until he leaves or `close`.

        Args:
            last: Number of the newest overview that he has.

        Raises:
            Full: too many listen.
        """
        if len(self._listeners) >= MAX_LISTENERS:
            raise TooManyListeners
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            yield b"retry: 2000\n\n"
            for frame in self._since(last):
                yield frame
            while not self._closed:
                try:
                    wanted = await asyncio.wait_for(queue.get(), KEEP_ALIVE_INTERVAL)
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if wanted is None:
                    return
                yield wanted
        finally:
            self._listeners.discard(queue)

    def _since(self, last: int | None) -> list[bytes]:
        """What he missed; the newest alone where nobody knows what he has."""
        kept = list(self._frames)
        known = last is not None and any(number == last for number, _ in kept)
        return [frame for number, frame in kept if number > (last or 0)] if known else [f for _, f in kept[-1:]]
