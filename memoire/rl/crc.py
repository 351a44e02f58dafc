"""Whether a trainer rebuilds the transitions that workers recorded: compared leaf by leaf, by dtype, shape and bytes.

    worker     Marks(True).mark(info, transition, ...)     the transition itself travels in info["crc_sample"]
               Marks(100)                                  or its checksums, of each hundredth transition
    memory     Checks(True).check(transition, info, item)  raises CrcFailed at the first difference

A transition is (last_obs, act, rew, new_obs, done). To compare texts, as `str(array)`, is not enough: NumPy shortens
arrays of more than a thousand elements.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire.building import checksum
from memoire.errors import CrcFailed, CrcOneSided, ParameterError

from .codec import copied, leaves_of, paths_of, structure_of

_log = logging.getLogger(__name__)

SAMPLE: Final = "crc_sample"
"""Key in `info`: the transition as the environment gave it."""
SUMS: Final = "crc_sums"
"""Key in `info`: what `sums_of` gave for it."""
SENDER: Final = "crc_sender"
"""Key in `info` of every sample of a worker that has crc_debug: [worker, episode, step]."""
PARTS: Final = ("last_obs", "act", "rew", "new_obs", "done")
Sums = dict[str, list[Any]]
"""[dtype, shape, checksum] of each leaf, by its path."""


class Difference(NamedTuple):
    """Where two transitions differ first."""

    path: str
    expected: str
    received: str


class Marks:
    """What a worker puts into `info`.

    Args:
        crc_debug: False is off, True marks each transition; n > 1 puts the checksums of one in n.
        worker: What errors call it.
    """

    def __init__(self, crc_debug: bool | int, worker: str = "worker") -> None:
        self.every, self._worker, self._count = every(crc_debug), worker, 0

    def mark(
        self, info: Mapping[str, Any], transition: Sequence[Any] | None, episode: int, step: int
    ) -> dict[str, Any]:
        """`info` with the mark of a sample; as it was if nothing is compared.

        Args:
            transition: (last_obs, act, rew, new_obs, done) as the environment gave it; None for the sample of a reset.
            episode, step: Of this worker, from 1 on; the reset is step 0.
        """
        if not self.every:
            return dict(info)
        marked = {**info, SENDER: [self._worker, episode, step]}
        if transition is None:
            return marked
        self._count += 1
        if self.every == 1:
            marked[SAMPLE] = copied(tuple(transition))
        elif self._count % self.every == 0:
            marked[SUMS] = sums_of(transition)
        return marked


class Checks:
    """What a memory compares.

    Args:
        crc_debug: As of the workers.
        name: What errors call the memory.
    """

    def __init__(self, crc_debug: bool | int, name: str = "the memory") -> None:
        self.every, self._name = every(crc_debug), name
        self.passed = self.failed = 0
        """Transitions that were compared."""

    def take(self, infos: Sequence[Mapping[str, Any]]) -> None:
        """Look at samples that come.

        Raises:
            CrcOneSided: their worker has crc_debug and this memory has not, or the reverse.
        """
        for info in infos:
            if bool(self.every) != (SENDER in info):
                both = (_sender(info) or "the worker", self._name)
                raise CrcOneSided(*(both if not self.every else both[::-1]))

    def check(self, transition: Sequence[Any], info: Mapping[str, Any], item: int) -> None:
        """Compare a transition that was rebuilt with what its worker recorded, if that is in `info`.

        Args:
            transition: (last_obs, act, rew, new_obs, done).
            item: What errors call it.

        Raises:
            CrcFailed: they differ.
        """
        if not self.every or not (SAMPLE in info or SUMS in info):
            return
        if SAMPLE in info:
            found = first_difference(info[SAMPLE], transition)
        else:
            found = first_different_sum(info[SUMS], sums_of(transition))
        if found is not None:
            self.failed += 1
            raise CrcFailed(self._name, item, _sender(info) or "its worker", *found)
        self.passed += 1
        _log.info("CRC check passed: transition %d of %s", item, _sender(info))


def every(crc_debug: Any) -> int:
    """One in how many transitions is compared; 0 is none. Raises ParameterError: it is no such number."""
    if not isinstance(crc_debug, bool | int | np.integer) or crc_debug < 0:
        raise ParameterError("crc_debug", crc_debug, "True or False, or n to compare one in n transitions")
    return int(crc_debug)


def sums_of(transition: Sequence[Any]) -> Sums:
    """[dtype, shape, checksum] of each leaf by its path; they change with every bit.

    Python's own numbers have no dtype: they count as float32, int64 and bool, and so do numbers of float64.
    """
    return {path: [str(each.dtype), list(each.shape), _checksum(each)] for path, each in _arrays(transition).items()}


def first_difference(expected: Sequence[Any], received: Sequence[Any]) -> Difference | None:
    """Where two transitions differ first: in the leaves that there are, a dtype, a shape, or an element."""
    return _first(_arrays(expected), _arrays(received), _difference)


def first_different_sum(expected: Mapping[str, Sequence[Any]], received: Sums) -> Difference | None:
    """The same where only checksums are known: without the element."""
    return _first(expected, received, _difference_of_sums)


def _first(
    expected: Mapping[str, Any], received: Mapping[str, Any], compare: Callable[[str, Any, Any], Difference | None]
) -> Difference | None:
    """Where leaves differ first, by their paths."""
    for path in {**expected, **received}:
        if path not in expected or path not in received:
            return Difference(path, *("there" if path in each else "not there" for each in (expected, received)))
        if (found := compare(path, expected[path], received[path])) is not None:
            return found
    return None


def _difference(path: str, first: NDArray[Any], second: NDArray[Any]) -> Difference | None:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return Difference(path, _described(first), _described(second))
    return None if _checksum(first) == _checksum(second) else _different_element(path, first, second)


def _difference_of_sums(path: str, first: Sequence[Any], second: Sequence[Any]) -> Difference | None:
    texts = [f"{dtype}{list(shape)} with checksum {sum_:016x}" for dtype, shape, sum_ in (first, second)]
    return None if texts[0] == texts[1] else Difference(path, *texts)


def _arrays(transition: Sequence[Any]) -> dict[str, NDArray[Any]]:
    """Each leaf as an array, by its path. A list is as good as a tuple."""
    found = {}
    for name, part in zip(PARTS, transition, strict=True):
        for path, leaf in zip(paths_of(structure_of(part), name), leaves_of(part), strict=True):
            found[path] = _array(leaf)
    return found


def _array(leaf: Any) -> NDArray[Any]:
    if isinstance(leaf, float):  # of Python, and np.float64, which is one
        return np.asarray(leaf, np.float32)
    if isinstance(leaf, bytes | str):
        return np.frombuffer(leaf.encode() if isinstance(leaf, str) else leaf, np.uint8)
    array = np.asarray(leaf)
    if array.dtype == object:
        raise ParameterError("transition", type(leaf).__name__, "of numbers, arrays, text and bytes, for crc_debug")
    return array


def _checksum(array: NDArray[Any]) -> int:
    # Views of no elements, or of none dimension, have bytes, too.
    return checksum(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _different_element(path: str, first: NDArray[Any], second: NDArray[Any]) -> Difference:
    width = first.dtype.itemsize
    rows = [np.ascontiguousarray(each).reshape(-1).view(np.uint8).reshape(-1, width) for each in (first, second)]
    place = int(np.flatnonzero((rows[0] != rows[1]).any(1))[0])
    index = tuple(int(each) for each in np.unravel_index(place, first.shape))
    where = f"{path}, index {index}" if index else path
    return Difference(where, *(repr(each.reshape(-1)[place].item()) for each in (first, second)))


def _described(array: NDArray[Any]) -> str:
    value = f" {array.item()!r}" if array.size == 1 else ""
    return f"{array.dtype}{list(array.shape)}{value}"


def _sender(info: Mapping[str, Any]) -> str:
    if SENDER not in info:
        return ""
    worker, episode, step = info[SENDER]
    return f"{worker} in episode {episode}, step {step}"
