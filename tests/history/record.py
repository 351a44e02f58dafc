"""A history: one JSON object a line, written before something is done and after it was answered."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Recorder:
    """Appends events to a file, each in one write: what was recorded survives a SIGKILL of this process.

    Args:
        by: Name of this process, such as "actor-3"; in each event.
    """

    def __init__(self, path: Path | str, by: str) -> None:
        self.by = by
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()

    def __call__(self, do: str, **facts: Any) -> float:
        """Record an event; returns its time, by the clock that all processes of this machine share."""
        now = time.monotonic()
        line = json.dumps({"t": round(now, 6), "by": self.by, "do": do, **facts}, separators=(",", ":")) + "\n"
        with self._lock:
            os.write(self._file, line.encode())
        return now

    def close(self) -> None:
        os.close(self._file)


def read(folder: Path) -> list[Event]:
    """All events of all files in a folder, in the order of time."""
    events = []
    for path in sorted(folder.glob("*.jsonl")):
        *whole, rest = path.read_text(encoding="utf-8").split("\n")
        assert not rest, f"{path.name} ends in the middle of a line: {rest[:80]!r}"
        events += [json.loads(line) for line in whole]
    return sorted(events, key=lambda event: event["t"])
