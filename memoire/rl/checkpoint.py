"""A learner's state as named arrays in one file: written as a whole, one for each rank, the newest two of each.

net.*            parameters and statistics          torch, order     states of the random generators
optimizer.I.*    Adam's moments of parameter I      facts            counters, as JSON
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from memoire.errors import DataError

from . import weights
from .ppo import PPO

KEPT: Final = 2
"""Checkpoints of each rank: ranks that are killed have saved the newest or the one before."""


class Checkpoints:
    """The files of one rank in a folder."""

    def __init__(self, folder: str | Path, rank: int = 0) -> None:
        self.folder, self._prefix = Path(folder), f"rank-{rank}-"

    def newest(self) -> int:
        """The newest iteration that was saved; -1 if there is none."""
        return max(self._iterations(), default=-1)

    def save(self, iteration: int, arrays: Mapping[str, NDArray[Any]]) -> Path:
        """Write a checkpoint of arrays [*F]; on disk when this returns; those before the last two are gone."""
        path = self._path(iteration)
        weights.save(path, arrays)
        for old in sorted(self._iterations())[:-KEPT]:
            self._path(old).unlink(missing_ok=True)
        return path

    def load(self, iteration: int) -> dict[str, NDArray[Any]]:
        """The arrays [*F] of a checkpoint. Raises OSError, DataError: it is not there, or damaged."""
        return weights.load(self._path(iteration))

    def _path(self, iteration: int) -> Path:
        return self.folder / f"{self._prefix}{iteration}.safetensors"

    def _iterations(self) -> list[int]:
        names = (path.name.removeprefix(self._prefix) for path in self.folder.glob(f"{self._prefix}*.safetensors"))
        return [int(name.removesuffix(".safetensors")) for name in names if name.split(".")[0].isdigit()]


def arrays_of(net: torch.nn.Module, ppo: PPO | None, facts: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Everything that goes on after a restart: arrays [*F] by name."""
    made = {f"net.{name}": tensor.detach().cpu().numpy() for name, tensor in net.state_dict().items()}
    made["torch"] = torch.get_rng_state().numpy()
    made["facts"] = _text(facts)
    if ppo is not None:
        for number, state in ppo.optimizer.state_dict()["state"].items():
            made |= {f"optimizer.{number}.{name}": tensor.cpu().numpy() for name, tensor in state.items()}
        made["order"] = _text({"state": ppo.random.bit_generator.state, "rate": ppo.rate})
    return made


def facts_of(arrays: Mapping[str, NDArray[Any]], path: Path) -> dict[str, Any]:
    """The counters among arrays [*F]. Raises DataError: this is no checkpoint of a learner."""
    try:
        return dict(json.loads(arrays["facts"].tobytes()))
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(str(path), "is no checkpoint of a learner") from error


def restore_net(net: torch.nn.Module, arrays: Mapping[str, NDArray[Any]], path: Path) -> None:
    """Put parameters [*F], statistics and torch's random state back. Raises DataError: they are another network's."""
    state = {name[4:]: torch.from_numpy(array) for name, array in arrays.items() if name.startswith("net.")}
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        raise DataError(str(path), f"holds another network ({str(error).splitlines()[-1].strip()})") from error
    torch.set_rng_state(torch.from_numpy(arrays["torch"]))


def restore_ppo(ppo: PPO, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Put the optimizer's moments [*F] and rate back, and the order of minibatches; as it was if nothing was saved."""
    if "order" not in arrays:
        return
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, array in arrays.items():
        if name.startswith("optimizer."):
            _, number, key = name.split(".")
            state.setdefault(int(number), {})[key] = torch.from_numpy(array)
    ppo.optimizer.load_state_dict({"state": state, "param_groups": ppo.optimizer.state_dict()["param_groups"]})
    order = json.loads(arrays["order"].tobytes())
    ppo.random.bit_generator.state, ppo.rate = order["state"], order["rate"]


def _text(facts: Mapping[str, Any]) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(facts).encode(), np.uint8)
