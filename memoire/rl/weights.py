"""Named arrays as bytes and files: published models and checkpoints. A worker's or trainer's file of the newest model.

    body = weights.pack({"policy.0.weight": array, ...})      # a file of safetensors, byte for byte
    weights.save("runs/best.safetensors", {...})              # the file is complete, or its former version is kept
    arrays = weights.load("runs/best.safetensors")

`memoire.torch` reads and writes the same format for networks. A file holds no code.

A worker or trainer keeps its newest model, and some former ones, at a path that it locks:

    weights/drone.pth            the newest model, in the format of safetensors, with a checksum
    weights/drone.pth.lock       the holder of the path: role, process, host
    weights/drone_2026-11-26_14-03-59.120000.pth      one of every n models, by the time of its arrival

Files of torch can be read, too, with its `weights_only`, which runs no code.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memoire.building import Fault, FileLock, checksum, no_fault, remove_abandoned_in, replace_file, tensors, whole
from memoire.errors import DataError, ParameterError, PathHeld, WrongModel

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U8": np.dtype("u1"), "BOOL": np.dtype("?"),
}  # fmt: skip
"""NumPy's dtype of each dtype name in bodies. NumPy lacks BF16 and floats of 8 bits."""
_CHECKSUM: Final = "memoire.xxh3"
_MARK: Final = b'{"__metadata__":{"memoire.xxh3":"'
"""Begin of a file's header; 16 digits follow: the body's checksum, computed with zeros in their place."""
_ZEROS: Final = b"0" * 16
_DIGITS: Final = slice(8 + len(_MARK), 8 + len(_MARK) + len(_ZEROS))
KEPT_FILES: Final = 2
"""Number of numbered files that are kept: the newest and the one before."""
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def pack(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Encode arrays [*F] by name as a body.

    Raises:
        ParameterError: there is no array, or one has a dtype or name that a body cannot hold.
    """
    return tensors.pack({name: _row(name, np.asarray(array)) for name, array in arrays.items()})


def unpack(body: bytes, what: str = "this model") -> dict[str, NDArray[Any]]:
    """Decode the arrays [*F] of a body by name; they are copies that belong to the caller.

    Args:
        what: Name of the body in errors.

    Raises:
        WrongModel: the body is damaged, holds no arrays, or has a dtype that NumPy lacks.
    """
    return {name: _array(name, each, what) for name, each in tensors.unpack(body, what).items()}


def facts_of(body: bytes) -> dict[str, str]:
    """Return the texts by name that a body holds beside its arrays."""
    return {name: text for name, text in tensors.facts_of(body).items() if name != _CHECKSUM}


def save(
    path: str | Path,
    arrays: Mapping[str, NDArray[Any]],
    facts: Mapping[str, str] | None = None,
    *,
    at: Fault = no_fault,
) -> None:
    """Write arrays [*F] to a file, on disk as a whole on return; on an error the former file stays. Makes the folder.

    The file has a checksum, which tools of safetensors ignore.

    Args:
        path: Path of the file.
        arrays: [*F], by name.
        facts: Texts by name, stored beside the arrays.
        at: Called before each step, so that a test can make it fail; see `replacing`.

    Raises:
        OSError: the file cannot be written.
        ParameterError: as in `pack`.
    """
    body = bytearray(tensors.with_facts(pack(arrays), {_CHECKSUM: _ZEROS.decode(), **(facts or {})}))
    body[_DIGITS], file = f"{checksum(body):016x}".encode(), Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, body, at=at)


def load(path: str | Path) -> dict[str, NDArray[Any]]:
    """Return the arrays [*F] of a file, by name.

    Raises:
        OSError: the file cannot be read.
        DataError: the file is damaged, or holds something else.
    """
    return _read(path)[0]


def read(path: str | Path) -> bytes:
    """Return the body in a file, with its texts. Raises as `load` does."""
    arrays, facts = _read(path)
    return tensors.with_facts(pack(arrays), facts)


def _read(path: str | Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    body = Path(path).read_bytes()
    if body[8:].startswith(_MARK):  # files of other programs have no checksum
        plain = bytearray(body)
        plain[_DIGITS] = _ZEROS
        if f"{checksum(plain):016x}".encode() != body[_DIGITS]:
            raise DataError(str(path), "is damaged: its checksum is wrong")
    try:
        return unpack(body, "the file"), facts_of(body)
    except WrongModel as error:
        raise DataError(str(path), error.problem) from error


class NumberedFiles:
    """Numbered files of arrays in a folder, such as agent-7.safetensors. The newest two of a prefix are kept.

    If a process is killed, the newest file or the one before is complete.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder, self._prefix = folder, prefix

    def newest(self) -> int | None:
        """Return the highest number; None without files."""
        return max(self._numbers(), default=None)

    def path(self, number: int) -> Path:
        """Return the path of the file with this number."""
        return self.folder / f"{self._prefix}{number}.safetensors"

    def save(self, number: int, arrays: Mapping[str, NDArray[Any]]) -> Path:
        """Write a file of arrays [*F] (on disk on return), and delete all but the newest two. Raises as `save`."""
        path = self.path(number)
        save(path, arrays)
        for old in sorted(self._numbers())[:-KEPT_FILES]:
            self.path(old).unlink(missing_ok=True)
        return path

    def _numbers(self) -> list[int]:
        names = (path.stem.removeprefix(self._prefix) for path in self.folder.glob(f"{self._prefix}*.safetensors"))
        return [int(name) for name in names if name.isdigit()]


def _row(name: str, array: NDArray[Any]) -> tensors.Array:
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _NAMES:
        raise ParameterError(f"arrays[{name!r}]", str(array.dtype), f"of a dtype among {', '.join(map(str, _NAMES))}")
    data = np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8)
    return tensors.Array(_NAMES[dtype], array.shape, data.data)


def _array(name: str, each: tensors.Array, what: str) -> NDArray[Any]:
    if each.dtype not in DTYPES:
        raise WrongModel(what, f"has {name!r} as {each.dtype}, which NumPy lacks", "Publish it as float32.")
    return np.frombuffer(each.data, DTYPES[each.dtype]).reshape(each.shape).copy()


ZIP: Final = b"PK\x03\x04"
"""First bytes of a file that torch wrote."""


class ModelFiles:
    """File of the newest model, with a history of former models. The path is locked until `close`.

    Args:
        path: Path of the file; None keeps no model.
        history: Prefix of the names of former models; None keeps no former models.
        every: One in `every` models is kept in the history, counted from the last kept model; 0 keeps none.
        role: Name of the holder in other processes' errors.
        now: Returns the time for names in the history.

    Raises:
        PathHeld: another process uses this path, or another part of this process.
        OSError: the folder cannot be created, or the lock cannot be written.
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
        self._since = 0  # models since the last model in the history
        self._lock = None if self.path is None else _lock_path(self.path, role)
        if self._every and (folder := Path(f"{self._history}x").parent).is_dir():
            remove_abandoned_in(folder, ".pth")

    def read(self) -> bytes | None:
        """Return the model in the file; None without a file.

        Raises:
            DataError: the file is damaged, or holds something else.
        """
        return None if self.path is None or not self.path.exists() else read_model(self.path)

    def keep(self, body: bytes, version: int = 0) -> None:
        """Write this model to the file, and to the history if its turn has come.

        Raises:
            OSError: the model cannot be written; the former file is kept.
        """
        if self.path is not None:
            save(self.path, unpack(body), facts_of(body))
        self._since += 1
        if self._every and self._since >= self._every:
            save(self._name(), unpack(body), facts_of(body))
            self._since = 0

    def close(self) -> None:
        """Release the path for another process. Closing again does nothing."""
        if self._lock is not None:
            self._lock.release()

    def _name(self) -> Path:
        """Return an unused file name of the history."""
        stamp = self._now().strftime("%Y-%m-%d_%H-%M-%S.%f")
        name, number = Path(f"{self._history}{stamp}.pth"), 1
        while name.exists():
            name, number = Path(f"{self._history}{stamp}-{number}.pth"), number + 1
        return name


def read_model(path: str | Path) -> bytes:
    """Return the model in a file of safetensors or torch, as a body.

    Raises:
        OSError: the file cannot be read.
        DataError: the file is damaged, or holds something else; or torch wrote it and is not installed.
    """
    with Path(path).open("rb") as file:
        is_torch = file.read(len(ZIP)) == ZIP
    return _read_torch(Path(path)) if is_torch else read(path)


def _read_torch(path: Path) -> bytes:
    """Return the state_dict in a file of torch, as a body. Raises DataError."""
    try:
        import torch

        import memoire.torch as bridge
    except ModuleNotFoundError as error:
        raise DataError(
            str(path), "is a file of torch, which is not installed: pip install 'memoire-rl[torch]'"
        ) from error
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types of errors for unreadable files
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            str(path), f"is a file of torch that holds more than weights, or is damaged ({reason})"
        ) from error
    if not isinstance(state, dict) or not state or not all(isinstance(each, torch.Tensor) for each in state.values()):
        raise DataError(str(path), "is a file of torch without tensors by name: save module.state_dict()")
    return bridge.body_of(state)


def _lock_path(path: Path, role: str) -> FileLock:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.lock")
    return FileLock(
        beside,
        held=lambda holder: PathHeld(str(path), holder.role, holder.pid, holder.host),
        foreign=lambda what: ParameterError("model_path", str(path), f"free of {beside.name}, which is {what}"),
        role=role,
    )
