"""Round trip check of transitions (`crc_debug`): a trainer compares rebuilt transitions with their workers' records.

    worker     Marks(True).mark(info, transition, ...)     the transition itself travels in info["crc_sample"]
               Marks(100)                                  or its checksums, of each hundredth transition
    memory     Checks(True).check(transition, info, item)  raises CrcFailed at the first difference

A transition is (last_obs, act, rew, new_obs, done). Leaves are compared by dtype, shape and bytes, not by `str(array)`,
which NumPy shortens above a thousand elements.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire.building import checksum
from memoire.errors import CrcDebugMismatch, CrcFailed, ParameterError

from .codec import copied, leaves_of, paths_of, structure_of

_log = logging.getLogger(__name__)

SAMPLE: Final = "crc_sample"
"""Key in `info`: the transition that the environment returned."""
SUMS: Final = "crc_sums"
"""Key in `info`: the transition's checksums, from `sums_of`."""
SENDER: Final = "crc_sender"
"""Key in `info` of every sample of a worker that has crc_debug: [worker, episode, step]."""
PARTS: Final = ("last_obs", "act", "rew", "new_obs", "done")
Sums = dict[str, list[Any]]
"""[dtype, shape, checksum] of each leaf, by its path."""


class Difference(NamedTuple):
    """First difference of two transitions: its path, the expected and the received value."""

    path: str
    expected: str
    received: str


class Marks:
    """Worker's side of the check: adds transitions or checksums to `info`.

    Args:
        crc_debug: False is off; True adds each transition; n > 1 adds the checksums of one in n transitions.
        worker: Name of the worker in error messages.
    """

    def __init__(self, crc_debug: bool | int, worker: str = "worker") -> None:
        self.every, self._worker, self._count = comparison_interval(crc_debug), worker, 0

    def mark(
        self, info: Mapping[str, Any], transition: Sequence[Any] | None, episode: int, step: int
    ) -> dict[str, Any]:
        """Return a copy of `info`, with the sample's mark if the check is on.

        Args:
            transition: (last_obs, act, rew, new_obs, done) from the environment; None for the sample of a reset.
            episode: Number of the worker's episode, from 1 on.
            step: Number of the step in the episode, from 1 on; the reset is step 0.
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
    """Memory's side of the check: compares rebuilt transitions with the marks of workers.

    Args:
        crc_debug: Same value as that of the workers.
        name: Name of the memory in error messages.
    """

    def __init__(self, crc_debug: bool | int, name: str = "the memory") -> None:
        self.every, self._name = comparison_interval(crc_debug), name
        self.passed = self.failed = 0
        """Numbers of compared transitions that were equal, and that differed."""

    def take(self, infos: Sequence[Mapping[str, Any]]) -> None:
        """Check the `info` of arriving samples.

        Raises:
            CrcDebugMismatch: the worker has crc_debug on and this memory off, or the reverse.
        """
        for info in infos:
            if bool(self.every) != (SENDER in info):
                both = (_sender(info) or "the worker", self._name)
                raise CrcDebugMismatch(*(both if not self.every else both[::-1]))

    def check(self, transition: Sequence[Any], info: Mapping[str, Any], item: int) -> None:
        """Compare a rebuilt transition with its worker's, if `info` has that transition or its checksums.

        Args:
            transition: (last_obs, act, rew, new_obs, done) as rebuilt.
            item: Number of the transition in error messages.

        Raises:
            CrcFailed: the transitions differ.
        """
        if not self.every or not (SAMPLE in info or SUMS in info):
            return
        if SAMPLE in info:
            difference = first_difference(info[SAMPLE], transition)
        else:
            difference = first_different_sum(info[SUMS], sums_of(transition))
        if difference is not None:
            self.failed += 1
            raise CrcFailed(self._name, item, _sender(info) or "its worker", *difference)
        self.passed += 1
        _log.info("CRC check passed: transition %d of %s", item, _sender(info))


def comparison_interval(crc_debug: Any) -> int:
    """Return n if one in n transitions is compared, 0 for no comparison; raise ParameterError for other values."""
    if not isinstance(crc_debug, bool | int | np.integer) or crc_debug < 0:
        raise ParameterError("crc_debug", crc_debug, "True or False, or n to compare one in n transitions")
    return int(crc_debug)


def sums_of(transition: Sequence[Any]) -> Sums:
    """Return [dtype, shape, checksum] of each leaf by its path; each bit affects the checksum.

    Python's floats and np.float64 scalars are compared as float32, Python's ints as int64.
    """
    return {path: [str(each.dtype), list(each.shape), _checksum(each)] for path, each in _arrays(transition).items()}


def first_difference(expected: Sequence[Any], received: Sequence[Any]) -> Difference | None:
    """Return the first difference of two transitions: a missing leaf, a dtype, a shape or an element; None if equal."""
    return _first(_arrays(expected), _arrays(received), _difference)


def first_different_sum(expected: Mapping[str, Sequence[Any]], received: Sums) -> Difference | None:
    """Return the first difference of two transitions' checksums; None if equal."""
    return _first(expected, received, _difference_of_sums)


def _first(
    expected: Mapping[str, Any], received: Mapping[str, Any], compare: Callable[[str, Any, Any], Difference | None]
) -> Difference | None:
    """Return the first difference of leaves with the same path, or the first missing leaf; None if all are equal."""
    for path in {**expected, **received}:
        if path not in expected or path not in received:
            return Difference(path, *("present" if path in each else "missing" for each in (expected, received)))
        if (difference := compare(path, expected[path], received[path])) is not None:
            return difference
    return None


def _difference(path: str, first: NDArray[Any], second: NDArray[Any]) -> Difference | None:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return Difference(path, _describe(first), _describe(second))
    return None if _checksum(first) == _checksum(second) else _different_element(path, first, second)


def _difference_of_sums(path: str, first: Sequence[Any], second: Sequence[Any]) -> Difference | None:
    texts = [f"{dtype}{list(shape)} with checksum {sum_:016x}" for dtype, shape, sum_ in (first, second)]
    return None if texts[0] == texts[1] else Difference(path, *texts)


def _arrays(transition: Sequence[Any]) -> dict[str, NDArray[Any]]:
    arrays = {}
    for name, part in zip(PARTS, transition, strict=True):
        for path, leaf in zip(paths_of(structure_of(part), name), leaves_of(part), strict=True):
            arrays[path] = _array(leaf)
    return arrays


def _array(leaf: Any) -> NDArray[Any]:
    if isinstance(leaf, float):  # Python's float, and np.float64, a subclass of float
        return np.asarray(leaf, np.float32)
    if isinstance(leaf, bytes | str):
        return np.frombuffer(leaf.encode() if isinstance(leaf, str) else leaf, np.uint8)
    array = np.asarray(leaf)
    if array.dtype == object:
        expected = "made of numbers, arrays, text and bytes, so that crc_debug can compare the transition"
        raise ParameterError("transition", type(leaf).__name__, expected)
    return array


def _checksum(array: NDArray[Any]) -> int:
    # Arrays without elements or without dimensions can be viewed as bytes only after the reshape.
    return checksum(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _different_element(path: str, first: NDArray[Any], second: NDArray[Any]) -> Difference:
    width = first.dtype.itemsize
    rows = [np.ascontiguousarray(each).reshape(-1).view(np.uint8).reshape(-1, width) for each in (first, second)]
    place = int(np.flatnonzero((rows[0] != rows[1]).any(1))[0])
    index = tuple(int(each) for each in np.unravel_index(place, first.shape))
    place_text = f"{path}, index {index}" if index else path
    return Difference(place_text, *(repr(each.reshape(-1)[place].item()) for each in (first, second)))


def _describe(array: NDArray[Any]) -> str:
    value = f" {array.item()!r}" if array.size == 1 else ""
    return f"{array.dtype}{list(array.shape)}{value}"


def _sender(info: Mapping[str, Any]) -> str:
    if SENDER not in info:
        return ""
    worker, episode, step = info[SENDER]
    return f"{worker} in episode {episode}, step {step}"
