"""Observations in the dtypes and shapes of their spaces, nested as they are: tuples, dictionaries, arrays; and the
action space of a learner, which travels with its models.

Which processors a thread runs on: training beside a device disturbs its clock.
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
"""What a model's body says beside its arrays: the action space for which it was trained, as `space_text` writes it."""


def reset_result(returned: Any) -> tuple[Any, dict[str, Any]]:
    """(obs, info) of what `reset` returned, also of an environment that returns the observation alone."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict):
        return returned
    return returned, {}


def step_result(returned: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
    """(obs, reward, terminated, truncated, info) of what `step` returned, also of an environment that returns four."""
    if len(returned) == 5:
        obs, reward, terminated, truncated, info = returned
    else:
        obs, reward, terminated, info = returned
        truncated = bool(info.get("TimeLimit.truncated", False))
        terminated = bool(terminated) and not truncated
    return obs, reward, bool(terminated), bool(truncated), info


def float32_space(space: Space[Any]) -> Space[Any]:
    """The space with float32 in place of float64, in each of its parts."""
    if isinstance(space, spaces.Box) and space.dtype == np.float64:
        return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), space.shape, np.float32)
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple(tuple(float32_space(part) for part in space.spaces))
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: float32_space(part) for name, part in space.spaces.items()})
    return space


def observation_in(space: Space[Any], value: Any, where: str = "obs") -> Any:
    """An observation as its space has it: bare numbers become arrays of the space's shape and dtype, lists tuples.

    Arrays that fit are handed on and not copied. What is no Box, Tuple or Dict stays as it is.

    Raises:
        EntryError: a part has another shape, or parts are missing; names the part.
    """
    if isinstance(space, spaces.Box):
        return _array_in(space, value, where)
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple | list) or len(value) != len(space.spaces):
            raise _misfit(where, f"{len(space.spaces)} parts", value)
        parts = zip(space.spaces, value, strict=True)
        return tuple(observation_in(part, each, f"{where}[{place}]") for place, (part, each) in enumerate(parts))
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping) or value.keys() != space.spaces.keys():
            raise _misfit(where, f"parts called {', '.join(space.spaces)}", value)
        return {name: observation_in(part, value[name], f"{where}[{name!r}]") for name, part in space.spaces.items()}
    return value


def space_text(space: Any) -> str:
    """Bounds and shape of a space, equal for spaces with equal members; "" of a kind that is not known here."""
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
    """A model's body that says for which action space it was trained, if its owner has one.

    Args:
        owner: With `action_space`, or `single_action_space` of a vector environment.
    """
    text = space_text(getattr(owner, "single_action_space", getattr(owner, "action_space", None)))
    return tensors.with_facts(body, {ACTION_SPACE: text} if text else {})


def check_actions(body: bytes, space: Any) -> None:
    """Refuse a model that was trained for other actions than an environment takes.

    Raises:
        ParameterError: names both action spaces.
    """
    said, own = weights.facts_of(body).get(ACTION_SPACE), space_text(space)
    if said and own and said != own:
        expected = f"{said:.300}, for which this model was trained: give worker and trainer the same environment"
        raise ParameterError("action_space", f"{own:.300}", expected)


def default_action(env: Any) -> Any:
    """What a device does while nobody acts: `default_action` of the environment, else zeros of its Box, else 0.

    For a vector of environments it is one such action for each.
    """
    inner = getattr(env, "unwrapped", env)
    found = getattr(inner, "default_action", None)
    if found is not None:
        return found
    return _rest(env.action_space)


def _rest(space: Space[Any]) -> Any:
    if isinstance(space, spaces.Box):
        return np.clip(np.zeros(space.shape, space.dtype), space.low, space.high)
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        return np.zeros(space.shape, space.dtype)
    if isinstance(space, spaces.Tuple):
        return tuple(_rest(part) for part in space.spaces)
    if isinstance(space, spaces.Dict):
        return {name: _rest(part) for name, part in space.spaces.items()}
    return 0


def _array_in(space: spaces.Box, value: Any, where: str) -> Any:
    try:
        array = np.asarray(value)
        fitting = array if array.shape == space.shape else array.reshape(space.shape)
        return fitting if fitting.dtype == space.dtype else fitting.astype(space.dtype)
    except (TypeError, ValueError) as error:
        raise _misfit(where, f"numbers of shape {space.shape}", value) from error


def _misfit(where: str, expected: str, value: Any) -> EntryError:
    shape = getattr(value, "shape", None)
    if shape is not None:
        received = f"an array of shape {shape}"
    else:
        received = f"{type(value).__name__}" + (f" of {len(value)} parts" if hasattr(value, "__len__") else "")
    return EntryError(where, expected, received, "Have the environment return what its observation_space says.")


def pin(cpus: Collection[int]) -> None:
    """Have the calling thread run on these processors only.

    Raises:
        ParameterError: there are no such processors for this process, or the system cannot do so.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ParameterError("cpus", cpus, "None on this system, which cannot bind threads to processors")
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, ValueError, TypeError) as error:
        usable = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ParameterError("cpus", cpus, f"some of this process's processors ({usable})") from error
