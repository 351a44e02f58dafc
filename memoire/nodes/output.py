"""What a process of long life and those that it has launched print: on a terminal, and in a file for each of them."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import weakref
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from memoire.errors import ParameterError

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of a write to a file that takes no more, such as on a full disk."""
COLOURS = (36, 33, 32, 35, 34, 31)
"""ANSI colours of the names, one process after the other."""


def accept_all_text() -> None:
    """Have standard output and error write characters that their encoding lacks as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(line: str, file: IO[str] | None = None) -> None:
    """Print a line at once, on standard output if no file is given.

    A line that cannot be written, such as on a full disk, is lost, and the process goes on. Standard error says so once
    for each file.

    Raises:
        BrokenPipeError: what reads the output has ended.
    """
    stream = sys.stdout if file is None else file
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        if stream is not sys.stderr and stream not in _LOST:
            _LOST.add(stream)
            note(f"output to {getattr(stream, 'name', 'a file')} cannot be written, and is lost: {error.strerror}")


def note(line: str) -> None:
    """Say something on standard error, beside what a command or its processes print."""
    say(f"memoire: {line}", sys.stderr)


_LOST: weakref.WeakSet[IO[str]] = weakref.WeakSet()
"""Files of which that was said."""


def discard() -> None:
    """Write nothing more to standard output, also not what is still in its buffer when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class ProcessOutput:
    """Takes the lines of all processes.

    Args:
        names: Of the processes; the longest decides how far lines are moved in.
        folder: Where each process has a file NAME.log, to which lines are added; None writes no files.
        terminal: Where lines are shown; None shows none.

    Raises:
        ParameterError: the folder is none, and cannot be made.
    """

    def __init__(self, names: list[str], folder: str | None = None, terminal: IO[str] | None = None) -> None:
        self._width = max(map(len, names), default=0)
        self._colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
        self._terminal = terminal
        self._is_coloured = terminal is not None and terminal.isatty() and not os.environ.get("NO_COLOR")
        self._folder = None if folder is None else Path(folder).absolute()
        self._files: dict[str, IO[str]] = {}
        try:
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ParameterError(
                "--logs", folder, f"a folder that is there or can be made: {error.strerror}"
            ) from error

    def __call__(self, name: str, line: str) -> None:
        """Take a line that a process printed."""
        if self._terminal is not None:
            say(f"{self._shown(name)} {line}", self._terminal)
        if self._folder is not None:
            say(line, self._file(name))

    def close(self) -> None:
        """Close the files."""
        with contextlib.ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)

    def _shown(self, name: str) -> str:
        text = f"{name:<{self._width}} |"
        return f"\x1b[{self._colours.get(name, 37)}m{text}\x1b[0m" if self._is_coloured else text

    def _file(self, name: str) -> IO[str]:
        assert self._folder is not None
        if name not in self._files:
            self._files[name] = (self._folder / f"{name}.log").open("a", encoding="utf-8")
        return self._files[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
