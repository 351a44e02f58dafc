"""Several learners as one: ranks that torchrun starts, their sums, and checks that they agree before they learn."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from memoire.errors import ParameterError, RanksDiffer

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
