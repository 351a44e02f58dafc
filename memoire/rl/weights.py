"""Named arrays as bytes and files: what a learner publishes, and what its checkpoints are made of.

    body = weights.pack({"policy.0.weight": array, ...})      # a file of safetensors, byte for byte
    weights.save("runs/best.safetensors", {...})              # there as a whole, or as it was
    arrays = weights.load("runs/best.safetensors")

`memoire.torch` reads and writes the same form for networks. Nothing in it can run anything.

Where a worker or trainer keeps its newest model, and some of the former ones; a path belongs to one of them.

    weights/drone.pth            the newest model, in the format of safetensors, with a checksum
    weights/drone.pth.lock       who holds the path: role, process, host
    weights/drone_2026-11-26_14-03-59.120000.pth      each n-th model that came

Files of torch are read, too, by its `weights_only`: nothing in them is run.
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
"""NumPy's dtypes by what bodies call them. BF16 and floats of 8 bits have none."""
_CHECKSUM: Final = "memoire.xxh3"
_MARK: Final = b'{"__metadata__":{"memoire.xxh3":"'
"""What the header of a file begins with; 16 digits follow: the checksum of the body with zeros in their place."""
_ZEROS: Final = b"0" * 16
_DIGITS: Final = slice(8 + len(_MARK), 8 + len(_MARK) + len(_ZEROS))
KEPT: Final = 2
"""Numbered files that stay: the newest, and the one before."""
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def pack(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The body with these arrays [*F], by name.

    Raises:
        ParameterError: there are none, or one has a dtype or name that cannot travel.
    """
    return tensors.pack({name: _row(name, np.asarray(array)) for name, array in arrays.items()})


def unpack(body: bytes, what: str = "this model") -> dict[str, NDArray[Any]]:
    """The arrays [*F] in a body, by name, as copies that belong to the caller.

    Args:
        what: What errors call it.

    Raises:
        WrongModel: it is damaged, holds no arrays, or numbers that NumPy does not have.
    """
    return {name: _array(name, each, what) for name, each in tensors.unpack(body, what).items()}


def facts_of(body: bytes) -> dict[str, str]:
    """What a body says beside its arrays: texts by name."""
    return {name: text for name, text in tensors.facts_of(body).items() if name != _CHECKSUM}


def save(
    path: str | Path,
    arrays: Mapping[str, NDArray[Any]],
    facts: Mapping[str, str] | None = None,
    *,
    at: Fault = no_fault,
) -> None:
    """Write arrays [*F] to a file that is there as a whole or as it was; on disk when this returns. Makes the folder.

    The file has a checksum, in a place that tools of safetensors pass over.

    Args:
        path: Of the file.
        arrays: [*F], by name.
        facts: Texts by name that are kept beside them.
        at: Called before each step, so that a test may let it fail: see `replacing`.

    Raises:
        OSError: it cannot be written.
        ParameterError: as of `pack`.
    """
    body = bytearray(tensors.with_facts(pack(arrays), {_CHECKSUM: _ZEROS.decode(), **(facts or {})}))
    body[_DIGITS], place = f"{checksum(body):016x}".encode(), Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    replace_file(place, body, at=at)


def load(path: str | Path) -> dict[str, NDArray[Any]]:
    """The arrays [*F] of a file, by name.

    Raises:
        OSError: it cannot be read.
        DataError: it is damaged, or holds something else.
    """
    return _read(path)[0]


def read(path: str | Path) -> bytes:
    """The body in a file, with its facts. Raises as `load` does."""
    arrays, facts = _read(path)
    return tensors.with_facts(pack(arrays), facts)


def _read(path: str | Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    body = Path(path).read_bytes()
    if body[8:].startswith(_MARK):  # one that another program wrote has no checksum
        plain = bytearray(body)
        plain[_DIGITS] = _ZEROS
        if f"{checksum(plain):016x}".encode() != body[_DIGITS]:
            raise DataError(str(path), "is damaged: its checksum is wrong")
    try:
        return unpack(body, "the file"), facts_of(body)
    except WrongModel as error:
        raise DataError(str(path), error.problem) from error


class NumberedFiles:
    """Files of arrays in a folder, such as agent-7.safetensors: of those with this prefix the newest two stay.

    A process that is killed has saved the newest one or the one before.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder, self._prefix = folder, prefix

    def newest(self) -> int | None:
        """The highest number; None if there is no file."""
        return max(self._numbers(), default=None)

    def path(self, number: int) -> Path:
        """Of the file with this number."""
        return self.folder / f"{self._prefix}{number}.safetensors"

    def save(self, number: int, arrays: Mapping[str, NDArray[Any]]) -> Path:
        """Write a file of arrays [*F]; on disk when this returns; those before the last two go. Raises as `save`."""
        path = self.path(number)
        save(path, arrays)
        for old in sorted(self._numbers())[:-KEPT]:
            self.path(old).unlink(missing_ok=True)
        return path

    def _numbers(self) -> list[int]:
        names = (path.stem.removeprefix(self._prefix) for path in self.folder.glob(f"{self._prefix}*.safetensors"))
        return [int(name) for name in names if name.isdigit()]


def _row(name: str, array: NDArray[Any]) -> tensors.Array:
    wanted = array.dtype.newbyteorder("<")
    if wanted not in _NAMES:
        raise ParameterError(f"arrays[{name!r}]", str(array.dtype), f"of a dtype among {', '.join(map(str, _NAMES))}")
    data = np.ascontiguousarray(array, wanted).reshape(-1).view(np.uint8)
    return tensors.Array(_NAMES[wanted], array.shape, data.data)


def _array(name: str, each: tensors.Array, what: str) -> NDArray[Any]:
    if each.dtype not in DTYPES:
        raise WrongModel(what, f"has {name!r} as {each.dtype}, which NumPy lacks", "Publish it as float32.")
    return np.frombuffer(each.data, DTYPES[each.dtype]).reshape(each.shape).copy()


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
            save(self.path, unpack(body), facts_of(body))
        self._since += 1
        if self._every and self._since >= self._every:
            save(self._name(), unpack(body), facts_of(body))
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
    return _of_torch(Path(path)) if is_torch else read(path)


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
