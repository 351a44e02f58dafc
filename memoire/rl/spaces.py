"""Conversion of observations to the dtypes and shapes of their spaces; action spaces as texts; processor affinity.

Processors are bound to threads because training beside a device disturbs the device's clock.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
from gymnasium import Space, spaces

from memoire.building import tensors
from memoire.errors import EntryError, ParameterError

from . import weights

ACTION_SPACE: Final = "memoire.action_space"
"""Key of a model's body for the action space of its training, as `space_text` writes it."""


def reset_result(returned: Any) -> tuple[Any, dict[str, Any]]:
    """Return (obs, info) of an environment's `reset`, also if it returned the observation alone."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict):
        return returned
    return returned, {}


def step_result(returned: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
    """Return (obs, reward, terminated, truncated, info) of an environment's `step`, also if it returned four values."""
    if len(returned) == 5:
        obs, reward, terminated, truncated, info = returned
    else:
        obs, reward, terminated, info = returned
        truncated = bool(info.get("TimeLimit.truncated", False))
        terminated = bool(terminated) and not truncated
    return obs, reward, bool(terminated), bool(truncated), info


def float32_space(space: Space[Any]) -> Space[Any]:
    """Return the space with float32 in place of float64 in all parts."""
    if isinstance(space, spaces.Box) and space.dtype == np.float64:
        return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), space.shape, np.float32)
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple(tuple(float32_space(part) for part in space.spaces))
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: float32_space(part) for name, part in space.spaces.items()})
    return space


def observation_in(space: Space[Any], value: Any, where: str = "obs") -> Any:
    """Convert an observation to its space: numbers become arrays of the space's shape and dtype, lists become tuples.

    Arrays that fit are returned without a copy. Parts of other spaces than Box, Tuple and Dict are not changed.

    Raises:
        EntryError: a part is missing or has another shape; names the part.
    """
    if isinstance(space, spaces.Box):
        return _array_in(space, value, where)
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple | list) or len(value) != len(space.spaces):
            raise _entry_error(where, f"{len(space.spaces)} parts", value)
        parts = zip(space.spaces, value, strict=True)
        return tuple(observation_in(part, each, f"{where}[{index}]") for index, (part, each) in enumerate(parts))
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping) or value.keys() != space.spaces.keys():
            raise _entry_error(where, f"parts called {', '.join(space.spaces)}", value)
        return {name: observation_in(part, value[name], f"{where}[{name!r}]") for name, part in space.spaces.items()}
    return value


def space_text(space: Any) -> str:
    """Return bounds and shape of a space as text, equal for spaces with equal members; "" for unknown spaces."""
    if isinstance(space, spaces.Box):
        bounds = np.stack([space.low, space.high])
        return f"Box{tuple((bounds.astype(np.float32) if bounds.dtype.kind == 'f' else bounds).tolist())}"
    if isinstance(space, spaces.Discrete):
        return f"Discrete({int(space.n)}, start={int(space.start)})"
    if isinstance(space, spaces.MultiDiscrete):
        return f"MultiDiscrete({space.nvec.tolist()}, start={space.start.tolist()})"
    if isinstance(space, spaces.MultiBinary):
        return f"MultiBinary({list(space.shape)})"
    if not isinstance(space, spaces.Tuple | spaces.Dict):
        return ""
    parts = space.spaces if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))
    texts = {name: space_text(part) for name, part in parts.items()}
    return f"{type(space).__name__}({texts})" if all(texts.values()) else ""


def with_actions(body: bytes, owner: Any) -> bytes:
    """Return a model's body with the action space of its training, if its owner has one.

    Args:
        owner: Object with `action_space`, or `single_action_space` of a vector environment.
    """
    text = space_text(getattr(owner, "single_action_space", getattr(owner, "action_space", None)))
    return tensors.with_facts(body, {ACTION_SPACE: text} if text else {})


def check_actions(body: bytes, space: Any) -> None:
    """Raise ParameterError if a model was trained for another action space than the environment's.

    Raises:
        ParameterError: the action spaces differ; names both.
    """
    trained, present = weights.facts_of(body).get(ACTION_SPACE), space_text(space)
    if trained and present and trained != present:
        expected = f"{trained:.300}, for which this model was trained: use the same environment in worker and trainer"
        raise ParameterError("action_space", f"{present:.300}", expected)


def default_action(env: Any) -> Any:
    """Return the action of a device without a policy: the environment's `default_action`, else zeros, else 0.

    A vector environment gets one action for each of its environments.
    """
    inner = getattr(env, "unwrapped", env)
    action = getattr(inner, "default_action", None)
    if action is not None:
        return action
    return _zero_action(env.action_space)


def _zero_action(space: Space[Any]) -> Any:
    if isinstance(space, spaces.Box):
        return np.clip(np.zeros(space.shape, space.dtype), space.low, space.high)
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        return np.zeros(space.shape, space.dtype)
    if isinstance(space, spaces.Tuple):
        return tuple(_zero_action(part) for part in space.spaces)
    if isinstance(space, spaces.Dict):
        return {name: _zero_action(part) for name, part in space.spaces.items()}
    return 0


def _array_in(space: spaces.Box, value: Any, where: str) -> Any:
    try:
        array = np.asarray(value)
        fitting = array if array.shape == space.shape else array.reshape(space.shape)
        return fitting if fitting.dtype == space.dtype else fitting.astype(space.dtype)
    except (TypeError, ValueError) as error:
        raise _entry_error(where, f"numbers of shape {space.shape}", value) from error


def _entry_error(where: str, expected: str, value: Any) -> EntryError:
    shape = getattr(value, "shape", None)
    if shape is not None:
        received = f"an array of shape {shape}"
    else:
        received = f"{type(value).__name__}" + (f" of {len(value)} parts" if hasattr(value, "__len__") else "")
    return EntryError(where, expected, received, "The environment has to return observations of its observation_space.")


def pin(cpus: Collection[int]) -> None:
    """Bind the calling thread to these processors.

    Raises:
        ParameterError: this process may not use them, or the system cannot bind threads.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ParameterError("cpus", cpus, "None on this system, which cannot bind threads to processors")
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, ValueError, TypeError) as error:
        usable = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ParameterError("cpus", cpus, f"some of this process's processors ({usable})") from error
