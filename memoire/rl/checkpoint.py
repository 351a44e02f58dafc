"""A learner's state as named arrays in one file: written as a whole, one for each rank, the newest two of each.

net.*     parameters and statistics            NAME...    arrays of the algorithm's attributes, see `agent_state`
:facts    JSON: counters, settings, the algorithm as it was made and as it is, generators of the process

`World` is several learners as one: ranks that torchrun starts, their sums, and whether they agree before they learn.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from memoire.building import lock_folder, remove_abandoned_in
from memoire.errors import ParameterError, RanksDiffer
from memoire.kinds import unpack

from . import weights
from .saving import FACTS, form_of, packed_tree, readable, restore, state_of, unsaved

OF_THE_LEARNER: Final = ("net", "_plain")
"""Attributes of an algorithm that the learner saves by itself."""


TIMEOUT: Final = 300.0
"""Seconds that a rank waits for the others in one exchange."""


GLOO: Final = "gloo"
NCCL: Final = "cpu:gloo,cuda:nccl"
"""Counts and sums stay on the CPU."""


@dataclass(frozen=True)
class World:
    """Which of how many learners this process is."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    """Where its network may lie: a GPU of its own, "cuda:0" for instance, if each rank of the machine has one."""
    local_rank: int | None = field(default=None, compare=False)
    """Which of those on its own machine, or in its own Pod; None says the rank."""

    @classmethod
    def from_environment(cls, surroundings: Mapping[str, str] = os.environ, timeout: float = TIMEOUT) -> Self:
        """As torchrun says; of several ranks, the process group is made unless there is one: with NCCL for tensors on
        GPUs, if each rank has one, and with gloo for all others. Blocks until all ranks are there.

        Args:
            timeout: Seconds that a rank waits for the others, now and in each exchange; then torch raises an error.

        Raises:
            ParameterError: RANK and WORLD_SIZE do not fit.
        """
        has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
        made, backend = cls.placed(surroundings, torch.cuda.device_count() if has_nccl else 0)
        if made.size > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout))
        return made

    @classmethod
    def placed(cls, surroundings: Mapping[str, str], devices: int) -> tuple[Self, str]:
        """Which rank this is, and the process group's backend, on a machine with so many GPUs that NCCL can use.

        Raises:
            ParameterError: RANK and WORLD_SIZE do not fit.
        """
        try:
            rank, size = int(surroundings.get("RANK", "0")), int(surroundings.get("WORLD_SIZE", "1"))
            place, places = int(surroundings.get("LOCAL_RANK", rank)), int(surroundings.get("LOCAL_WORLD_SIZE", size))
        except ValueError:
            rank = size = place = places = 0
        if not 0 <= rank < size:
            found = f"{surroundings.get('RANK')} of WORLD_SIZE={surroundings.get('WORLD_SIZE')}"
            raise ParameterError("$RANK", found, "a number below $WORLD_SIZE, as torchrun sets them")
        has_own = devices >= places  # NCCL refuses two ranks on one GPU
        return cls(rank, size, f"cuda:{place}" if has_own else "cpu", place), NCCL if has_own else GLOO

    @property
    def place(self) -> int:
        """By which the addresses of ranks on one machine differ."""
        return self.rank if self.local_rank is None else self.local_rank

    def wrap(self, net: torch.nn.Module) -> torch.nn.Module:
        """The network with gradients that all ranks share, and parameters of rank 0; itself if there is one rank."""
        if self.size == 1:
            return net
        parallel = torch.nn.parallel.DistributedDataParallel
        # Statistics are merged by `OnPolicyLearner`, and are the same everywhere; newer torch has another name for it.
        has_new = "forward_sync_buffers" in inspect.signature(parallel.__init__).parameters
        return parallel(net, **{"forward_sync_buffers" if has_new else "broadcast_buffers": False})

    def sums(self, values: Any) -> NDArray[np.float64]:
        """The sum of values [*F] over all ranks, float64 [*F]; the same bits on each of them."""
        found = torch.tensor(np.asarray(values, np.float64))
        if self.size > 1:
            torch.distributed.all_reduce(found)
        summed: NDArray[np.float64] = found.numpy()
        return summed

    def least(self, values: Sequence[int]) -> list[int]:
        """The least of each number over all ranks."""
        found = torch.tensor(list(values), dtype=torch.int64)
        if self.size > 1:
            torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN)
        return [int(each) for each in found]

    def check_equal(self, **numbers: int) -> None:
        """Raise RanksDiffer on all ranks unless each has these numbers."""
        own = list(numbers.values())
        low, negated = self.least(own), self.least([-each for each in own])
        for name, mine, least, most in zip(numbers, own, low, negated, strict=True):
            if least != -most:
                raise RanksDiffer(name, least, -most, self.rank, mine)


class Checkpoints:
    """The files of one rank in a folder, which is made. They are locked until `close`.

    Raises:
        StateLocked: another learner has the files of this rank.
        StateForeign: the path of the lock file holds something else.
    """

    def __init__(self, folder: str | Path, rank: int = 0) -> None:
        self.folder = Path(folder).absolute()
        self._files = weights.NumberedFiles(self.folder, f"rank-{rank}-")
        self.folder.mkdir(parents=True, exist_ok=True)
        what = f"rank {rank} of the checkpoint folder"
        self._lock = lock_folder(self.folder, what, "learner", name=f"rank-{rank}.lock")
        remove_abandoned_in(self.folder, ".safetensors")

    def close(self) -> None:
        """Let another learner have the files; once is enough."""
        self._lock.release()

    def newest(self) -> int:
        """The newest iteration that was saved; -1 if there is none."""
        newest = self._files.newest()
        return -1 if newest is None else newest

    def save(self, iteration: int, arrays: Mapping[str, NDArray[Any]]) -> Path:
        """Write a checkpoint of arrays [*F]; on disk when this returns; those before the last two are gone."""
        return self._files.save(iteration, arrays)

    def load(self, iteration: int) -> SavedLearner:
        """A checkpoint. Raises OSError, DataError: it is not there, or damaged."""
        return SavedLearner(self._files.path(iteration))


class SavedLearner:
    """What a checkpoint holds.

    Raises:
        OSError, DataError: it is not there, damaged, or no checkpoint of a learner.
    """

    def __init__(self, path: Path) -> None:
        self._arrays, self._path = weights.load(path), str(path)
        with readable(self._path, "is no checkpoint of a learner"):
            self._tree = unpack(self._arrays.pop(FACTS).tobytes(), self._path)
            self.facts: dict[str, Any] = dict(self._tree["facts"])
            """What the learner counts, and its settings."""
            self.has_algorithm = self._tree["algorithm"] is not None
            self.settings: dict[str, Any] = dict(self.facts["settings"])
            """The settings that the learner was made with."""
            self.ranks, self.every = int(self.settings["ranks"]), int(self.settings["checkpoint_every"])
            self.steps, self.iterations = int(self.facts["steps"]), int(self.facts["iterations"])
            self.version = int(self.facts["version"])

    def restore_net(self, net: torch.nn.Module) -> None:
        """Put parameters, statistics and the process' generators back. Raises DataError: it is another network's."""
        with readable(self._path, "does not fit this network"):
            restore(SimpleNamespace(net=net), self._arrays, self._tree, {}, self._path)

    def restore_algorithm(self, algorithm: Any) -> None:
        """Put an algorithm's attributes and the generators of the process back; as it is if nothing was saved.

        Raises:
            DataError, ParameterError: see `agent_state.restore`.
        """
        if self.has_algorithm:
            tree = {"agent": self._tree["algorithm"], "random": self._tree["random"]}
            with readable(self._path, "does not fit this algorithm"):
                restore(algorithm, self._arrays, tree, self._tree["made"], self._path, OF_THE_LEARNER)


def made_as(algorithm: Any) -> Any:
    """The form of an algorithm that was just made; see `agent_state.form_of`."""
    return form_of(algorithm, OF_THE_LEARNER)


def left_out(algorithm: Any) -> list[str]:
    """Attributes of an algorithm that no checkpoint holds."""
    return unsaved(algorithm, OF_THE_LEARNER)


def arrays_of(net: torch.nn.Module, algorithm: Any, made: Any, facts: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Everything that goes on after a restart: arrays [*F] by name.

    Args:
        algorithm: None is none.
        made: `made_as` of the algorithm.
        facts: What the learner counts, and its settings.
    """
    arrays, tree = state_of(SimpleNamespace(net=net))
    own, state = ({}, {"agent": None}) if algorithm is None else state_of(algorithm, OF_THE_LEARNER)
    tree |= {"algorithm": state["agent"], "made": made, "facts": dict(facts)}
    return arrays | own | {FACTS: packed_tree(tree)}
