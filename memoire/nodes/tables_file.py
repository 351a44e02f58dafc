"""The tables of a server, read from JSON: what `memoire server --tables` is given, the name of a file or its content.

    {
      "online": {"env": "CartPole-v1", "multi_step": 3, "parameters": {"priority_exponent": 0.7}},
      "demo":   {"schema": "demo.json", "byte_limit": "200MB"},
      "math":   {"schema": "answer.json", "storage": "prompts", "group": 8, "score": "variance", "lease": 300}
    }

Each table has a schema (its JSON form, or the name of a file with it, beside this one) or the Gymnasium environment
that it is read off; and any of the settings of `memoire.Table`. Fields of its parameters are among these, or stand
together under "parameters".

Gymnasium environments by name: made, measured and described. Imports Gymnasium only when one is asked for.
"""

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memoire.arguments import mapping, refuse_unknown
from memoire.errors import MemoireError, ParameterError, SchemaError
from memoire.replay.parameters import Parameters
from memoire.replay.sampling import USUAL
from memoire.replay.schema import Schema
from memoire.tables import registry
from memoire.tables.table import Table, table_settings

from .settings import size

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


def read_tables(path: str) -> dict[str, Table]:
    """The tables in this file, or in `path` itself where that is JSON, in their order.

    Raises:
        ParameterError: it cannot be read, or says something that is no table; names which.
    """
    is_content = path.lstrip().startswith("{")
    try:
        given = json.loads(path if is_content else Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError("--tables", path, f"a JSON file that can be read: {error}") from error
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or brackets as deep
        raise ParameterError("--tables", path, f"a JSON file: {error}") from error
    if not isinstance(given, dict) or not given:
        raise ParameterError("--tables", path, 'an object with a table under each name, such as {"online": {...}}')
    where, folder = ("--tables", Path()) if is_content else (f"--tables {path}", Path(path).parent)
    return {name: _table(f"{where}: {name}", settings, folder) for name, settings in given.items()}


def _table(where: str, settings: Any, folder: Path) -> Table:
    if not isinstance(settings, dict):
        raise ParameterError(where, settings, "an object with the settings of a table")
    known = table_settings(settings)
    refuse_unknown(where, settings, {"schema", "env", *known})
    try:
        has_columns = registry.named(settings.get("storage", registry.DEFAULT)).has_columns
    except (MemoireError, TypeError) as error:
        raise ParameterError(where, settings["storage"], f"the name of a kind of table as storage: {error}") from error
    if has_columns and ("schema" in settings) == ("env" in settings):
        raise ParameterError(where, sorted(settings), '"schema" or "env", one of both')
    try:
        return Table(
            _schema(settings, folder) if has_columns or {"schema", "env"} & settings.keys() else None,
            parameters=parameters_from(settings.get("parameters", {})),
            **{name: _value(name, value) for name, value in settings.items() if name in known - {"parameters"}},
        )
    except (MemoireError, OSError, ValueError, TypeError) as error:
        raise ParameterError(where, "these settings", f"those of a table: {error}") from error


def _value(name: str, value: Any) -> Any:
    return size(value) if name == "byte_limit" and isinstance(value, str) else value


def _schema(settings: Mapping[str, Any], folder: Path) -> Schema:
    if "env" in settings:
        return env_schema(str(settings["env"]))
    given, kind = settings["schema"], registry.named(settings.get("storage", registry.DEFAULT)).schema_class()
    return kind.from_json(given if isinstance(given, dict) else (folder / given).read_text(encoding="utf-8-sig"))


def parameters_from(changes: Mapping[str, Any]) -> Parameters:
    """Parameters that differ from the defaults in these, as JSON has them: lists for tuples.

    Raises:
        ParameterError: there is none of this name, or not of this value.
    """
    plain = USUAL
    taken = {}
    for name, value in mapping("parameters", changes).items():
        is_vector = isinstance(getattr(plain, name, None), tuple)
        taken[name] = (tuple(value) if isinstance(value, list) else (value,)) if is_vector else value
    return plain.replace(**taken)
