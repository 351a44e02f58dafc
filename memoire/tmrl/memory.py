"""Memories of TMRL 0.7: one for samples of six parts, and one that needs no completion.

`buffers_of` converts data sets of Minari to workers' samples, so that any memory can begin with them:

    for buffer in buffers_of(minari.load_dataset("D4RL/door/human-v2")):
        memory.append(buffer)

`memoire.minari.write` converts a data set of memoire to one of Minari.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from memoire.errors import DataError, NotInstalled, ParameterError
from memoire.rl.codec import Codec, leaves_of, mapped
from memoire.rl.memory import NO_DONE, on_device, six_parts
from memoire.rl.memory import GenericMemory as Rings
from memoire.rl.samples import KeptBuffer

from .memory_dataloading import MemoryDataloading

__all__ = ["GenericMemory", "MemoryDataloading", "TorchMemory"]

MINARI: Final = "minari:"
"""Prefix of a `dataset_path` that names a data set of Minari."""


def buffers_of(data: Any) -> Iterator[KeptBuffer]:
    """Yield a buffer for each episode: one sample for its reset, with an action of zeros, and one for each step.

    An episode that was not terminated counts as truncated.

    Args:
        data: A `minari.MinariDataset`, or an iterable of its episodes.

    Raises:
        DataError: an episode has no steps, or too few observations or actions.
    """
    for episode in data.iterate_episodes() if hasattr(data, "iterate_episodes") else data:
        yield KeptBuffer(_samples(episode), None)


def _samples(episode: Any) -> list[Any]:
    steps, both = len(episode.rewards), (episode.actions, episode.observations)
    act, obs = (mapped(np.asarray, each) if isinstance(each, dict | tuple) else np.asarray(each) for each in both)
    acts, observations = (min(map(len, leaves_of(each))) for each in (act, obs))
    if not steps or acts < steps or observations < steps + 1:
        counts = f"{steps} rewards, {acts} actions and {observations} observations"
        raise DataError(
            f"episode {episode.id} of the data set", f"has {counts}; expected one observation more than steps"
        )
    samples: list[Any] = [(mapped(np.zeros_like, _row(act, 0)), _row(obs, 0), 0.0, False, {})]
    for step in range(steps):
        done = bool(episode.terminations[step])
        info = {NO_DONE: True} if step == steps - 1 and not done else {}
        samples.append((_row(act, step), _row(obs, step + 1), float(episode.rewards[step]), done, info))
    return samples


def _row(columns: Any, row: int) -> Any:
    """Return a row of nested columns [T, *F], as a copy."""
    return mapped(lambda column: np.array(column[row]), columns)


class TorchMemory(MemoryDataloading):
    """Memory base class for samples of six parts: terminated and truncated in place of done. See `MemoryDataloading`.

    `append_buffer` gets `buffer.memory` as a list of (act, new_obs, rew, terminated, truncated, info), and
    `get_transition` returns (last_obs, new_act, rew, new_obs, terminated, truncated, info).

    Args:
        device, nb_steps, memory_size, batch_size, dataset_path, crc_debug: See `MemoryDataloading`.
        sample_preprocessor: Called as f(last_obs, act, rew, new_obs, terminated, truncated) and returns the same six.
        obs_preprocessor: The same as the workers'; samples hold the environment's observations.
    """

    sample_parts = 6

    def __init__(
        self,
        device: Any,
        nb_steps: Any,
        sample_preprocessor: Callable[..., Any] | None = None,
        memory_size: int = 1000000,
        batch_size: int = 256,
        dataset_path: str | Path = "",
        crc_debug: bool | int = False,
        *,
        obs_preprocessor: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(
            device, nb_steps, obs_preprocessor, sample_preprocessor, memory_size, batch_size, dataset_path, crc_debug
        )

    def append(self, buffer: Any) -> None:
        """Add a received buffer, with `buffer.memory` in six parts; see `MemoryDataloading.append`."""
        samples = getattr(buffer, "samples", None)
        buffer.memory = [each[:6] for each in samples] if samples else [six_parts(each) for each in buffer.memory]
        super().append(buffer)


class GenericMemory(MemoryDataloading):
    """Complete memory: samples lie in rings of columns, and a batch is one gather from each column.

    Transitions never cross the end of an episode, and the oldest samples are evicted. With a preprocessor, or with
    crc_debug, transitions are built one by one, as in other memories.

    Args:
        device, nb_steps, obs_preprocessor, sample_preprocessor, memory_size, batch_size, dataset_path, crc_debug: See
            `MemoryDataloading`. dataset_path is "", or "minari:" and the name of a data set of Minari.
        codec: Codec of the samples: the same as the workers' `sample_compressor`; None if they are not compressed.
        folder: Folder of columns in files; None keeps columns in memory.
    """

    def __init__(
        self,
        device: Any = None,
        nb_steps: Any = None,
        obs_preprocessor: Callable[..., Any] | None = None,
        sample_preprocessor: Callable[..., Any] | None = None,
        memory_size: int = 1000000,
        batch_size: int = 256,
        dataset_path: str | Path = "",
        crc_debug: bool | int = False,
        *,
        codec: Codec | None = None,
        folder: str | Path | None = None,
    ) -> None:
        name = str(dataset_path).removeprefix(MINARI)
        if name and name == str(dataset_path):
            raise ParameterError("dataset_path", dataset_path, f"'{MINARI}NAME' of a data set of Minari, or ''")
        super().__init__(
            device, nb_steps, obs_preprocessor, sample_preprocessor, memory_size, batch_size, "", crc_debug
        )
        self.rings = Rings(self.memory_size, codec=codec, folder=folder, keeps_info=bool(self.checks.every))
        """Rings of columns that hold the samples."""
        for buffer in buffers_of(_data_set(name)) if name else ():
            buffer.memory = [self.rings.codec(*sample) for sample in buffer.memory]
            self.append_buffer(buffer)

    def append_buffer(self, buffer: Any) -> None:
        """Add samples of one worker. `buffer.starts`, if present, is True for each sample of a reset.

        Raises:
            CodecMismatch: the worker has another codec or no codec.
        """
        starts, continues = getattr(buffer, "starts", None), bool(getattr(buffer, "continues", False))
        self.rings.append(buffer.memory, starts, continues=continues)

    def __len__(self) -> int:
        return len(self.rings)

    def get_transition(self, item: int) -> tuple[Any, ...]:
        """Return (last_obs, new_act, rew, new_obs, done, info); with `sample_parts` 6, terminated and truncated."""
        *parts, terminated, truncated, info = self.rings.transition(item)
        ends = (terminated,) if self.sample_parts == 5 else (terminated, truncated)
        return (*parts, *ends, info)

    def sample(self) -> tuple[Any, ...]:
        """Draw a batch; see `MemoryDataloading.sample`."""
        if self.checks.every or self.obs_preprocessor is not None or self.sample_preprocessor is not None:
            return super().sample()
        last_obs, act, rew, new_obs, *ends = self.rings.sample(self.batch_size)
        kept = ends[: self.sample_parts - 4]
        parts = (last_obs, act, rew, new_obs, *(each.astype("float32") for each in kept))
        collated: tuple[Any, ...] = on_device(parts, self.device)
        return collated


def _data_set(name: str) -> Any:
    with NotInstalled.explained("pip install 'memoire-rl[minari]'"):
        import minari
    return minari.load_dataset(name)
