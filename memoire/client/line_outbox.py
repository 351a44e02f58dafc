"""Log lines of a client until its home has them. Pure: time is passed in."""

from __future__ import annotations

from collections import deque

from memoire.wire.messages import Line

LINE_OVERHEAD = 100
"""Bytes that a line takes beside its text, about."""


def cut(text: str, byte_limit: int) -> str:
    """`text` cut to `byte_limit` bytes of UTF-8 at a character's end, with "..." where something is missing."""
    encoded = text.encode("utf-8", "backslashreplace")
    if len(encoded) <= byte_limit:
        return encoded.decode()
    return encoded[: max(0, byte_limit - 3)].decode("utf-8", "ignore") + "..."


class LineOutbox:
    """A client's lines until its home has them: numbered, and bounded in number and bytes. What was taken stays.

    Not thread-safe: the owner locks.
    """

    def __init__(self, *, most_lines: int, most_bytes: int, line_bytes: int) -> None:
        self._lines: deque[Line] = deque()
        self._sizes: deque[int] = deque()
        self._most_lines = most_lines
        self._most_bytes = most_bytes
        self._line_bytes = line_bytes
        self._number = 0
        self.bytes = 0
        """Bytes of the lines that wait."""

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def newest(self) -> int:
        """Number of the newest line ever added; 0 when there is none."""
        return self._number

    @property
    def oldest(self) -> float:
        """Number of the oldest line that still waits; infinity when none does."""
        return self._lines[0].number if self._lines else float("inf")

    @property
    def is_half_full(self) -> bool:
        """Whether it is time to send lines without a pause."""
        return 2 * len(self._lines) >= self._most_lines or 2 * self.bytes >= self._most_bytes

    def add(self, text: str, uuid: int, now: float) -> int:
        """Number the line and keep it until it is acknowledged; returns its number, or 0 when there is no room.

        One line always fits into an empty outbox.
        """
        text = cut(text, self._line_bytes)
        size = len(text.encode()) + LINE_OVERHEAD
        if self._lines and (len(self._lines) >= self._most_lines or self.bytes + size > self._most_bytes):
            return 0
        self._number += 1
        self._lines.append(Line(number=self._number, time=now, label=uuid, text=text))
        self._sizes.append(size)
        self.bytes += size
        return self._number

    def acknowledge(self, through: int) -> None:
        """The home has the lines up to this number."""
        while self._lines and self._lines[0].number <= through:
            self._lines.popleft()
            self.bytes -= self._sizes.popleft()

    def waiting(self, most_lines: int, most_bytes: int, through: int | None = None) -> list[Line]:
        """The oldest lines that fit one message, at least one when there is any; none numbered above `through`."""
        chosen: list[Line] = []
        size = 0
        for line in self._lines:
            size += 4 * len(line.text) + 48  # UTF-8 has at most four bytes a character
            if chosen and (len(chosen) >= most_lines or size > most_bytes):
                break
            if through is not None and line.number > through:
                break
            chosen.append(line)
        return chosen
