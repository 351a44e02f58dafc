"""What a trainer remembers: samples come as workers compressed them, transitions are drawn by their number."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from memoire.errors import DataError, NotEnoughSamples
from memoire.rl.codec import PreprocessorCheck
from memoire.rl.crc import Checks
from memoire.rl.memory import on_device, stacked

PICKLES: Final = (".pkl", ".pickle")


class MemoryDataloading(ABC):
    """Complete three methods: `append_buffer`, `__len__` and `get_transition`. Storage is free: `self.data` is yours.

    Args:
        device: Where batches go, as torch names it; None leaves them as arrays of NumPy. The trainer says it.
        nb_steps: Batches of a round. The trainer says it.
        obs_preprocessor: Called with each observation of a transition, as a worker calls it before `act`.
        sample_preprocessor: Called then as f(last_obs, act, rew, new_obs, done) and returns the same five. If
            `get_transition` gives seven values, it has terminated and truncated in place of done, and returns six.
        memory_size: Samples that are held. What is above is for `append_buffer` to cut.
        batch_size: Transitions of a batch.
        dataset_path: A file of NumPy (.npz), or a folder with "data.npz": its arrays, as lists, are `self.data` at the
            beginning. "" begins with an empty list.
        crc_debug: Compare each transition that is drawn with what its worker recorded; n > 1 expects the checksums of
            one in n. As of the workers.

    Raises:
        DataError: the data set cannot be read, or is a pickle.
    """

    sample_parts = 5
    """Set it to 6 to have samples with terminated and truncated in place of done."""
    preprocesses_itself = False
    """Set it to True if `get_transition` calls the workers' `obs_preprocessor`: then it is not compared."""

    def __init__(
        self,
        device: Any,
        nb_steps: Any,
        obs_preprocessor: Callable[..., Any] | None = None,
        sample_preprocessor: Callable[..., Any] | None = None,
        memory_size: int = 1000000,
        batch_size: int = 256,
        dataset_path: str | Path = "",
        crc_debug: bool | int = False,
    ) -> None:
        self.device, self.nb_steps = device, nb_steps
        self.obs_preprocessor, self.sample_preprocessor = obs_preprocessor, sample_preprocessor
        self.memory_size, self.batch_size = int(memory_size), int(batch_size)
        self.crc_debug = crc_debug
        self._preprocessors = PreprocessorCheck(obs_preprocessor)
        self.checks = Checks(crc_debug, type(self).__name__)
        """Counts transitions that were compared."""
        self.data: list[Any] = _columns_in(dataset_path)

    @abstractmethod
    def append_buffer(self, buffer: Any) -> None:
        """Take in samples; `buffer.memory` is a list of (act, new_obs, rew, done, info), as workers compressed them."""
        raise NotImplementedError

    @abstractmethod
    def __len__(self) -> int:
        """Transitions: `get_transition` takes each number below it."""
        raise NotImplementedError

    @abstractmethod
    def get_transition(self, item: int) -> tuple[Any, ...]:
        """(last_obs, new_act, rew, new_obs, done, info), as the environment gave them; or seven values, with
        terminated and truncated in place of done.
        """
        raise NotImplementedError

    def append(self, buffer: Any) -> None:
        """Take in what a trainer received; nothing if it is empty.

        Raises:
            CrcOneSided: only the worker or only this memory has crc_debug.
            ParameterError: the worker has another obs_preprocessor.
        """
        if len(buffer.memory):
            infos = [sample[-1] for sample in buffer.memory]
            self.checks.take(infos)
            if not self.preprocesses_itself:
                self._preprocessors.look(infos, getattr(buffer, "starts", None) or [False] * len(infos))
            self.append_buffer(buffer)

    def __iter__(self) -> Iterator[Any]:
        """As many batches as a round has steps."""
        for _ in range(self.nb_steps):
            yield self.sample()

    def sample_indices(self) -> list[int]:
        """Numbers of the transitions of a batch."""
        return random.choices(range(len(self)), k=self.batch_size)

    def sample(self) -> tuple[Any, ...]:
        """A batch: (last_obs, act, rew, new_obs, done), or six parts, each with arrays [B, ...] on the device.

        Raises:
            NotEnoughSamples: there is no transition.
            CrcFailed: crc_debug is set, and a transition differs from the one that was recorded.
        """
        if not len(self):
            raise NotEnoughSamples(self.batch_size, 0, 0, 0, reason="no transition is there yet")
        return self.collate([self[item] for item in self.sample_indices()], self.device)

    def __getitem__(self, item: int) -> tuple[Any, ...]:
        """A transition as it is trained with, without info."""
        last_obs, act, rew, new_obs, *done, info = self.get_transition(item)
        self.checks.check((last_obs, act, rew, new_obs, done[0]), info, item)
        if self.obs_preprocessor is not None:
            last_obs, new_obs = self.obs_preprocessor(last_obs), self.obs_preprocessor(new_obs)
        parts: tuple[Any, ...] = (last_obs, act, rew, new_obs, *done)
        if self.sample_preprocessor is not None:
            parts = tuple(self.sample_preprocessor(*parts))
        return (*parts[:2], np.float32(parts[2]), parts[3], *(np.float32(each) for each in parts[4:]))

    def collate(self, batch: list[tuple[Any, ...]], device: Any) -> tuple[Any, ...]:
        """Transitions as one batch: each leaf [B, *F], on a device; None is an array of NumPy."""
        collated: tuple[Any, ...] = on_device(stacked(batch), device)
        return collated


def _columns_in(path: str | Path) -> list[Any]:
    """The arrays of a data set as lists, in the order of the file; [] if there is none."""
    if not str(path):
        return []
    place = Path(path)
    pickles = [each for each in (place, place / "data.pkl") if each.suffix in PICKLES and each.is_file()]
    if place.is_dir() and not pickles:
        place = place / "data.npz"
    if pickles:
        problem = "is a pickle, which can run anything. Convert it by numpy.savez (docs/real-time.md)"
        raise DataError(str(pickles[0]), problem)
    try:
        with np.load(place, allow_pickle=False) as arrays:
            return [list(arrays[name]) for name in arrays.files]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise DataError(str(place), f"cannot be read as arrays of NumPy ({error})") from error
