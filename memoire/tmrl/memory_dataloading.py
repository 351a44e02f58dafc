"""Base class of a trainer's memory: stores workers' compressed samples, and rebuilds transitions by number."""

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
    """Base class of memories: implement `append_buffer`, `__len__` and `get_transition`; store samples in `self.data`.

    Args:
        device: Device of batches, in torch's words; None leaves NumPy arrays. The trainer sets it.
        nb_steps: Batches of a round. The trainer sets it.
        obs_preprocessor: Called with each observation of a transition, as workers call theirs before `act`.
        sample_preprocessor: Called afterwards as f(last_obs, act, rew, new_obs, done), returns the same five. If
            `get_transition` returns seven values, done is replaced by terminated and truncated, and it returns six.
        memory_size: Samples that are kept. `append_buffer` has to remove the rest.
        batch_size: Transitions of a batch.
        dataset_path: A NumPy file (.npz), or a folder with "data.npz": its arrays, as lists, become the first
            `self.data`. "" begins with an empty list.
        crc_debug: Compare each drawn transition with its worker's record; n > 1 expects checksums of one in n, as set
            at the workers.

    Raises:
        DataError: the data set cannot be read, or is a pickle.
    """

    sample_parts = 5
    """Parts of a sample; 6 replaces done by terminated and truncated."""
    preprocesses_itself = False
    """True if `get_transition` calls the workers' `obs_preprocessor`; then preprocessors are not compared."""

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
        """Checks of transitions against the workers' records; count the results."""
        self.data: list[Any] = _columns_in(dataset_path)

    @abstractmethod
    def append_buffer(self, buffer: Any) -> None:
        """Add samples; `buffer.memory` is a list of (act, new_obs, rew, done, info), compressed by the workers."""
        raise NotImplementedError

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of transitions; `get_transition` accepts each number below it."""
        raise NotImplementedError

    @abstractmethod
    def get_transition(self, item: int) -> tuple[Any, ...]:
        """Return (last_obs, new_act, rew, new_obs, done, info), as the environment returned them.

        Seven values have terminated and truncated in place of done.
        """
        raise NotImplementedError

    def append(self, buffer: Any) -> None:
        """Check a received buffer and add it with `append_buffer`; do nothing if it is empty.

        Raises:
            CrcDebugMismatch: only the worker or only this memory has crc_debug.
            ParameterError: the worker uses another obs_preprocessor.
        """
        if len(buffer.memory):
            infos = [sample[-1] for sample in buffer.memory]
            self.checks.take(infos)
            if not self.preprocesses_itself:
                self._preprocessors.check_samples(infos, getattr(buffer, "starts", None) or [False] * len(infos))
            self.append_buffer(buffer)

    def __iter__(self) -> Iterator[Any]:
        """Yield as many batches as a round has steps."""
        for _ in range(self.nb_steps):
            yield self.sample()

    def sample_indices(self) -> list[int]:
        """Return random numbers of a batch's transitions."""
        return random.choices(range(len(self)), k=self.batch_size)

    def sample(self) -> tuple[Any, ...]:
        """Draw a batch: (last_obs, act, rew, new_obs, done), or six parts, each with arrays [B, ...] on the device.

        Raises:
            NotEnoughSamples: the memory has no transition.
            CrcFailed: crc_debug is set, and a transition differs from the recorded one.
        """
        if not len(self):
            raise NotEnoughSamples(
                self.batch_size, 0, 0, 0, 0.0, "the memory has no transition yet", "Add samples first."
            )
        return self.collate([self[item] for item in self.sample_indices()], self.device)

    def __getitem__(self, item: int) -> tuple[Any, ...]:
        """Return a preprocessed transition for training, without info."""
        last_obs, act, rew, new_obs, *done, info = self.get_transition(item)
        self.checks.check((last_obs, act, rew, new_obs, done[0]), info, item)
        if self.obs_preprocessor is not None:
            last_obs, new_obs = self.obs_preprocessor(last_obs), self.obs_preprocessor(new_obs)
        parts: tuple[Any, ...] = (last_obs, act, rew, new_obs, *done)
        if self.sample_preprocessor is not None:
            parts = tuple(self.sample_preprocessor(*parts))
        return (*parts[:2], np.float32(parts[2]), parts[3], *(np.float32(each) for each in parts[4:]))

    def collate(self, batch: list[tuple[Any, ...]], device: Any) -> tuple[Any, ...]:
        """Combine transitions into one batch: each leaf is [B, *F] on a device, or a NumPy array for device None."""
        collated: tuple[Any, ...] = on_device(stacked(batch), device)
        return collated


def _columns_in(path: str | Path) -> list[Any]:
    """Return the arrays of a data set as lists, in the order of the file; [] without a path."""
    if not str(path):
        return []
    file = Path(path)
    pickles = [each for each in (file, file / "data.pkl") if each.suffix in PICKLES and each.is_file()]
    if file.is_dir() and not pickles:
        file = file / "data.npz"
    if pickles:
        problem = "is a pickle, which can run anything. Convert it with numpy.savez (docs/trainers.md)"
        raise DataError(str(pickles[0]), problem)
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return [list(arrays[name]) for name in arrays.files]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise DataError(str(file), f"cannot be read as arrays of NumPy ({error})") from error
