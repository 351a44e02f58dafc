"""How vector environments reset their members, and in which observations episodes ended then.

A vector environment that resets its members by itself shows, at the end of an episode, either the true final
observation followed by a step that is no step (next_step), or the first observation of the next episode and the true
one in `info` (same_step). Stored as it comes, either gives transitions that cross a reset. The rules are those of
https://farama.org/Vector-Autoreset-Mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from memoire.errors import FinalObservationMissing, ParameterError
from memoire.suggestions import one_of

AUTORESET = ("next_step", "same_step", "disabled")


def autoreset_mode(mode: Any) -> str:
    """One of `AUTORESET`, for its name in any spelling or for a member of gymnasium.vector.AutoresetMode."""
    text = str(getattr(mode, "value", mode))
    found = {name.replace("_", ""): name for name in AUTORESET}.get(text.lower().replace("_", "").replace("-", ""))
    if found is None:
        raise ParameterError("autoreset", mode, one_of(mode, AUTORESET))
    return found


def layout(envs: Any = None, num_envs: int | None = None, autoreset: Any = None) -> tuple[int | None, str]:
    """(num_envs, autoreset) for `Writer`, read from an environment as far as they are not given.

    Args:
        envs: A Gymnasium environment or vector environment, or None; nothing is called on it.
        num_envs: Members of a vector environment; None without `envs` is a single environment.
        autoreset: A mode; None reads `envs.metadata["autoreset_mode"]`. A single environment without it is "disabled".

    Raises:
        ParameterError: a vector environment that does not say its mode, or not what was given.
    """
    found = getattr(envs, "num_envs", None)
    if num_envs is None:
        num_envs = found
    elif envs is not None and found is not None and found != num_envs:
        raise ParameterError("num_envs", num_envs, f"{found}, as the environment says")
    said = (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
    if autoreset is None:
        autoreset = said
    elif said is not None and autoreset_mode(autoreset) != autoreset_mode(said):
        raise ParameterError("autoreset", autoreset, f"{autoreset_mode(said)!r}, as the environment says")
    if autoreset is None and num_envs is not None:
        raise ParameterError("autoreset", None, f"given for vector environments: one of {', '.join(AUTORESET)}")
    return num_envs, autoreset_mode("disabled" if autoreset is None else autoreset)


def final_observation(info: Mapping[str, Any] | None, environment: int, is_single: bool) -> tuple[Any, int | None]:
    """The observation in which an environment's episode ended, out of the `info` of a step in mode same_step; and
    the environment's place in it, None if it is of this one alone.

    Raises:
        FinalObservationMissing: `info` lacks it.
    """
    # Gymnasium 1: an array of objects, one observation each, None where there is none, and a mask. Others give
    # one batched observation, and Gymnasium 0 had the longer name.
    name = "final_obs" if info is None or "final_obs" in info else "final_observation"
    final = None if info is None else info.get(name)
    if final is not None and not is_single:
        mask = info.get("_" + name) if info is not None else None
        if mask is not None and not mask[environment]:
            raise FinalObservationMissing(environment)
        if isinstance(final, np.ndarray) and final.dtype == object:
            final = final[environment]
        else:
            return final, environment
    if final is None:
        raise FinalObservationMissing(environment)
    return final, None
