"""Gymnasium environments by name: made, measured and described. Imports Gymnasium only when one is asked for."""

import contextlib
import math
from typing import TYPE_CHECKING, Any

from memoire.errors import SchemaError
from memoire.replay.schema import Schema

if TYPE_CHECKING:
    import gymnasium


def make_envs(env: str, count: int) -> "gymnasium.vector.VectorEnv[Any, Any, Any]":
    """`count` environments side by side in this process; they reset themselves within the step that ends an episode.

    Raises:
        SchemaError: Gymnasium does not know such an environment, or lacks what it needs.
    """
    import gymnasium
    from gymnasium.vector import AutoresetMode

    options = {"autoreset_mode": AutoresetMode.SAME_STEP}
    try:
        return gymnasium.make_vec(env, num_envs=count, vectorization_mode="sync", vector_kwargs=options)
    except gymnasium.error.Error as error:
        raise SchemaError(f"Gymnasium cannot make {env!r}: {error}. Give the id of an environment (--env).") from error


def sizes(envs: "gymnasium.vector.VectorEnv[Any, Any, Any]") -> tuple[int, int]:
    """(inputs, actions) of a network for these environments.

    Raises:
        SchemaError: the environment has no discrete actions, or observations that are no array of numbers.
    """
    import gymnasium

    observations, actions = envs.single_observation_space, envs.single_action_space
    if not isinstance(actions, gymnasium.spaces.Discrete) or not isinstance(observations, gymnasium.spaces.Box):
        raise SchemaError(
            f"the demo's network needs discrete actions and observations in a Box, but "
            f"{envs.spec.id if envs.spec else envs} has {actions} and {observations}. "
            f"Choose another --env, such as CartPole-v1 or Acrobot-v1."
        )
    return math.prod(observations.shape), int(actions.n)


def env_schema(env: str) -> Schema:
    """What the steps of an environment are: obs, action, reward."""
    with contextlib.closing(make_envs(env, 1)) as envs:
        return Schema.from_env(envs)
