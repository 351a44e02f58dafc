"""Several learners as one: ranks that torchrun starts, their sums, and checks that they agree before they learn."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from memoire.errors import ParameterError, RanksDiffer

TIMEOUT: Final = 300.0
"""Seconds that a rank waits for the others in one exchange."""


@dataclass(frozen=True)
class World:
    """Which of how many learners this process is."""

    rank: int = 0
    size: int = 1

    @classmethod
    def from_environment(cls, surroundings: Mapping[str, str] = os.environ, timeout: float = TIMEOUT) -> Self:
        """As torchrun says; of several ranks, the process group is made, with gloo, unless there is one. Blocks until
        all ranks are there.

        Args:
            timeout: Seconds that a rank waits for the others, now and in each exchange; then torch raises an error.

        Raises:
            ParameterError: RANK and WORLD_SIZE do not fit.
        """
        try:
            made = cls(int(surroundings.get("RANK", "0")), int(surroundings.get("WORLD_SIZE", "1")))
        except ValueError:
            made = cls(0, 0)
        if not 0 <= made.rank < made.size:
            found = f"{surroundings.get('RANK')} of WORLD_SIZE={surroundings.get('WORLD_SIZE')}"
            raise ParameterError("$RANK", found, "a number below $WORLD_SIZE, as torchrun sets them")
        if made.size > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        return made

    def wrap(self, net: torch.nn.Module) -> torch.nn.Module:
        """The network with gradients that all ranks share, and parameters of rank 0; itself if there is one rank."""
        if self.size == 1:
            return net
        return torch.nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)

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
