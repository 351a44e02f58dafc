"""An episode as the payload of a snapshot's record, and back: its arrays, one after the other.

facts of its entries | columns | final state | bootstrap value        of a ragged column its lengths come first
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memoire.errors import ProtocolError
from memoire.replay import dataset
from memoire.replay.columns import Column
from memoire.replay.dataset import KeptEpisode
from memoire.replay.ragged import Ragged
from memoire.replay.schema import Schema

from .snapshot_file import EpisodeRecord, Record


def pack(kept: KeptEpisode, place: int, schema: Schema) -> Record:
    """An episode: facts of its entries, columns, final state and bootstrap value, one after the other. Of a ragged
    column its lengths come before its elements.
    """
    episode = kept.episode
    assert episode.born is not None, "known of every entry that a memory holds"
    parts = [getattr(episode, name) for name in dataset.FACTS]
    parts += [episode.columns[name] for name in schema.names]
    for name in schema.states if episode.final_state is not None else ():
        state = (episode.final_state or {})[name]
        parts.append(Ragged(state, [len(state)]) if schema[name].is_ragged else state)
    if episode.bootstrap_value is not None:
        parts.append(episode.bootstrap_value)
    body = EpisodeRecord(
        owner=kept.owner,
        number=kept.number,
        length=len(episode),
        closed=float(episode.born[-1]),
        multiplier=episode.multiplier,
        terminated=episode.terminated,
        cut=episode.is_cut,
        has_final=episode.final_state is not None,
        has_bootstrap=episode.bootstrap_value is not None,
        update_value=episode.update_value,
        update_weight=episode.update_weight,
    )
    return Record(body, place, b"".join(map(_bytes_of, parts)))


def _bytes_of(part: NDArray[Any] | Ragged) -> bytes:
    if isinstance(part, Ragged):
        return part.lengths.astype("<i8").tobytes() + np.ascontiguousarray(part.values).tobytes()
    return np.ascontiguousarray(part).tobytes()


def unpack(body: EpisodeRecord, payload: bytes, schema: Schema) -> KeptEpisode:
    """The episode of a record. Arrays are views of the payload where they lie as their types want it.

    Raises:
        ProtocolError: (code "container") it cannot be one of this schema.
    """
    if not 1 <= body.length <= len(payload) or not 0.0 <= body.multiplier < math.inf:
        raise ProtocolError("container", f"an episode of {body.length} entries in {len(payload)} bytes")
    parts = _PackedArrays(payload)
    facts = {name: parts.take(dtype, body.length) for name, dtype in dataset.FACTS.items()}
    columns = {name: parts.column(column, body.length) for name, column in schema.items()}
    states = {name: parts.column(schema[name], 1)[0] for name in schema.states} if body.has_final else None
    reward = schema[schema.reward].shape if schema.reward is not None else ()
    bootstrap = parts.take("<f4", *reward) if body.has_bootstrap else None
    parts.end()
    if not all(np.isfinite(facts[name]).all() for name in ("init_w", "priority", "born")):
        raise ProtocolError("container", "an episode with a weight, priority or time that cannot be")
    episode = dataset.Episode(
        columns=columns,
        **facts | {"learned": facts["learned"] != 0},
        multiplier=body.multiplier,
        terminated=body.terminated,
        is_cut=body.cut,
        final_state=states,
        bootstrap_value=None if body.terminated else bootstrap,
        update_value=body.update_value,
        update_weight=body.update_weight,
    )
    return KeptEpisode(body.owner, body.number, episode)


class _PackedArrays:
    """Arrays that lie one after the other in a payload."""

    def __init__(self, payload: bytes) -> None:
        self._payload, self._place = payload, 0

    def take(self, dtype: Any, *shape: int) -> NDArray[Any]:
        """The next one."""
        size = np.dtype(dtype).itemsize * math.prod(shape)
        if self._place + size > len(self._payload):
            raise ProtocolError("container", f"an episode needs {self._place + size} of {len(self._payload)} bytes")
        array = np.frombuffer(self._payload, dtype, math.prod(shape), self._place).reshape(shape)
        self._place += size
        return array if array.flags.aligned else array.copy()

    def column(self, column: Column, rows: int) -> Any:
        """The next `rows` values of a column."""
        if not column.is_ragged:
            return self.take(column.dtype, rows, *column.shape)
        lengths = self.take("<i8", rows)
        if (lengths < 0).any() or (lengths > len(self._payload)).any():
            raise ProtocolError("container", f"a ragged value of {lengths.max()} elements")
        return Ragged(self.take(column.dtype, int(lengths.sum()), *column.element), lengths)

    def end(self) -> None:
        if self._place != len(self._payload):
            raise ProtocolError("container", f"an episode has {self._place} of {len(self._payload)} bytes")
