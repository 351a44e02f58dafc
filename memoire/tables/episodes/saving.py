"""Snapshot format of episodes: the arrays of an episode one after the other, and the layout of a memory.

facts of its entries | columns | final state | bootstrap value        lengths of a ragged column precede its elements

`pack_layout` and `RestoredEpisodes` save and restore the places of episodes in their memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from memoire.errors import MemoireError, ProtocolError
from memoire.replay import dataset
from memoire.replay.columns import Column, Ragged
from memoire.replay.dataset import KeptEpisode
from memoire.replay.memory import Memory
from memoire.replay.memory_state import LAYOUT, OWN, MemoryRestoration, RowLayout, SavedLayout
from memoire.replay.schema import Schema
from memoire.tables.base import (
    Count,
    HasLayout,
    Identity,
    Moment,
    Number,
    RecordBody,
    RecordKind,
    RestoreOutcome,
    SavedRecord,
    Weight,
)


class EpisodeRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """Snapshot record of an episode; the payload has the episode's arrays, one after the other (see `pack`)."""

    kind: ClassVar = RecordKind.EPISODE
    has_payload: ClassVar = True
    owner: Identity
    number: Number
    """Number of the first entry; with `owner`, the identity of the episode."""
    length: Count
    closed: Moment = 0.0
    """Creation time of the last entry in seconds since 1970, by which episodes of several files are ordered."""
    multiplier: Weight = 1.0
    terminated: bool | None = None
    cut: bool = False
    """True if the episode continues in another fragment (rollouts only)."""
    has_final: bool = False
    has_bootstrap: bool = False
    update_value: bool = True
    update_weight: bool = True

    @property
    def time(self) -> float:
        """Sort key: episodes of several files are restored, and later evicted, in the order of their closing."""
        return self.closed

    def count_contribution(self, payload_bytes: int) -> dict[str, int]:
        """Return the contribution of the episode and its entries to the file's counts."""
        return {"episodes": 1, "entries": self.length, "bytes": payload_bytes}

    def routing_key(self, heading: RecordBody | None) -> bytes:
        """Return the episode's identity, which selects a server."""
        return self.owner + self.number.to_bytes(8, "little", signed=True)

    def description(self, heading: RecordBody | None) -> str:
        """Return the description of the episode for error messages."""
        return f"episode {self.number} of memory {self.owner.hex()}"


def pack(kept: KeptEpisode, schema: Schema) -> tuple[EpisodeRecord, bytes]:
    """Return record and payload of an episode: facts of entries, columns, final state and bootstrap value in sequence.
    Lengths of a ragged column precede its elements.
    """
    episode = kept.episode
    assert episode.born is not None, "a memory knows the time of each entry"
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
    return body, b"".join(map(_bytes_of, parts))


def _bytes_of(part: NDArray[Any] | Ragged) -> bytes:
    if isinstance(part, Ragged):
        return part.lengths.astype("<i8").tobytes() + np.ascontiguousarray(part.values).tobytes()
    return np.ascontiguousarray(part).tobytes()


def unpack(body: EpisodeRecord, payload: bytes, schema: Schema) -> KeptEpisode:
    """Return the episode of a record. Arrays are views of the payload if their alignment allows.

    Raises:
        ProtocolError: (code "container") the record is no episode of this schema.
    """
    if not 1 <= body.length <= len(payload) or not 0.0 <= body.multiplier < math.inf:
        raise ProtocolError("container", f"the record has {body.length} entries in {len(payload)} bytes")
    parts = _PackedArrays(payload)
    facts = {name: parts.take(dtype, body.length) for name, dtype in dataset.FACTS.items()}
    columns = {name: parts.column(column, body.length) for name, column in schema.items()}
    states = {name: parts.column(schema[name], 1)[0] for name in schema.states} if body.has_final else None
    reward = schema[schema.reward].shape if schema.reward is not None else ()
    bootstrap = parts.take("<f4", *reward) if body.has_bootstrap else None
    parts.end()
    if not all(np.isfinite(facts[name]).all() for name in ("init_w", "priority", "born")):
        raise ProtocolError("container", "the episode has an entry with an invalid weight, priority or time")
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


def put_back(record: SavedRecord, schema: Schema, put: Callable[[KeptEpisode], tuple[bool, int]]) -> RestoreOutcome:
    """Restore an episode of a snapshot by `put`, which returns (is new, number of evicted episodes).

    Raises:
        ProtocolError: (code "container") the record is no episode of this schema.
    """
    if not isinstance(record.body, EpisodeRecord):
        raise ProtocolError("container", "the record is not of an episode")
    kept = unpack(record.body, record.payload, schema)
    if record.is_remade:  # the record has no priorities
        episode = kept.episode
        assert episode.priority is not None
        priority = np.where(episode.learned, episode.priority, np.float32(np.nan))
        kept = kept._replace(episode=dataclasses.replace(episode, priority=priority))
    is_new, overwritten = put(kept)
    return RestoreOutcome(is_new, overwritten, {"episodes": 1, "entries": record.body.length})


class _PackedArrays:
    """Reader of consecutive arrays in a payload."""

    def __init__(self, payload: bytes) -> None:
        self._payload, self._place = payload, 0

    def take(self, dtype: Any, *shape: int) -> NDArray[Any]:
        """Return the next array of this dtype and shape."""
        size = np.dtype(dtype).itemsize * math.prod(shape)
        if self._place + size > len(self._payload):
            raise ProtocolError(
                "container", f"the episode needs {self._place + size} bytes; the record has {len(self._payload)}"
            )
        array = np.frombuffer(self._payload, dtype, math.prod(shape), self._place).reshape(shape)
        self._place += size
        return array if array.flags.aligned else array.copy()

    def column(self, column: Column, rows: int) -> Any:
        """Return the next `rows` values of a column."""
        if not column.is_ragged:
            return self.take(column.dtype, rows, *column.shape)
        lengths = self.take("<i8", rows)
        if (lengths < 0).any() or (lengths > len(self._payload)).any():
            raise ProtocolError("container", f"a ragged value has {lengths.max()} elements")
        return Ragged(self.take(column.dtype, int(lengths.sum()), *column.element), lengths)

    def end(self) -> None:
        if self._place != len(self._payload):
            raise ProtocolError(
                "container", f"the episode takes {self._place} bytes; the record has {len(self._payload)}"
            )


def pack_layout(layout: SavedLayout) -> tuple[dict[str, Any], bytes]:
    """Return the layout of a memory's episodes: fields of a `TableRecord`, and its payload."""
    parts = {name: _bytes_of(array) for name, array in layout.arrays.items()}
    sizes = {name: len(part) for name, part in parts.items()}
    return {"memory": json.dumps(layout.numbers), "arrays": sizes}, b"".join(parts.values())


def _unpack_layout(body: HasLayout, payload: bytes, wrong: Callable[[str], Exception]) -> SavedLayout:
    """Return the layout from `pack_layout`. Raise exceptions of `wrong`, and those of NumPy and JSON."""
    place, arrays = 0, {}
    for name, size in body.arrays.items():
        part = payload[place : place + size]
        arrays[name], place = np.frombuffer(part, LAYOUT[name]), place + size
    if arrays.keys() != LAYOUT.keys() or place != len(payload):
        raise wrong(f"has a layout of {place} bytes in {len(payload)}, with arrays {', '.join(arrays)}")
    return SavedLayout(json.loads(body.memory), arrays)


class RestoredEpisodes:
    """Memory that is being restored from a file: each episode returns to its former place and can be drawn as before.

    Args:
        heir: Function that returns an empty memory that fits, and the layout to restore; None if the layout does not
            fit.
        body, payload: Saved layout of the entries.
        wrong: Function that makes the exception to raise from a description of the damage.

    Raises:
        An exception of `wrong`: the saved layout is invalid.
    """

    def __init__(
        self,
        heir: Callable[[SavedLayout], tuple[Memory, SavedLayout] | None],
        schema: Schema,
        body: HasLayout,
        payload: bytes,
        wrong: Callable[[str], Exception],
    ) -> None:
        self._schema, self._wrong = schema, wrong
        self.memory: Memory | None = None
        """The restored memory; None if the saved layout does not fit the pool."""
        self.names: dict[int, tuple[bytes, int]] = {}
        """Former owner and number of each episode, by the number of the episode's first entry."""
        self.entries = 0
        try:
            if (fitting := heir(_unpack_layout(body, payload, wrong))) is not None:
                self.memory, layout = fitting
                self._begin(layout)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
            if isinstance(error, MemoireError):
                raise
            raise wrong(f"has an invalid layout of entries: {error}") from error

    def _begin(self, layout: SavedLayout) -> None:
        assert self.memory is not None
        numbers, arrays = layout
        self._slots, self._length = arrays["slots"], arrays["episodes"]["length"]
        size = math.prod(self._schema.reward_shape)
        lengths = self._length[self._slots]
        rows = RowLayout(numbers, arrays, lengths, size, self._wrong)
        self._taking = MemoryRestoration(self.memory, rows, numbers, arrays)
        self._rows, every = rows.rows, np.sort(np.concatenate([np.empty(0, np.int64), *rows.rows]))
        if not len(arrays["number"]) == len(arrays["weight"]) == len(every):
            raise self._wrong(f"has numbers for {len(arrays['number'])} of {len(every)} entries")
        self._number, self._weight = np.empty(rows.capacity, np.int64), np.empty(rows.capacity)
        self._number[every], self._weight[every] = arrays["number"], arrays["weight"]

    def put(self, body: RecordBody, payload: bytes) -> None:
        """Restore the next episode in its place. Raise an exception of `wrong` if that fails."""
        if not isinstance(body, EpisodeRecord) or self.memory is None:
            return
        try:
            self._put(body, payload)
        except ProtocolError as error:
            raise self._wrong(f"has an invalid episode: {error}") from error

    def _put(self, body: EpisodeRecord, payload: bytes) -> None:
        kept, place = unpack(body, payload, self._schema), len(self.names)
        if place == len(self._slots) or self._length[self._slots[place]] != body.length:
            raise self._wrong(f"has an episode of {body.length} entries without a place")
        places = self._rows[place]
        facts = {name: getattr(kept.episode, name) for name in dataset.FACTS}
        facts |= {"number": self._number[places], "weight": self._weight[places]}
        rows = {OWN + name: values for name, values in facts.items()} | kept.episode.columns
        versions = kept.episode.model_version
        is_sound = bool((kept.episode.init_w >= 0).all() and (versions >= 0).all() and (versions >> 53 == 0).all())
        if (
            not is_sound
            or facts["number"][0] != body.number
            or dataset.first_nonfinite_column(self._schema, kept.episode.columns, kept.episode.final_state)
        ):
            raise self._wrong("has an entry with an invalid value, weight or number")
        if not self._taking.put(place, rows, kept.episode.final_state):
            raise self._wrong("has an entry with an invalid number or weight")
        self.names[body.number] = body.owner, body.number
        self.entries += body.length

    def finish(self) -> bool:
        """Make the entries drawable; return False if episodes are missing."""
        if self.memory is None or len(self.names) != len(self._slots):
            return False
        self._taking.finish()
        return True
