"""Fragments of rollouts on their way to a learner far away: a row for each in the tail, and their containers behind
each other.

    fragments   [client a, 512 entries] [client b, 288]         rows say how each one ended
    payload     EPISODE container ......|EPISODE container ..   a row says how many bytes are its own
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.replay.columns import Ragged
from memoire.replay.parameters import Parameters
from memoire.replay.rollouts import Fragment
from memoire.replay.schema import Schema
from memoire.tables.episodes.memory import checked_episode
from memoire.wire import containers as pack
from memoire.wire import types
from memoire.wire.containers import unpacked_bytes
from memoire.wire.frames import Buffer
from memoire.wire.messages import Body, Count, Episode, FragmentRow, Small, Word, body
from memoire.wire.parts import ALIGNMENT, HEAD, OF_EPISODE, ROW, Payload
from memoire.wire.receivers import Page

from .queue import bytes_of

_MOST_ENTRIES = 1 << 62  # how many there may be is for their bytes to say


@body(types.TAKE)
class Take(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Takes the oldest entries of a table of rollouts; answered by ROLLOUTS. A resend has its sequence."""

    steps: Small = 0  # most entries; 0 only asks what is held
    least: Small = 0  # nothing is taken while fewer are held
    exact: bool = True  # the last fragment is split, so that there are no more than `steps`
    release: Annotated[str, Meta(max_length=16)] = "now"  # when room is given back: now, publish
    wanted: Small = 0  # entries that the reader waits for here


@body(types.ROLLOUTS)
class Rollouts(Body, frozen=True, kw_only=True, omit_defaults=True):
    """What was taken, containers of kind EPISODE one after the other, and what is held after it."""

    epoch: Word = 0
    fragments: Annotated[list[FragmentRow], Meta(max_length=65536)] = []  # in order of arrival
    held: Count = 0  # entries
    clients: Count = 0  # that recorded them
    capacity: Count = 0  # entries that there is room for
    finished: bool = False


def packed(
    fragments: Sequence[Fragment], schema: Schema, *, now: float, wall: float
) -> tuple[list[FragmentRow], Payload | None]:
    """Fragments as rows and payload of a ROLLOUTS message; no payload where there are none.

    Args:
        now: By the clock of their arrival.
        wall: Seconds since 1970.
    """
    containers = [_container(each, schema, now, wall) for each in fragments]
    rows = [_row(each, container.nbytes) for each, container in zip(fragments, containers, strict=True)]
    return rows, np.concatenate(containers) if containers else None


def fitting(page: Page, fragment: Fragment, schema: Schema) -> int:
    """How many of the first entries of one more fragment a reply has room for; they are on its page then. Fewer than
    all only of the first fragment, if it fits into no reply as a whole.

    Raises:
        ProtocolError: (code "too_large") not one entry fits into a reply to this learner.
    """
    if not page.is_empty or _size(fragment, schema) <= page.most_payload:
        return len(fragment) if _takes(page, fragment, schema) else 0
    entries, ends = _bytes_of_entries(fragment, schema)
    sizes = np.cumsum(entries)[1:-1] + ends[1:-1] + _overhead(schema)  # of the first 2, 3, ... entries
    room = (sizes <= page.payload_room).nonzero()[0]
    count = 2 + int(room[-1]) if len(room) else 1
    _takes(page, fragment if len(fragment) == 1 else fragment.split(count, schema)[0], schema)
    return count


def _takes(page: Page, fragment: Fragment, schema: Schema) -> bool:
    size = _size(fragment, schema)
    return page.takes(f"a fragment of {len(fragment)} entries", _row(fragment, size), size)


def _size(fragment: Fragment, schema: Schema) -> int:
    """Bytes of a fragment's container at most: arrays, head, and of each block a row of the table and a gap."""
    return bytes_of(fragment) + _overhead(schema)


def _overhead(schema: Schema) -> int:
    return HEAD.size + (ROW.size + ALIGNMENT) * (3 * len(schema.names) + len(OF_EPISODE))


def _bytes_of_entries(fragment: Fragment, schema: Schema) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[T] bytes of each entry, and [T] of the state behind it, which ends a fragment that is split there."""
    of = fragment.episode
    plain = sum(array.itemsize for array in (of.init_w, of.model_version, fragment.age))
    entries, states = np.full(len(fragment), plain, np.int64), np.zeros(len(fragment), np.int64)
    for name, column in of.columns.items():
        if isinstance(column, Ragged):
            sizes = column.lengths * (column.values.itemsize * math.prod(column.values.shape[1:]))
            entries += sizes + column.lengths.itemsize
        else:
            sizes = np.full(len(fragment), column.nbytes // len(fragment), np.int64)
            entries += sizes
        if name in schema.states:
            states += sizes
    last = sum(array.nbytes for array in (of.final_state or {}).values())
    return entries, np.append(states[1:], last)


def check_entries(fragment: Fragment, schema: Schema, most: int) -> None:
    """Refuse a fragment of which no reply could have one entry, before it is held.

    Args:
        most: Bytes of such a reply's payload.

    Raises:
        ProtocolError: (code "too_large") with the state behind it, an entry takes more.
    """
    if 2 * _size(fragment, schema) <= most:
        return
    entries, ends = _bytes_of_entries(fragment, schema)
    size = _overhead(schema) + int((entries + ends).max())
    if size > most:
        text = f"an entry takes {size} bytes with the state behind it; a learner far away takes {most} (message_bytes)"
        raise ProtocolError("too_large", text)


def _container(fragment: Fragment, schema: Schema, now: float, wall: float) -> Payload:
    episode = fragment.episode

    def fill(name: str, target: Payload) -> None:
        column = episode.columns[name]
        values: NDArray[np.generic] = column.values if isinstance(column, Ragged) else column
        target[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    age = fragment.age + np.float32(max(0.0, now - fragment.arrived))
    lengths = {name: episode.columns[name].lengths for name in schema.ragged}
    facts = episode.init_w, age, episode.model_version, lengths
    return pack.pack_episode(schema, fill, *facts, final=episode.final_state, now=wall)


def _row(fragment: Fragment, size: int) -> FragmentRow:
    episode = fragment.episode
    value = episode.bootstrap_value
    return FragmentRow(
        client=fragment.client,
        number=fragment.number,
        bytes=size,
        has_final=episode.final_state is not None,
        terminated=episode.terminated,
        cut=episode.is_cut,
        bootstrap=None if value is None else np.asarray(value, np.float64).reshape(-1).tolist(),
    )


def unpacked(
    rows: Sequence[FragmentRow], payload: Buffer | None, schema: Schema, *, now: float, limits: Limits
) -> list[Fragment]:
    """The fragments of a received ROLLOUTS message, completely checked. Their arrays may lie in the payload.

    Args:
        now: When it came, by the clock of whoever holds them.

    Raises:
        ProtocolError: and nothing else, whatever the bytes.
    """
    parts = _parts(rows, payload)
    return [_fragment(row, part, schema, now, limits) for row, part in zip(rows, parts, strict=True)]


def unpacked_size(rows: Sequence[FragmentRow], payload: Buffer | None) -> int:
    """Bytes that the fragments of a received message take when they are unpacked, as their tables say.

    Raises:
        ProtocolError: the payload does not have them.
    """
    return sum(map(unpacked_bytes, _parts(rows, payload)))


def _parts(rows: Sequence[FragmentRow], payload: Buffer | None) -> list[memoryview]:
    data = memoryview(b"" if payload is None else payload).cast("B")
    sizes = [row.bytes for row in rows]
    if sum(sizes) != len(data):
        raise ProtocolError("container", f"fragments of {sum(sizes)} bytes in a payload of {len(data)}")
    ends = np.cumsum([0, *sizes]).tolist()
    return [data[begin:end] for begin, end in itertools.pairwise(ends)]


def _fragment(row: FragmentRow, part: memoryview, schema: Schema, now: float, limits: Limits) -> Fragment:
    said = Episode(has_final=row.has_final, terminated=row.terminated, cut=row.cut, bootstrap=row.bootstrap)
    checked = checked_episode(said, part, schema, Parameters(), _MOST_ENTRIES, limits=limits, checksum=None)
    return Fragment(row.client, row.number, checked.episode, checked.age, now)
