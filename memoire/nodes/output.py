"""What launched processes print: on the terminal behind the process' name, and in a file for each of them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from memoire.errors import ParameterError

COLOURS = (36, 33, 32, 35, 34, 31)
"""ANSI colours of the names, one process after the other."""


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
        self._folder = None if folder is None else Path(folder)
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
            print(f"{self._shown(name)} {line}", file=self._terminal, flush=True)
        if self._folder is not None:
            print(line, file=self._file(name), flush=True)

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
