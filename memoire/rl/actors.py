"""Actors of a `RolloutWorker`: objects with `act(obs, test=False)`, or torch modules, which `TorchActor` wraps.

    class Bang:                                   # no torch needed
        def act(self, obs, test=False): return np.sign(obs[:1])

    models ──▶ prepare (a thread of its own) ──▶ adopt (between two steps) ──▶ act

`ModelFollower` fetches and prepares the newest model on its own thread: the loop of steps only adopts prepared models.
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
"""Seconds between two checks whether the thread has to end."""


@dataclass(frozen=True)
class PreparedModel:
    """Model in the form that an actor's `adopt` takes, with its version."""

    version: int
    prepared: Any


class ModelFollower:
    """Follower of a topic: a thread that fetches the newest model and prepares it for an actor.

    Args:
        model: Handle of the topic's models, as a client returns it.
        actor: Actor that prepares the models.
        keep: Called on the thread with each model's body and version, to save it.
        check: Called on the thread with each model's body. If it raises ParameterError, the thread ends, and `newest`
            and `wait` raise the error.
    """

    def __init__(
        self,
        model: ModelHandle,
        actor: Learns,
        keep: Callable[[bytes, int], object],
        check: Callable[[bytes], object] = lambda body: None,
    ) -> None:
        self.version = 0
        """Version of the model that acts; the worker sets it."""
        self.failures = 0
        """Number of models that did not fit the actor, and were skipped."""
        self._model, self._actor, self._keep, self._check = model, actor, keep, check
        self._refused: ParameterError | WrongModel | None = None
        self._ready: PreparedModel | None = None  # replaced as a whole
        self._changed = Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="memoire-worker-models", daemon=True)
        self._thread.start()

    def newest(self) -> PreparedModel | None:
        """Return the newest prepared model above the current version, or None. Takes no lock.

        Raises:
            ParameterError: `check` rejected a model.
            WrongModel: the first model does not fit. A later one that does not fit is skipped with a warning.
        """
        if self._refused is not None:
            raise self._refused
        ready = self._ready
        return ready if ready is not None and ready.version > self.version else None

    def wait(self, after: int, timeout: float) -> bool:
        """Wait until a model above `after` is prepared; False if the timeout came first. Raises as `newest` does."""

        def has_come() -> bool:
            return self._refused is not None or (self._ready is not None and self._ready.version > after)

        with self._changed.held():
            is_ready = bool(self._changed.wait_for(has_come, timeout))
        if self._refused is not None:
            raise self._refused
        return is_ready

    def close(self) -> None:
        """Stop the thread, and wait for it at most 2 * WAIT_INTERVAL seconds."""
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
                raise  # the actor has no earlier model to keep
            _log.warning("the worker keeps acting by model %d: %s", self.version, error)
            return
        try:
            self._keep(body, version)
        except OSError as error:
            _log.warning("model %d cannot be saved: %s", version, error)
        with self._changed.held():
            self._ready = ready
            self._changed.notify_all()


class Acts(Protocol):
    """Interface of actors of one environment."""

    def act(self, obs: Any, test: bool = False) -> Any:
        """Return the environment's action for its observation; with `test`, without exploration."""
        ...


@runtime_checkable
class Learns(Protocol):
    """Interface of actors that follow published models: `prepare` runs on a thread, `adopt` between two steps."""

    def prepare(self, body: bytes, version: int) -> Any:
        """Return a published model in the form that `adopt` takes. Raises WrongModel: the model does not fit."""
        ...

    def adopt(self, prepared: Any) -> None:
        """Act by this prepared model from the next step on."""
        ...


class _ByLoad:
    """Adapter of a policy with `act` and `load(body, version)`, such as one in NumPy, to `Learns`."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def act(self, obs: Any, test: bool = False) -> Any:
        return self.policy.act(obs, test=test)

    def prepare(self, body: bytes, version: int) -> tuple[bytes, int]:
        return body, version

    def adopt(self, prepared: tuple[bytes, int]) -> None:
        self.policy.load(*prepared)


class TorchActor:
    """Actor around a torch module, whose `act(obs, test=False)` gets tensors with a leading axis of 1 on its device.

    Args:
        module: Module such as a `memoire.tmrl.actor.ActorModule` or a `GaussianPolicy`.
        device: Name of the torch device to act on.

    Raises:
        ParameterError: torch has no such device on this machine.
    """

    def __init__(self, module: Any, device: str | None = "cpu") -> None:
        from memoire.torch import device_of

        self.device = device_of(device)
        self.module = module.to(self.device)
        self.module.eval()

    def act(self, obs: Any, test: bool = False) -> Any:
        """Return the action [*A] as a NumPy array."""
        import torch

        with torch.no_grad():
            action = self.module.act(_tensors(obs, self.device), test=test)
        return action.detach().cpu().numpy() if isinstance(action, torch.Tensor) else action

    def prepare(self, body: bytes, version: int) -> Any:
        """Return the model's tensors by name. Raises WrongModel: they do not fit the module."""
        import memoire.torch

        state = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        memoire.torch.load(body, state)
        return state

    def adopt(self, prepared: Any) -> None:
        """Load prepared tensors into the module."""
        self.module.load_state_dict(prepared)


def actor_of(policy: Any, device: str | None = "cpu") -> Acts:
    """Return the actor for a policy: a `TorchActor` for a torch module, an adapter, or the policy itself.

    Raises:
        ParameterError: the policy has no method `act`, or torch has no such device on this machine.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(policy, torch.nn.Module):
        return TorchActor(policy, device)
    if not callable(getattr(policy, "act", None)):
        raise ParameterError("policy", type(policy).__name__, "an object with a method act(obs, test=False)")
    if callable(getattr(policy, "load", None)) and not isinstance(policy, Learns):
        return _ByLoad(policy)
    actor: Acts = policy
    return actor


def _tensors(obs: Any, device: Any) -> Any:
    """Return an observation, nested as it is, as tensors with a leading axis of 1; float64 becomes float32."""
    import torch

    def tensor(part: Any) -> Any:
        array = np.asarray(part)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        return torch.from_numpy(np.ascontiguousarray(array)[None]).to(device)

    return mapped(tensor, obs)


def shaped_action(action: Any, space: Any) -> Any:
    """Return the action as an environment with this action space takes it: an array of a Box's shape, or a number."""
    shape = getattr(space, "shape", None)
    if hasattr(space, "low") and shape is not None:
        array: NDArray[Any] = np.asarray(action)
        return array.reshape(shape) if array.size == int(np.prod(shape)) else array
    if hasattr(space, "n") and shape == () and np.ndim(action):
        return np.asarray(action).reshape(-1)[0]
    return action


def send_default_action(env: Any) -> None:
    """Send a device its default action: by the environment's `wait`, or in a step if it has a `default_action`."""
    plain = getattr(env, "unwrapped", env)
    wait = getattr(plain, "wait", None)
    try:
        if callable(wait):
            wait()
        elif hasattr(plain, "default_action"):
            env.step(default_action(env))
    except Exception:  # an error of any kind: the worker still has samples to send
        _log.exception("the device did not take its default action")
