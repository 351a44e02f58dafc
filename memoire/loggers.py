"""Loggers of figures during a run: TensorBoard's files, Trackio, Weights & Biases, lines of JSON, or other functions.

`memoire report` and `memoire.dashboard.terminal.log_tail` write the figures of a whole cluster to a logger. A learner
writes its own figures and those of its server:

    with contextlib.closing(TensorBoard("runs/breakout")) as logger:
        logger.log({"loss": loss} | figures(server.stats()), step)

A logger has two methods, `log` and `close`. `Functions` wraps the functions of another library as a logger:

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
    """Type of objects that write figures, such as a loss, by name and step."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Write the figures of a step. Steps never decrease."""

    def close(self) -> None:
        """End the logger; `log` is not called again."""


class Functions:
    """Logger that calls functions of another library.

    Args:
        log: Called as `log(figures, step=step)`.
        close: Called once at the end.
    """

    def __init__(self, log: Callable[..., object], close: Callable[[], object] = lambda: None) -> None:
        self._log, self._close = log, close

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Call the function `log` with a copy of the figures."""
        self._log(dict(figures), step=step)

    def close(self) -> None:
        """Call the function `close`."""
        self._close()


class _File:
    """File to which whole records are appended.

    If the disk is full, the file is truncated to its last whole record and the new record is lost. A warning counts the
    lost records at most once a minute. Training goes on.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.path = path
        self._clock = clock
        self._lost, self._warned = 0, -math.inf

    def add(self, record: bytes) -> None:
        """Append a record, without a buffer: readers of the file see it at once."""
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
    """Logger that writes an event file for TensorBoard. The logger does not need the package tensorboard.

    Args:
        folder: Folder of the event file, created if missing. TensorBoard shows each folder as a run.
        clock: Returns seconds since 1970.

    Raises:
        OSError: The folder cannot be created or written.
    """

    def __init__(self, folder: str | os.PathLike[str], clock: Callable[[], float] = wall_clock) -> None:
        place = Path(folder).absolute()
        place.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        name = f"events.out.tfevents.{clock():.0f}.{socket.gethostname()}.{os.getpid()}.{id(self):x}"
        self.path = place / name
        """Path of the event file."""
        self.path.write_bytes(first_event())
        self._file = _File(self.path, clock)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Write the finite figures of a step, which readers see at once. If the disk is full, they are lost."""
        self._file.add(scalars(figures, step, self._clock()))

    def close(self) -> None:
        """Do nothing, because each record is already in the file."""


class Trackio:
    """Logger that writes to Trackio, which keeps figures on this machine: `pip install trackio`, then `trackio show`.

    Args:
        project: Project under which Trackio shows the run.
        name: Name of the run.
        options: Further arguments of `trackio.init`.

    Raises:
        NotInstalled: The package trackio is not installed.
    """

    def __init__(self, project: str, name: str | None = None, **options: Any) -> None:
        with NotInstalled.explained("pip install trackio"):
            trackio: Any = importlib.import_module("trackio")
        self._run = trackio.init(project=project, name=name, **options)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Write the figures of a step to Trackio."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Wait until Trackio has stored all figures."""
        self._run.finish()


class JsonLines:
    """Logger that appends a line of JSON for each call, such as {"step": 7, "time": ..., "loss": 0.25}.

    Args:
        path: Path of the file. The file's folder is created if missing.
        clock: Returns seconds since 1970.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = wall_clock) -> None:
        self.path = Path(path).absolute()
        """Path of the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._file = _File(self.path, clock)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Write the finite figures of a step, which readers see at once. If the disk is full, they are lost."""
        finite = {name: float(value) for name, value in figures.items() if math.isfinite(value)}
        self._file.add(json.dumps({"step": step, "time": self._clock()} | finite).encode() + b"\n")

    def close(self) -> None:
        """Do nothing, because each line is already in the file."""


class Wandb:
    """Logger that writes to Weights & Biases, and to a file of JSON lines that is complete also if W&B is unreachable.

    Args:
        project, entity, run_id: Arguments of `wandb.init`. A run with this id is continued.
        key: API key. The key is in the environment only while `wandb.init` runs.
        config: Description of the run for W&B.
        fallback: Path of the file of JSON lines; None writes no file.
        attempts: Number of calls of `wandb.init` before the logger gives up on W&B.

    Raises:
        NotInstalled: The package wandb is not installed.
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
            except Exception as error:  # training goes on, whatever W&B raises
                _log.warning("wandb.init failed, attempt %d of %d: %s", attempt + 1, attempts, type(error).__name__)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Write the figures of a step to the file and to W&B."""
        if self._lines is not None:
            self._lines.log(figures, step)
        if self._run is not None:
            try:
                self._run.log(dict(figures), step=step)
            except Exception as error:  # training goes on, whatever W&B raises
                _log.warning("figures are no longer sent to wandb: %s", type(error).__name__)
                self._run = None

    def close(self) -> None:
        """Wait until W&B has stored all figures."""
        if self._run is not None:
            self._run.finish()


@contextlib.contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Set a variable of the environment inside the `with` block; a value of None changes nothing."""
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


def keywords_of(partial: Any, where: str = "training_cls") -> dict[str, Any]:
    """Return the keyword arguments of a `functools.partial`, nested, to describe a run.

    Raises:
        ParameterError: The partial has positional arguments; the error names its class.
    """
    if getattr(partial, "args", ()):
        name = getattr(getattr(partial, "func", partial), "__qualname__", repr(partial))
        raise ParameterError.with_text(
            f"{where}: the partial of {name} has positional arguments {partial.args!r:.80}. Pass keyword arguments "
            f"only."
        )
    keywords: dict[str, Any] = {}
    for name, value in getattr(partial, "keywords", {}).items():
        inner = keywords_of(value, f"{where}.{name}") if hasattr(value, "keywords") else None
        keywords[name] = inner or (value if isinstance(value, bool | int | float | str) else _called(value))
    return keywords


def _called(value: Any) -> str:
    return str(getattr(getattr(value, "func", value), "__qualname__", repr(value)))[:200]


def figures(stats: Any, prefix: str = "") -> dict[str, float]:
    """Return all finite numbers in the stats of a node, by a name such as "tables.default.samples".

    Booleans and texts are left out.

    Args:
        prefix: Beginning of each name, such as "server".
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
# An event file is a sequence of records: length, checksum of the length, bytes, checksum of the bytes; each record is a
# protocol buffer `Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5 }`, with
# `Summary { repeated Value value = 1 }` and `Value { string tag = 1; float simple_value = 2 }`.


def first_event() -> bytes:
    """Return the first record of an event file, which has its version."""
    return _record(_double(1, 0.0) + _bytes(3, b"brain.Event:2"))


def scalars(figures: Mapping[str, float], step: int, seconds: float) -> bytes:
    """Return one record with the finite figures of a step; b"" if no figure is finite.

    Args:
        seconds: Time of the step, in seconds since 1970.
    """
    if not 0 <= step < 1 << 63:
        raise ParameterError("step", step, "a whole number from 0 to 2**63 - 1")
    values = [_bytes(1, name.encode()) + _float(2, value) for name, value in figures.items() if math.isfinite(value)]
    summary = b"".join(_bytes(1, value) for value in values)
    return _record(_double(1, seconds) + _varint_field(2, step) + _bytes(5, summary)) if values else b""


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", mask_checksum(length)) + data + struct.pack("<I", mask_checksum(data))


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


def mask_checksum(data: bytes) -> int:
    """Return the masked checksum that event files store beside a part of a record."""
    checksum = crc32c(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _table() -> tuple[int, ...]:
    def entry(value: int) -> int:
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        return value

    return tuple(entry(value) for value in range(256))


LARGEST: Final = 3.4028234663852886e38
"""Largest number of a float32, the type of figures in event files."""
_CRC: Final = _table()


def crc32c(data: Iterable[int]) -> int:
    """Return the Castagnoli checksum CRC32C of bytes (RFC 3720, appendix B.4)."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _CRC[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF
