"""Where figures go while a run goes on: TensorBoard's files, Trackio, or whatever has a call like
`log(figures, step=7)`.

`memoire report` and `memoire.dashboard.terminal.log_tail` give the figures of a whole cluster to a logger. A learner
gives its own, and those of its server:

    with contextlib.closing(TensorBoard("runs/breakout")) as logger:
        logger.log({"loss": loss} | figures(server.stats()), step)

What has two methods is a logger. Where somebody else's functions do the work, one line makes one:

    Functions(wandb.log, wandb.finish)
    Functions(mlflow.log_metrics, mlflow.end_run)
    Functions(trackio.log, trackio.finish)
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import json
import logging
import math
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from memoire.limits import wall_clock

from .errors import NotInstalled, ParameterError

__all__ = ["Functions", "JsonLines", "Logger", "TensorBoard", "Trackio", "Wandb", "figures"]

_log = logging.getLogger(__name__)

WARNING_INTERVAL = 60.0
"""Seconds between two warnings about a file that cannot be written."""


class Logger(Protocol):
    """Takes figures by name."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """These are the figures at this step; steps do not go back."""

    def close(self) -> None:
        """Nothing comes any more."""


class Functions:
    """A logger out of functions.

    Args:
        log: Called as `log(figures, step=step)`.
        close: Called once at the end.
    """

    def __init__(self, log: Callable[..., object], close: Callable[[], object] = lambda: None) -> None:
        self._log, self._close = log, close

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Hand the figures on, as a dictionary of their own."""
        self._log(dict(figures), step=step)

    def close(self) -> None:
        """Hand that on, too."""
        self._close()


class _File:
    """A file to which records are added, each as a whole.

    One that cannot be written, such as on a full disk, is cut back to its last record, and the record is lost: once a
    minute a warning says how many. Training goes on.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.path = path
        self._clock = clock
        self._lost, self._warned = 0, -math.inf

    def add(self, record: bytes) -> None:
        """Add a record; a reader sees it at once."""
        try:
            with self.path.open("ab", buffering=0) as file:
                start = file.tell()
                if file.write(record) == len(record):
                    return
                file.truncate(start)
                reason = os.strerror(errno.ENOSPC)
        except OSError as error:
            reason = str(error.strerror)
        self._lost += 1
        if self._clock() - self._warned >= WARNING_INTERVAL:
            self._warned = self._clock()
            _log.warning("%s: %d records are lost so far: %s", self.path, self._lost, reason)


class TensorBoard:
    """Writes an event file that TensorBoard reads while it grows. TensorBoard itself is not needed here.

    Args:
        folder: Where the file goes; it is made. TensorBoard shows each folder as a run.
        clock: Seconds since 1970.

    Raises:
        OSError: the folder cannot be made or written.
    """

    def __init__(self, folder: str | os.PathLike[str], clock: Callable[[], float] = wall_clock) -> None:
        place = Path(folder).absolute()
        place.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        name = f"events.out.tfevents.{clock():.0f}.{socket.gethostname()}.{os.getpid()}.{id(self):x}"
        self.path = place / name
        """The file."""
        self.path.write_bytes(first_event())
        self._file = _File(self.path, clock)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Write the finite ones of these figures; a reader sees them at once. A full disk loses them."""
        self._file.add(scalars(figures, step, self._clock()))

    def close(self) -> None:
        """Nothing: each record is written as a whole."""


class Trackio:
    """Figures to Trackio, which keeps them on this machine: `pip install trackio`, then `trackio show`.

    Args:
        project: What Trackio shows runs under.
        name: Of the run.
        options: What else `trackio.init` takes.

    Raises:
        NotInstalled: Trackio is not there.
    """

    def __init__(self, project: str, name: str | None = None, **options: Any) -> None:
        with NotInstalled.explained("pip install trackio"):
            trackio: Any = importlib.import_module("trackio")
        self._run = trackio.init(project=project, name=name, **options)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Hand the figures on."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Wait until all are kept."""
        self._run.finish()


class JsonLines:
    """Appends a line of JSON for each call: {"step": 7, "time": ..., "loss": 0.25}.

    Args:
        path: Of the file; its folder is made.
        clock: Seconds since 1970.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = wall_clock) -> None:
        self.path = Path(path).absolute()
        """The file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._file = _File(self.path, clock)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Write the finite ones of these figures; a reader sees them at once. A full disk loses them."""
        finite = {name: float(value) for name, value in figures.items() if math.isfinite(value)}
        self._file.add(json.dumps({"step": step, "time": self._clock()} | finite).encode() + b"\n")

    def close(self) -> None:
        """Nothing: each line is written as a whole."""


class Wandb:
    """Figures to Weights & Biases. If it cannot be reached, lines of JSON go on without it.

    Args:
        project, entity, run_id: As of `wandb.init`; a run of this id goes on.
        key: What it lets this process in by. It is in the environment while `wandb.init` runs, and nowhere else.
        config: What else describes the run.
        fallback: File of lines of JSON, written in any case; None writes none.
        attempts: Times that `wandb.init` is tried.

    Raises:
        NotInstalled: wandb is not there.
    """

    KEY = "WANDB_API_KEY"

    def __init__(
        self,
        project: str,
        *,
        entity: str | None = None,
        run_id: str | None = None,
        key: str | None = None,
        config: Mapping[str, Any] | None = None,
        fallback: str | os.PathLike[str] | None = None,
        attempts: int = 3,
    ) -> None:
        with NotInstalled.explained("pip install wandb"):
            wandb: Any = importlib.import_module("wandb")
        self._lines = None if fallback is None else JsonLines(fallback)
        self._run: Any = None
        options = {"project": project, "entity": entity or None, "id": run_id or None, "config": dict(config or {})}
        for attempt in range(attempts):
            try:
                with _environment(self.KEY, key):
                    self._run = wandb.init(resume="allow", **options)
                return
            except Exception as error:  # of a foreign library: whatever it is, training goes on
                _log.warning("wandb.init failed, attempt %d of %d: %s", attempt + 1, attempts, type(error).__name__)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Hand the figures on."""
        if self._lines is not None:
            self._lines.log(figures, step)
        if self._run is not None:
            try:
                self._run.log(dict(figures), step=step)
            except Exception as error:  # the same
                _log.warning("wandb takes no more figures: %s", type(error).__name__)
                self._run = None

    def close(self) -> None:
        """Wait until all are kept."""
        if self._run is not None:
            self._run.finish()


@contextlib.contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """A variable of the environment while this lasts; None leaves it as it is."""
    former = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if value is not None:
            os.environ.pop(name, None)
            if former is not None:
                os.environ[name] = former


def keywords_of(made: Any, where: str = "training_cls") -> dict[str, Any]:
    """What a class was partially given, by name, nested: for a run's description.

    Raises:
        ParameterError: an argument was given without its name; says which class it is of.
    """
    if getattr(made, "args", ()):
        name = getattr(getattr(made, "func", made), "__qualname__", repr(made))
        raise ParameterError(where, f"{name} with arguments without names: {made.args!r:.80}", "keywords only")
    found: dict[str, Any] = {}
    for name, value in getattr(made, "keywords", {}).items():
        inner = keywords_of(value, f"{where}.{name}") if hasattr(value, "keywords") else None
        found[name] = inner or (value if isinstance(value, bool | int | float | str) else _called(value))
    return found


def _called(value: Any) -> str:
    return str(getattr(getattr(value, "func", value), "__qualname__", repr(value)))[:200]


def figures(stats: Any, prefix: str = "") -> dict[str, float]:
    """All finite numbers in what `stats()` of a node gives, by name: "tables.default.samples". Booleans and texts are
    left out.

    Args:
        prefix: What names begin with, such as "server.".
    """
    if dataclasses.is_dataclass(stats) and not isinstance(stats, type):
        stats = {each.name: getattr(stats, each.name) for each in dataclasses.fields(stats)}
    if isinstance(stats, Mapping):
        inner = (figures(value, f"{prefix}.{name}" if prefix else str(name)) for name, value in stats.items())
        return {name: value for each in inner for name, value in each.items()}
    is_figure = isinstance(stats, int | float) and not isinstance(stats, bool) and math.isfinite(stats)
    return {prefix: float(stats)} if is_figure else {}


# ------------------------------------------------------------------------------------------------------ event files
#
# An event file is a row of records: length, checksum of the length, bytes, checksum of the bytes; each record is a
# protocol buffer `Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5 }`, with
# `Summary { repeated Value value = 1 }` and `Value { string tag = 1; float simple_value = 2 }`.


def first_event() -> bytes:
    """What an event file begins with."""
    return _record(_double(1, 0.0) + _bytes(3, b"brain.Event:2"))


def scalars(figures: Mapping[str, float], step: int, seconds: float) -> bytes:
    """One record with the finite ones of these figures at a step; b"" where there is none.

    Args:
        seconds: Since 1970.
    """
    if not 0 <= step < 1 << 63:
        raise ParameterError("step", step, "a whole number from 0 to 2**63 - 1")
    values = [_bytes(1, name.encode()) + _float(2, value) for name, value in figures.items() if math.isfinite(value)]
    summary = b"".join(_bytes(1, value) for value in values)
    return _record(_double(1, seconds) + _varint_field(2, step) + _bytes(5, summary)) if values else b""


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(length)) + data + struct.pack("<I", masked(data))


def _double(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return bytes([field << 3 | 5]) + struct.pack("<f", max(-LARGEST, min(LARGEST, value)))


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


def masked(data: bytes) -> int:
    """The checksum of a record's part, as event files have it."""
    checksum = crc32c(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _table() -> tuple[int, ...]:
    def entry(value: int) -> int:
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        return value

    return tuple(entry(value) for value in range(256))


LARGEST: Final = 3.4028234663852886e38
"""The largest number of a float32, in which event files have figures."""
_CRC: Final = _table()


def crc32c(data: Iterable[int]) -> int:
    """The Castagnoli checksum (RFC 3720, appendix B.4)."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _CRC[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF
