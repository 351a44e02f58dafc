"""An episode as the payload of a snapshot's record, and back: its arrays, one after the other.

facts of its entries | columns | final state | bootstrap value        of a ragged column its lengths come first

The same of where all of them lie in their memory: `pack_layout` and `TakenTable`.
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
from memoire.replay.memory_state import LAYOUT, OWN, RowLayout, SavedLayout, TakingOver
from memoire.replay.schema import Schema
from memoire.tables.base import (
    Count,
    HasLayout,
    Identity,
    Moment,
    Number,
    PutBack,
    RecordBody,
    RecordKind,
    SavedRecord,
    Weight,
)


class EpisodeRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """An episode; the payload is its arrays, one after the other (see `pack`)."""

    kind: ClassVar = RecordKind.EPISODE
    has_payload: ClassVar = True
    owner: Identity
    number: Number
    """Of its first entry under that owner: the two name it."""
    length: Count
    closed: Moment = 0.0
    """When its last entry was made, in seconds since 1970: what brings episodes of several files into one order."""
    multiplier: Weight = 1.0
    terminated: bool | None = None
    cut: bool = False
    """Of rollouts: the episode goes on in another fragment."""
    has_final: bool = False
    has_bootstrap: bool = False
    update_value: bool = True
    update_weight: bool = True

    @property
    def time(self) -> float:
        """Episodes of several files come back in the order in which they were closed: that is how they leave again."""
        return self.closed

    def counted(self, payload_bytes: int) -> dict[str, int]:
        """One more episode, and its entries."""
        return {"episodes": 1, "entries": self.length, "bytes": payload_bytes}

    def belongs_to(self, heading: RecordBody | None) -> bytes:
        """By its name."""
        return self.owner + self.number.to_bytes(8, "little", signed=True)

    def called(self, heading: RecordBody | None) -> str:
        """An episode of a memory."""
        return f"episode {self.number} of memory {self.owner.hex()}"


def pack(kept: KeptEpisode, schema: Schema) -> tuple[EpisodeRecord, bytes]:
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
    return body, b"".join(map(_bytes_of, parts))


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


def put_back(record: SavedRecord, schema: Schema, put: Callable[[KeptEpisode], tuple[bool, int]]) -> PutBack:
    """Put an episode of a snapshot back by `put`, which says whether it is new, and what made room for it.

    Raises:
        ProtocolError: (code "container") it is none of this schema.
    """
    if not isinstance(record.body, EpisodeRecord):
        raise ProtocolError("container", "a record of a kind that is not known here")
    kept = unpack(record.body, record.payload, schema)
    if record.is_remade:  # without the priorities that follow from closing it
        episode = kept.episode
        assert episode.priority is not None
        priority = np.where(episode.learned, episode.priority, np.float32(np.nan))
        kept = kept._replace(episode=dataclasses.replace(episode, priority=priority))
    is_new, overwritten = put(kept)
    return PutBack(is_new, overwritten, {"episodes": 1, "entries": record.body.length})


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


def pack_layout(layout: SavedLayout) -> tuple[dict[str, Any], bytes]:
    """Where a memory's episodes lie: fields of a `TableRecord`, and its payload."""
    parts = {name: _bytes_of(array) for name, array in layout.arrays.items()}
    sizes = {name: len(part) for name, part in parts.items()}
    return {"memory": json.dumps(layout.numbers), "arrays": sizes}, b"".join(parts.values())


def _unpack_layout(body: HasLayout, payload: bytes, wrong: Callable[[str], Exception]) -> SavedLayout:
    """The other way. Raises what `wrong` makes, and what NumPy and JSON raise."""
    place, arrays = 0, {}
    for name, size in body.arrays.items():
        part = payload[place : place + size]
        arrays[name], place = np.frombuffer(part, LAYOUT[name]), place + size
    if arrays.keys() != LAYOUT.keys() or place != len(payload):
        raise wrong(f"has {place} of {len(payload)} bytes, and arrays {', '.join(arrays)}")
    return SavedLayout(json.loads(body.memory), arrays)


class TakenTable:
    """A memory of a file on its way into a pool: each episode comes where it lay, and can be drawn as it could.

    Args:
        heir: Makes an empty memory that fits, and says what it is to take over; None if what was saved does not fit.
        body, payload: What the file says of where entries lie.
        wrong: Makes the error to raise, of what is wrong.

    Raises:
        What `wrong` makes: the file says of its entries what cannot be.
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
        """None: it does not fit this pool."""
        self.names: dict[int, tuple[bytes, int]] = {}
        """The former name of each episode, owner and number, by the number of its first entry."""
        self.entries = 0
        try:
            if (fitting := heir(_unpack_layout(body, payload, wrong))) is not None:
                self.memory, layout = fitting
                self._begin(layout)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
            if isinstance(error, MemoireError):
                raise
            raise wrong(f"says of its entries what cannot be: {error}") from error

    def _begin(self, layout: SavedLayout) -> None:
        assert self.memory is not None
        numbers, arrays = layout
        self._slots, self._length = arrays["slots"], arrays["episodes"]["length"]
        size = math.prod(self._schema.reward_shape)
        lengths = self._length[self._slots]
        rows = RowLayout(numbers, arrays, lengths, size, self._wrong)
        self._taking = TakingOver(self.memory, rows, numbers, arrays)
        self._rows, every = rows.rows, np.sort(np.concatenate([np.empty(0, np.int64), *rows.rows]))
        if not len(arrays["number"]) == len(arrays["weight"]) == len(every):
            raise self._wrong(f"has {len(arrays['number'])} numbers of {len(every)} entries")
        self._number, self._weight = np.empty(rows.capacity, np.int64), np.empty(rows.capacity)
        self._number[every], self._weight[every] = arrays["number"], arrays["weight"]

    def put(self, body: RecordBody, payload: bytes) -> None:
        """Put the next episode into its place. Raises what `wrong` makes: also if it cannot be one."""
        if not isinstance(body, EpisodeRecord) or self.memory is None:
            return
        try:
            self._put(body, payload)
        except ProtocolError as error:
            raise self._wrong(f"has an episode that cannot be: {error}") from error

    def _put(self, body: EpisodeRecord, payload: bytes) -> None:
        kept, place = unpack(body, payload, self._schema), len(self.names)
        if place == len(self._slots) or self._length[self._slots[place]] != body.length:
            raise self._wrong(f"has an episode of {body.length} entries that lies nowhere")
        own = self._rows[place]
        facts = {name: getattr(kept.episode, name) for name in dataset.FACTS}
        facts |= {"number": self._number[own], "weight": self._weight[own]}
        rows = {OWN + name: values for name, values in facts.items()} | kept.episode.columns
        versions = kept.episode.model_version
        is_sound = bool((kept.episode.init_w >= 0).all() and (versions >= 0).all() and (versions >> 53 == 0).all())
        if (
            not is_sound
            or facts["number"][0] != body.number
            or dataset.not_finite(self._schema, kept.episode.columns, kept.episode.final_state)
        ):
            raise self._wrong("has a value, weight or number of an entry that cannot be")
        if not self._taking.put(place, rows, kept.episode.final_state):
            raise self._wrong("has a number or weight of an entry that cannot be")
        self.names[body.number] = body.owner, body.number
        self.entries += body.length

    def finish(self) -> bool:
        """Let the entries be drawn; False if episodes are missing."""
        if self.memory is None or len(self.names) != len(self._slots):
            return False
        self._taking.finish()
        return True
