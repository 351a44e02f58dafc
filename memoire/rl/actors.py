"""What acts for a `RolloutWorker`: anything with `act(obs, test=False)`, or a torch module that is wrapped here.

class Bang:                                   # no torch needed
def act(self, obs, test=False): return np.sign(obs[:1])

models ──▶ prepare (a thread of its own) ──▶ adopt (between two steps) ──▶ act
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from memoire.errors import ParameterError

from .spaces import default_action

_log = logging.getLogger(__name__)


class Acts(Protocol):
    """What acts in one environment."""

    def act(self, obs: Any, test: bool = False) -> Any:
        """The action for an observation, as the environment returned both; with `test`, the best one it knows."""
        ...


@runtime_checkable
class Learns(Protocol):
    """What acts by published models. A body is prepared on a thread of its own, and adopted between two steps."""

    def prepare(self, body: bytes, version: int) -> Any:
        """What `adopt` needs of a published model. Raises WrongModel: it does not fit."""
        ...

    def adopt(self, prepared: Any) -> None:
        """Act by this model from now on."""
        ...


class _ByLoad:
    """A policy with `act` and `load(body, version)`, such as one in NumPy."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def act(self, obs: Any, test: bool = False) -> Any:
        return self.policy.act(obs, test=test)

    def prepare(self, body: bytes, version: int) -> tuple[bytes, int]:
        return body, version

    def adopt(self, prepared: tuple[bytes, int]) -> None:
        self.policy.load(*prepared)


class TorchActor:
    """A torch module with `act(obs, test=False)`, which gets tensors with a leading axis of 1, on its device.

    Args:
        module: Such as a `memoire.tmrl.actor.ActorModule`, or a `GaussianPolicy`.
        device: Where it acts.

    Raises:
        ParameterError: torch has no such device here.
    """

    def __init__(self, module: Any, device: str | None = "cpu") -> None:
        from memoire.torch import device_of

        self.device = device_of(device)
        self.module = module.to(self.device)
        self.module.eval()

    def act(self, obs: Any, test: bool = False) -> Any:
        """The action [*A], as an array."""
        import torch

        with torch.no_grad():
            action = self.module.act(_tensors(obs, self.device), test=test)
        return action.detach().cpu().numpy() if isinstance(action, torch.Tensor) else action

    def prepare(self, body: bytes, version: int) -> Any:
        """Tensors by name that fit the module. Raises WrongModel."""
        import memoire.torch

        state = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        memoire.torch.load(body, state)
        return state

    def adopt(self, prepared: Any) -> None:
        """Act by these."""
        self.module.load_state_dict(prepared)


def actor_of(policy: Any, device: str | None = "cpu") -> Acts:
    """What acts by this policy.

    Raises:
        ParameterError: it has no method `act`, or torch has no such device here.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(policy, torch.nn.Module):
        return TorchActor(policy, device)
    if not callable(getattr(policy, "act", None)):
        raise ParameterError("policy", type(policy).__name__, "something with a method act(obs, test=False)")
    if callable(getattr(policy, "load", None)) and not isinstance(policy, Learns):
        return _ByLoad(policy)
    found: Acts = policy
    return found


def _tensors(obs: Any, device: Any) -> Any:
    """Observations as float tensors with a leading axis of 1, nested as they are; integers stay integers."""
    import torch

    if isinstance(obs, Mapping):
        return {name: _tensors(part, device) for name, part in obs.items()}
    if isinstance(obs, tuple | list):
        return tuple(_tensors(part, device) for part in obs)
    array = np.asarray(obs)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(array)[None]).to(device)


def shaped_action(action: Any, space: Any) -> Any:
    """The action as an environment of this action space takes it: an array of a Box's shape, or a whole number."""
    shape = getattr(space, "shape", None)
    if hasattr(space, "low") and shape is not None:
        found: NDArray[Any] = np.asarray(action)
        return found.reshape(shape) if found.size == int(np.prod(shape)) else found
    if hasattr(space, "n") and shape == () and np.ndim(action):
        return np.asarray(action).reshape(-1)[0]
    return action


def rest(env: Any) -> None:
    """Give a device its default action: by the environment's `wait`, or as a step if it has a `default_action`."""
    plain = getattr(env, "unwrapped", env)
    wait = getattr(plain, "wait", None)
    try:
        if callable(wait):
            wait()
        elif hasattr(plain, "default_action"):
            env.step(default_action(env))
    except Exception:  # whatever it was, the worker has samples to send
        _log.exception("the device did not take its default action")
