"""Where a worker or trainer keeps its newest model, and some of the former ones; a path belongs to one of them.

    weights/drone.pth            the newest model, in the format of safetensors, with a checksum
    weights/drone.pth.lock       who holds the path: role, process, host
    weights/drone_2026-11-26_14-03-59.120000.pth      each n-th model that came

Files of torch are read, too, by its `weights_only`: nothing in them is run.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from memoire.arguments import whole
from memoire.errors import DataError, ParameterError, PathHeld
from memoire.replay.file_lock import FileLock
from memoire.replay.replacement import remove_abandoned_in

from . import weights

ZIP: Final = b"PK\x03\x04"
"""What files of torch begin with."""


class ModelFiles:
    """A file of the newest model, and a history of former ones beside it. The path is locked until `close`.

    Args:
        path: Of the file; None keeps nothing.
        history: What names of former models begin with; None is none.
        every: One in so many models is kept in the history, counted from the last that was; 0 keeps none.
        role: What errors of others call the holder.
        now: Gives the time that names in the history have.

    Raises:
        PathHeld: another process has this path, or another part of this one.
        OSError: the folder cannot be made, or the lock not be written.
    """

    def __init__(
        self,
        path: str | Path | None,
        history: str | Path | None = None,
        every: int = 0,
        *,
        role: str,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        self.path = None if path is None else Path(path).absolute()
        self._every = whole("model_history", every, 0) if history is not None else 0
        self._history = None if history is None else os.path.join(os.getcwd(), history)  # may end with /
        self._now = now
        self._since = 0  # models since the last one that was kept in the history
        self._lock = None if self.path is None else _locked(self.path, role)
        if self._every and (folder := Path(f"{self._history}x").parent).is_dir():
            remove_abandoned_in(folder, ".pth")

    def read(self) -> bytes | None:
        """The model in the file; None if there is none.

        Raises:
            DataError: it is damaged, or holds something else.
        """
        return None if self.path is None or not self.path.exists() else read_model(self.path)

    def keep(self, body: bytes, version: int = 0) -> None:
        """Replace the file by this model; and keep it in the history if it is time.

        Raises:
            OSError: it cannot be written; the former file is as it was.
        """
        if self.path is not None:
            weights.save(self.path, weights.unpack(body), weights.facts_of(body))
        self._since += 1
        if self._every and self._since >= self._every:
            weights.save(self._name(), weights.unpack(body), weights.facts_of(body))
            self._since = 0

    def close(self) -> None:
        """Let another process have the path. Closing again does nothing."""
        if self._lock is not None:
            self._lock.release()

    def _name(self) -> Path:
        """A name in the history that no file has."""
        stamp = self._now().strftime("%Y-%m-%d_%H-%M-%S.%f")
        name, number = Path(f"{self._history}{stamp}.pth"), 1
        while name.exists():
            name, number = Path(f"{self._history}{stamp}-{number}.pth"), number + 1
        return name


def read_model(path: str | Path) -> bytes:
    """The model in a file, of safetensors or of torch, as a body.

    Raises:
        OSError: it cannot be read.
        DataError: it is damaged, or holds something else; or a file of torch, which is not installed.
    """
    with Path(path).open("rb") as file:
        is_torch = file.read(len(ZIP)) == ZIP
    return _of_torch(Path(path)) if is_torch else weights.read(path)


def _of_torch(path: Path) -> bytes:
    """A state_dict, or a module's, of a file of torch."""
    try:
        import torch

        import memoire.torch as bridge
    except ModuleNotFoundError as error:
        raise DataError(
            str(path), "is a file of torch, which is not installed: pip install 'memoire-rl[torch]'"
        ) from error
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for files that it does not read
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            str(path), f"is a file of torch that holds more than weights, or is damaged ({reason})"
        ) from error
    if not isinstance(found, dict) or not found or not all(isinstance(each, torch.Tensor) for each in found.values()):
        raise DataError(str(path), "is a file of torch without tensors by name: save module.state_dict()")
    return bridge.body_of(found)


def _locked(path: Path, role: str) -> FileLock:
    """A lock on a path, held by a file beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.lock")
    return FileLock(
        beside,
        held=lambda holder: PathHeld(str(path), holder.role, holder.pid, holder.host),
        foreign=lambda what: ParameterError("model_path", str(path), f"free of {beside.name}, which is {what}"),
        role=role,
    )
