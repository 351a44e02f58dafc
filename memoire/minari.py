"""Minari data sets into a memory, and a memory's episodes into one: `pip install 'memoire-rl[minari]'`.

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
    """The columns of a data set's spaces, in their own dtypes: obs (or obs.*), action, reward, and extras.

    Args:
        data: A `minari.MinariDataset`.
        extra: As in `Schema.from_env`; filled from the infos of this name.
    """
    return Schema.from_env(data, extra, keep_float64=True)


def fill(memory: Memory, data: Any, lane: int = 0) -> int:
    """Add every episode of a data set to a memory, as `Memory.close` takes them; returns how many.

    An episode that was neither terminated nor truncated counts as truncated: its last observation is there. Columns
    beyond obs, action and reward are taken from the infos of their name. The oldest episodes leave where there is no
    room.

    Args:
        memory: Of a schema as `schema(data)` makes.
        data: A `minari.MinariDataset`, or an iterable of its episodes.
        lane: Which lane of the memory is written; it must not be in use.

    Raises:
        DataError: an episode has no steps, or not one observation more than actions; those before it are there.
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
    known = memory.schema
    columns: dict[str, Any] = {}
    final: dict[str, Any] = {}
    for root in known.roots:
        if root == known.qvest:
            continue
        value = _of(episode, root, where)
        for leaf, array in zip(known.leaves(root), known.flatten(root, value), strict=True):
            rows = array if known[leaf].is_ragged else _array(array, leaf, where)
            is_state = known[leaf].role == "state"
            if (count := _count(rows, leaf, where)) < length + is_state:
                raise DataError(where, f"has {count} values of {leaf!r} and {length} rewards")
            columns[leaf] = rows[:length]
            if is_state:
                final[leaf] = rows[length]
    memory.open(lane)
    memory.extend(lane, [columns[name] for name in known.entry_names])
    memory.close(lane, final_state=final, terminated=bool(terminations[-1]))


def _array(value: Any, name: str, where: str) -> Any:
    """The value as an array. A file may hold anything. Raises DataError."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(where, f"has {name!r} that are no array: {error}") from error


def _count(value: Any, name: str, where: str) -> int:
    """How many values these are. Raises DataError."""
    if not (isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim)):
        raise DataError(where, f"has no row of {name!r}, but {value!r:.80}")
    return len(value)


def _of(episode: Any, root: str, where: str) -> Any:
    """What an episode has for a declared name of the schema."""
    known = {"obs": "observations", "action": "actions", "reward": "rewards"}
    if root in known:
        return getattr(episode, known[root])
    infos = episode.infos if isinstance(episode.infos, Mapping) else {}
    if root not in infos:
        raise DataError(where, f"has no info {root!r}, but {', '.join(map(repr, infos)) or 'none'}")
    return infos[root]


def write(memory: Memory, dataset_id: str, **about: Any) -> Any:
    """Make a data set of a memory's episodes; returns it (a `minari.MinariDataset`).

    Episodes whose final state is not known, open ones among them, are left out: a data set has one observation more
    than actions. Columns beyond obs, action and reward become infos.

    Args:
        dataset_id: Such as "mine/door/replay-v0".
        about: What `minari.create_dataset_from_buffers` takes: `env=` or `observation_space=` and `action_space=`,
            `author=`, `description=`, `data_format=`, ...

    Raises:
        ParameterError: no episode can be written, the schema has no obs, action or scalar reward, or a ragged column is
            no text.
    """
    known = memory.schema
    missing = [root for root in ("obs", "action", "reward") if root not in known.roots]
    if missing or known["reward"].shape:
        raise ParameterError("memory", repr(known), "one with columns obs, action and a scalar reward")
    made = [_buffer(known, number, each) for number, each in enumerate(_whole(memory))]
    if not made:
        raise ParameterError("memory", repr(memory), "one with an episode whose final state is known")
    return minari.create_dataset_from_buffers(dataset_id, made, **about)


def _whole(memory: Memory) -> Iterator[dataset.Episode]:
    return (each for each in dataset.episodes(memory) if each.final_state is not None)


def _buffer(known: Schema, number: int, episode: dataset.Episode) -> EpisodeBuffer:
    length = len(episode)
    columns = dict(episode.columns)
    for name, state in (episode.final_state or {}).items():
        if known[name].is_ragged:
            columns[name] = [*columns[name], state]
        else:
            columns[name] = np.concatenate([columns[name], state[None]])
    columns |= {name: _texts(known, name, columns[name]) for name in known.ragged}
    ends = np.zeros(length, np.bool_)
    ends[-1] = True
    nothing = np.zeros(length, np.bool_)
    infos = {root: _nested(known, root, columns) for root in known.roots if root not in ("obs", "action", "reward")}
    return EpisodeBuffer(
        id=number,
        observations=_nested(known, "obs", columns),
        actions=_nested(known, "action", columns),
        rewards=columns["reward"].tolist(),
        terminations=(ends if episode.terminated else nothing).tolist(),
        truncations=(nothing if episode.terminated else ends).tolist(),
        infos=infos or None,
    )


def _texts(known: Schema, name: str, values: Any) -> list[str]:
    """The values of a ragged column as text: no others of different lengths can be in a data set.

    Raises:
        ParameterError: the column holds something else.
    """
    column = known[name]
    try:
        if column.dtype == np.uint8 and not column.element:
            return [value.tobytes().decode() for value in values]
    except UnicodeDecodeError:
        pass
    expected = "one whose ragged columns are text in UTF-8: Minari stores no other values of different lengths"
    raise ParameterError("memory", f"one with {name!r}, {column}", expected)


def _nested(known: Schema, root: str, columns: Mapping[str, Any]) -> Any:
    return known.nest(root, {leaf: list(columns[leaf]) for leaf in known.leaves(root)})
