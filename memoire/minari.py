"""Conversion of Minari data sets to a memory's episodes and back: `pip install 'memoire-rl[minari]'`.

Example:
    data = minari.load_dataset("D4RL/door/human-v2")
    buffer = memoire.Buffer(memoire.minari.schema(data), capacity=data.total_steps)
    memoire.minari.fill(buffer.memory, data)
    ...
    memoire.minari.write(buffer.memory, "mine/door/replay-v0", env="AdroitHandDoor-v1")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from memoire import Memory, Schema, dataset

from .errors import DataError, NotInstalled, ParameterError

with NotInstalled.explained("pip install 'memoire-rl[minari]'"):
    import minari
    from minari.data_collector import EpisodeBuffer


def schema(data: Any, extra: Mapping[str, Any] | None = None) -> Schema:
    """Return the schema of a data set's spaces, with their own dtypes: obs (or obs.*), action, reward, and extras.

    Args:
        data: A `minari.MinariDataset`.
        extra: Further columns as in `Schema.from_env`; `fill` reads them from the infos of the same name.
    """
    return Schema.from_env(data, extra, keep_float64=True)


def fill(memory: Memory, data: Any, lane: int = 0) -> int:
    """Add every episode of a data set to a memory, and return the number of episodes.

    An episode that was neither terminated nor truncated counts as truncated. Columns beyond obs, action and reward are
    read from the infos of the same name. The oldest episodes are evicted if the memory is full.

    Args:
        memory: Memory with a schema such as that of `schema(data)`.
        data: A `minari.MinariDataset`, or an iterable of its episodes.
        lane: Lane of the memory to write to, which must not be in use.

    Raises:
        DataError: an episode has no steps, or too few values; the episodes before it stay in the memory.
        EntryError: a value does not fit its column.
        EpisodeTooLong: an episode is longer than the memory.
    """
    episodes: Iterator[Any] = iter(data.iterate_episodes() if hasattr(data, "iterate_episodes") else data)
    name = str(getattr(getattr(data, "spec", None), "dataset_id", "the data set"))
    count = 0
    for episode in episodes:
        _add(memory, episode, lane, f"{name}, episode {episode.id},")
        count += 1
    return count


def _add(memory: Memory, episode: Any, lane: int, where: str) -> None:
    length, terminations = (
        _count(episode.rewards, "rewards", where),
        _array(episode.terminations, "terminations", where),
    )
    if length == 0 or terminations.shape != (length,) or terminations.dtype.kind not in "biu":
        raise DataError(where, f"has {length} rewards and terminations of {terminations.dtype}{terminations.shape}")
    schema = memory.schema
    columns: dict[str, Any] = {}
    final: dict[str, Any] = {}
    for root in schema.roots:
        if root == schema.qvest:
            continue
        value = _values_of(episode, root, where)
        for leaf, array in zip(schema.leaves(root), schema.flatten(root, value), strict=True):
            rows = array if schema[leaf].is_ragged else _array(array, leaf, where)
            is_state = schema[leaf].role == "state"
            if (count := _count(rows, leaf, where)) < length + is_state:
                raise DataError(where, f"has {count} values of {leaf!r} and {length} rewards")
            columns[leaf] = rows[:length]
            if is_state:
                final[leaf] = rows[length]
    memory.open(lane)
    memory.extend(lane, [columns[name] for name in schema.entry_names])
    memory.close(lane, final_state=final, terminated=bool(terminations[-1]))


def _array(value: Any, name: str, where: str) -> Any:
    try:
        return np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(where, f"has {name!r} that cannot be converted to an array: {error}") from error


def _count(value: Any, name: str, where: str) -> int:
    if not (isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim)):
        raise DataError(where, f"has no rows of {name!r}, but {value!r:.80}")
    return len(value)


def _values_of(episode: Any, root: str, where: str) -> Any:
    attributes = {"obs": "observations", "action": "actions", "reward": "rewards"}
    if root in attributes:
        return getattr(episode, attributes[root])
    infos = episode.infos if isinstance(episode.infos, Mapping) else {}
    if root not in infos:
        raise DataError(where, f"has no info {root!r}; its infos are {', '.join(map(repr, infos)) or 'empty'}")
    return infos[root]


def write(memory: Memory, dataset_id: str, **about: Any) -> Any:
    """Create a data set of a memory's episodes, and return it (a `minari.MinariDataset`).

    Episodes without a final state, such as open ones, are left out, because a data set has one more observation than
    actions. Columns beyond obs, action and reward become infos.

    Args:
        dataset_id: Name of the data set, such as "mine/door/replay-v0".
        about: Arguments of `minari.create_dataset_from_buffers`: `env=` or `observation_space=` and `action_space=`,
            `author=`, `description=`, `data_format=`, ...

    Raises:
        ParameterError: the memory has no episode with a final state, the schema has no obs, action or scalar reward, or
            a ragged column is not text.
    """
    schema = memory.schema
    missing = [root for root in ("obs", "action", "reward") if root not in schema.roots]
    if missing or schema["reward"].shape:
        raise ParameterError.with_text(f"The memory needs columns obs, action and a scalar reward; it has {schema!r}.")
    buffers = [_buffer(schema, number, each) for number, each in enumerate(_complete_episodes(memory))]
    if not buffers:
        raise ParameterError.with_text(f"The memory has no episode with a final state: {memory!r}.")
    return minari.create_dataset_from_buffers(dataset_id, buffers, **about)


def _complete_episodes(memory: Memory) -> Iterator[dataset.Episode]:
    return (each for each in dataset.episodes(memory) if each.final_state is not None)


def _buffer(schema: Schema, number: int, episode: dataset.Episode) -> EpisodeBuffer:
    length = len(episode)
    columns = dict(episode.columns)
    for name, state in (episode.final_state or {}).items():
        if schema[name].is_ragged:
            columns[name] = [*columns[name], state]
        else:
            columns[name] = np.concatenate([columns[name], state[None]])
    columns |= {name: _texts(schema, name, columns[name]) for name in schema.ragged}
    ends = np.zeros(length, np.bool_)
    ends[-1] = True
    no_ends = np.zeros(length, np.bool_)
    infos = {root: _nested(schema, root, columns) for root in schema.roots if root not in ("obs", "action", "reward")}
    return EpisodeBuffer(
        id=number,
        observations=_nested(schema, "obs", columns),
        actions=_nested(schema, "action", columns),
        rewards=columns["reward"].tolist(),
        terminations=(ends if episode.terminated else no_ends).tolist(),
        truncations=(no_ends if episode.terminated else ends).tolist(),
        infos=infos or None,
    )


def _texts(schema: Schema, name: str, values: Any) -> list[str]:
    """Return the values of a ragged column as text, the only values of different lengths that Minari stores.

    Raises:
        ParameterError: the column is not text in UTF-8.
    """
    column = schema[name]
    try:
        if column.dtype == np.uint8 and not column.element:
            return [value.tobytes().decode() for value in values]
    except UnicodeDecodeError:
        pass
    raise ParameterError.with_text(
        f"Minari stores values of different lengths only if they are text in UTF-8; column {name!r} is {column}."
    )


def _nested(schema: Schema, root: str, columns: Mapping[str, Any]) -> Any:
    return schema.nest(root, {leaf: list(columns[leaf]) for leaf in schema.leaves(root)})
