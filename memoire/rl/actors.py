"""What acts for a `RolloutWorker`: anything with `act(obs, test=False)`, or a torch module that is wrapped here.

class Bang:                                   # no torch needed
def act(self, obs, test=False): return np.sign(obs[:1])

models ──▶ prepare (a thread of its own) ──▶ adopt (between two steps) ──▶ act

`ModelFollower` fetches the newest model on a thread of its own: the loop of steps only takes over what is ready.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from memoire.building import Condition, ModelHandle
from memoire.errors import Closed, MemoireTimeout, ParameterError, WrongModel

from .codec import mapped
from .spaces import default_action

_log = logging.getLogger(__name__)


WAIT_INTERVAL: Final = 0.5
"""Seconds after which the thread sees whether it is to end."""


@dataclass(frozen=True)
class PreparedModel:
    """A model that can be adopted between two steps."""

    version: int
    prepared: Any


class ModelFollower:
    """The newest model of a topic, prepared for an actor.

    Args:
        model: Of a client.
        actor: What prepares it.
        keep: Called on the thread with each model's body and version: for files.
        check: Called on the thread with each model's body. What it raises as ParameterError ends the thread, and
            `newest` and `wait` raise it.
    """

    def __init__(
        self,
        model: ModelHandle,
        actor: Learns,
        keep: Callable[[bytes, int], object],
        check: Callable[[bytes], object] = lambda body: None,
    ) -> None:
        self.version = 0
        """Of the model that acts; the worker sets it."""
        self.failures = 0
        """Models that did not fit, and were passed over."""
        self._model, self._actor, self._keep, self._check = model, actor, keep, check
        self._refused: ParameterError | WrongModel | None = None
        self._ready: PreparedModel | None = None  # replaced as a whole
        self._changed = Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="memoire-worker-models", daemon=True)
        self._thread.start()

    def newest(self) -> PreparedModel | None:
        """A model above the one that acts, if one is ready. Takes no lock.

        Raises:
            ParameterError: a model is of a learner that was told something else than this worker.
            WrongModel: the first model does not fit. A later one is passed over, and the log says so.
        """
        if self._refused is not None:
            raise self._refused
        ready = self._ready
        return ready if ready is not None and ready.version > self.version else None

    def wait(self, after: int, timeout: float) -> bool:
        """Wait until a model above `after` is ready; whether there is one. Raises as `newest` does."""

        def has_come() -> bool:
            return self._refused is not None or (self._ready is not None and self._ready.version > after)

        with self._changed.held():
            is_ready = bool(self._changed.wait_for(has_come, timeout))
        if self._refused is not None:
            raise self._refused
        return is_ready

    def close(self) -> None:
        """End the thread."""
        self._is_closing = True
        self._thread.join(2 * WAIT_INTERVAL)

    def _run(self) -> None:
        seen = 0
        while not self._is_closing:
            try:
                model = self._model.wait(WAIT_INTERVAL, after=seen)
            except MemoireTimeout:
                continue
            except Closed:
                return
            seen = model.version
            try:
                self._check(model.body)
                self._take(model.body, model.version)
            except (ParameterError, WrongModel) as error:
                with self._changed.held():
                    self._refused = error
                    self._changed.notify_all()
                return

    def _take(self, body: bytes, version: int) -> None:
        try:
            ready = PreparedModel(version, self._actor.prepare(body, version))
        except WrongModel as error:
            self.failures += 1
            if self._ready is None and not self.version:
                raise  # there is no model to act by, and never was
            _log.warning("the worker acts on by model %d: %s", self.version, error)
            return
        try:
            self._keep(body, version)
        except OSError as error:
            _log.warning("model %d cannot be saved: %s", version, error)
        with self._changed.held():
            self._ready = ready
            self._changed.notify_all()


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

    def tensor(part: Any) -> Any:
        array = np.asarray(part)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        return torch.from_numpy(np.ascontiguousarray(array)[None]).to(device)

    return mapped(tensor, obs)


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
