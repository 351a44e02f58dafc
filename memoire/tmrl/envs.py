"""Environments for pipelines: created by id, with observations in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat

from memoire.errors import NotInstalled

with NotInstalled.explained("pip install 'memoire-rl[rl]'"):
    import gymnasium

    from memoire.rl.spaces import default_action, float32_space, observation_in, reset_result, step_result

    from . import rtgym


class GenericGymEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Environment by its id, for workers and trainers alike. The device does not move before `reset`.

    Numbers and float64 arrays in observations become float32, in the shapes of the space. Environments that return
    (obs, reward, done, info), or only an observation at `reset`, are adapted.

    Args:
        id: Id for `gymnasium.make`. The ids "real-time-gym-v0" and "-v1" are `memoire.rl.RealTimeEnv`, unless another
            package has registered them.
        gym_kwargs: Further arguments of `gymnasium.make`, such as {"config": my_config}.
    """

    def __init__(self, id: str = "real-time-gym-v0", gym_kwargs: Mapping[str, Any] | None = None) -> None:
        rtgym.register()
        options = {"disable_env_checker": True, **(gym_kwargs or {})}
        super().__init__(gymnasium.make(rtgym.newest(id), **options))
        self.observation_space = float32_space(self.env.observation_space)

    @property
    def default_action(self) -> Any:
        """Action that the device gets without a policy."""
        return default_action(self.env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode and return (observation, info)."""
        obs, info = reset_result(self.env.reset(seed=seed, options=options))
        return observation_in(self.observation_space, obs), info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Act once and return (observation, reward, terminated, truncated, info)."""
        obs, reward, terminated, truncated, info = step_result(self.env.step(action))
        return observation_in(self.observation_space, obs), reward, terminated, truncated, info
