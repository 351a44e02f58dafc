"""Fragments of rollouts: a queue that hands each entry out once, in order, and the messages to remote learners. Pure.

    a(512) b(512) c(512)      take 800 ──▶ a(512), b(288)         the rest: b(224), c(512)
                              newest model 9, max_model_lag 1     model 7 made c: c is stale, 512 entries

A take splits a fragment to be exact. The remainder stays first in the queue; the taken part ends in the state of the
remainder's first entry.

A ROLLOUTS message has a row for each fragment in its tail, and their containers behind each other:

    fragments   [client a, 512 entries] [client b, 288]         the ends of the episodes
    payload     EPISODE container ......|EPISODE container ..   each row has its container's size
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Final

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from memoire import _core
from memoire._core import setting
from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.replay.columns import Ragged
from memoire.replay.parameters import Parameters
from memoire.replay.rollouts import Fragment
from memoire.replay.schema import Schema
from memoire.replay.writing import Changes, adding_changes, put_changes
from memoire.tables.base import TakeRequest
from memoire.tables.episodes.memory import checked_episode
from memoire.wire import containers as pack
from memoire.wire import types
from memoire.wire.containers import unpacked_bytes
from memoire.wire.frames import Buffer
from memoire.wire.messages import Body, Count, EpisodePush, FragmentRow, Small, Word, body
from memoire.wire.parts import ALIGNMENT, HEAD, OF_EPISODE, ROW, Payload
from memoire.wire.receivers import ReplyPage

FRAGMENT_BYTES: Final = 3072
"""Memory overhead of a fragment in bytes."""


@dataclass(slots=True)
class RolloutCounts:
    """Numbers of entries since the queue's creation. Each received entry is either held or counted once here."""

    taken: int = 0
    stale: int = 0
    """Entries discarded at a take, because their model was too old."""
    overwritten: int = 0
    """Entries evicted to make room."""
    overwritten_fragments: int = 0
    split: int = 0
    """Fragments that a take has split in two."""


class RolloutQueue:
    """Queue of fragments, oldest first. Not thread-safe.

    Args:
        schema: Schema of an entry.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.counts = RolloutCounts()
        self.entries = 0
        self.bytes = 0
        """Bytes of the held fragments' arrays."""
        self._fragments: deque[Fragment] = deque()
        self._names: dict[tuple[bytes, int], int] = {}  # held fragments by client and number
        self._clients: dict[bytes, int] = {}  # held fragments by client
        self.newest_model = 0
        """Version of the newest model; 0 if no model was published."""
        self.until_publish = 0
        """Number of taken entries whose room is given back with the next model."""
        self.owed = 0
        """Number of entries whose room is given back, but not yet reported to clients."""
        self._newest_stale = (0, 0)  # newest version that was discarded last, and the newest model then

    def saw_model(self, version: int) -> None:
        """Record a new model version, and give back the room of takes that waited for it."""
        if version != self.newest_model:
            owed = self.owed + self.until_publish
            _core.at_once(setting(self, newest_model=version, owed=owed, until_publish=0))

    def __len__(self) -> int:
        return len(self._fragments)

    def __contains__(self, name: tuple[bytes, int]) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[Fragment]:
        return iter(self._fragments)

    def newest(self, most: int) -> list[Fragment]:
        """Return at most this many fragments, the newest first."""
        return list(islice(reversed(self._fragments), most))

    @property
    def clients(self) -> int:
        """Number of clients that recorded the held entries."""
        return len(self._clients)

    def add(self, fragment: Fragment, taken: int = 0) -> None:
        """Append a fragment to the queue.

        Args:
            taken: Number of its entries for which no room was granted, unlike a client's.
        """
        counted = self._counting((), [fragment]) + adding_changes(self, owed=-taken)
        _core.at_once([(self._fragments.append, (fragment,)), *counted])

    @property
    def held_bytes(self) -> int:
        """Bytes of all fragments in memory, with overhead."""
        return self.bytes + FRAGMENT_BYTES * len(self._fragments)

    def make_room(self, entries: int, byte_limit: int, most: int) -> int:
        """Evict the oldest fragments until the limits hold; return the number of evicted fragments.

        Args:
            entries: Maximum number of entries.
            byte_limit: Maximum bytes of the fragments' arrays.
            most: Maximum bytes in memory, with overhead.
        """
        dropped: list[Fragment] = []
        over, over_bytes, over_taken = self.entries - entries, self.bytes - byte_limit, self.held_bytes - most
        for fragment in self._fragments if max(over, over_bytes, over_taken) > 0 else ():
            dropped.append(fragment)
            size = bytes_of(fragment)
            over, over_bytes, over_taken = over - len(fragment), over_bytes - size, over_taken - size - FRAGMENT_BYTES
            if max(over, over_bytes, over_taken) <= 0:
                break
        if not dropped:
            return 0
        lost, counts = sum(map(len, dropped)), self.counts
        sums = {"overwritten": lost, "overwritten_fragments": len(dropped)}
        _core.at_once(self._leaving(dropped) + adding_changes(counts, **sums) + adding_changes(self, owed=lost))
        return len(dropped)

    def discard_stale(self, max_lag: int | None) -> None:
        """Discard fragments whose oldest entry's model is more than `max_lag` versions behind the newest model. Without
        any published model nothing is discarded.
        """
        if max_lag is None or self.newest_model == 0:
            return
        least = self.newest_model - max_lag
        stale = [fragment for fragment in self._fragments if fragment.oldest_model < least]
        if not stale:
            return
        kept = deque(fragment for fragment in self._fragments if fragment.oldest_model >= least)
        lost, newest = sum(map(len, stale)), max(fragment.oldest_model for fragment in stale)
        changes = setting(self, _fragments=kept, _newest_stale=(newest, self.newest_model))
        changes += adding_changes(self.counts, stale=lost) + adding_changes(self, owed=lost)
        _core.at_once(changes + self._counting(stale))

    def take(self, wanted: TakeRequest) -> list[Fragment]:
        """Remove and return the oldest fragments, or return nothing if there are too few entries or clients."""
        if self.entries < wanted.steps or (wanted.min_clients > 1 and self.clients < wanted.min_clients):
            return []
        return self._taken(wanted)

    def pack_for_learner(self, wanted: TakeRequest, least: int, fitting: Callable[[Fragment], int]) -> list[Fragment]:
        """Take for a remote learner, which repeats its request for more: as many entries as fit into a reply.
        Return nothing if fewer than `least` entries are held.

        Args:
            fitting: Function that returns how many first entries of the next fragment fit into the reply. If it raises,
                the queue is unchanged.
        """
        if self.entries < max(1, least):
            return []
        return self._taken(wanted, fitting)

    def _taken(self, wanted: TakeRequest, fitting: Callable[[Fragment], int] = len) -> list[Fragment]:
        """Remove and return the oldest fragments."""
        leaving: list[Fragment] = []
        taken: list[Fragment] = []
        stays: list[Fragment] = []
        missing = wanted.steps
        for fragment in self._fragments:
            if missing <= 0:
                break
            part, rest = fragment, None
            if wanted.exact and len(fragment) > missing:
                part, rest = fragment.split(missing, self.schema)
            room = fitting(part)
            if not room:
                break
            if room < len(part):
                part, rest = fragment.split(room, self.schema)
            leaving.append(fragment)
            taken.append(part)
            stays += [] if rest is None else [rest]
            missing = missing - len(part) if rest is None else 0
        count = sum(map(len, taken))
        changes = self._leaving(leaving, stays) + adding_changes(self.counts, taken=count, split=len(stays))
        _core.at_once(changes + adding_changes(self, **{"owed" if wanted.release == "now" else "until_publish": count}))
        return taken

    def clear(self) -> None:
        """Discard everything, and give back all room, including room that waits for a model."""
        owed = self.owed + self.entries + self.until_publish
        changes = [(each.clear, ()) for each in (self._fragments, self._names, self._clients)]
        _core.at_once([*changes, *setting(self, entries=0, bytes=0, until_publish=0, owed=owed)])

    def wait_reason(self, wanted: TakeRequest) -> str:
        """Return the reason why a take must wait, or "" if it need not wait."""
        clients, steps, min_clients = self.clients, wanted.steps, wanted.min_clients
        if self.entries >= steps:
            if clients >= min_clients:
                return ""
            part = f"{clients} of min_clients={min_clients}"
            return f"waiting for entries of {min_clients - clients} more clients ({part})"
        passed = ""
        if self._newest_stale[1]:
            version, newest = self._newest_stale
            passed = (
                f"; {self.counts.stale} stale entries were discarded (max_model_lag), the last of model {version} "
                f"when model {newest} was the newest"
            )
        held = f"{self.entries} of {steps} held, from {clients} clients"
        return f"waiting for {steps - self.entries} more entries ({held}){passed}"

    def _leaving(self, gone: Sequence[Fragment], stays: Sequence[Fragment] = ()) -> Changes:
        """Return the changes that remove the oldest fragments, except the remainder of the last fragment."""
        fragments = self._fragments
        changes: Changes = [(fragments.popleft, ())] * len(gone)
        changes += [(fragments.appendleft, (rest,)) for rest in stays]
        return changes + self._counting(gone, stays)

    def _counting(self, gone: Sequence[Fragment], came: Sequence[Fragment] = ()) -> Changes:
        """Return the changes that update the counts for removed and added fragments."""
        entries = size = 0
        names: dict[tuple[bytes, int], int] = {}
        clients: dict[bytes, int] = {}
        for sign, fragments in ((-1, gone), (1, came)):
            for each in fragments:
                entries, size = entries + sign * len(each), size + sign * bytes_of(each)
                name = each.client, each.number
                names[name] = names.get(name, self._names.get(name, 0)) + sign
                clients[each.client] = clients.get(each.client, self._clients.get(each.client, 0)) + sign
        changes = adding_changes(self, entries=entries, bytes=size)
        tables: tuple[tuple[dict[Any, int], dict[Any, int]], ...] = ((self._names, names), (self._clients, clients))
        for table, counts in tables:
            for key, count in counts.items():
                changes += put_changes(count, key, table) if count else [(table.pop, (key, None))]
        return changes


def bytes_of(fragment: Fragment) -> int:
    """Return the bytes of a fragment's arrays."""
    of = fragment.episode
    arrays = [*of.columns.values(), *(of.final_state or {}).values(), of.init_w, of.model_version, fragment.age]
    return sum(each.nbytes + each.lengths.nbytes if isinstance(each, Ragged) else each.nbytes for each in arrays)


_MOST_ENTRIES = 1 << 62  # the bytes of a message limit the entries


@body(types.TAKE)
class Take(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Request for the oldest entries of a table of rollouts, answered by ROLLOUTS. A resend has its sequence."""

    steps: Small = 0  # maximum number of entries; 0 only asks for the number of held ones
    least: Small = 0  # nothing is taken if fewer entries are held
    exact: bool = True  # True: the last fragment is split to return at most `steps`
    release: Annotated[str, Meta(max_length=16)] = "now"  # when room is given back: now, publish
    wanted: Small = 0  # entries that the reader waits for here


@body(types.ROLLOUTS)
class RolloutsReply(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Taken entries, as containers of kind EPISODE one after the other, and the number of entries that remain."""

    epoch: Word = 0
    fragments: Annotated[list[FragmentRow], Meta(max_length=65536)] = []  # fragments in order of arrival
    held: Count = 0  # entries
    clients: Count = 0  # clients that recorded the entries
    capacity: Count = 0  # maximum number of entries
    finished: bool = False


def packed(
    fragments: Sequence[Fragment], schema: Schema, *, now: float, wall: float
) -> tuple[list[FragmentRow], Payload | None]:
    """Return rows and payload of a ROLLOUTS message with these fragments; the payload is None without fragments.

    Args:
        now: Time on the clock of the fragments' arrival.
        wall: Seconds since 1970.
    """
    containers = [_container(each, schema, now, wall) for each in fragments]
    rows = [_row(each, container.nbytes) for each, container in zip(fragments, containers, strict=True)]
    return rows, np.concatenate(containers) if containers else None


def add_fitting_entries(page: ReplyPage, fragment: Fragment, schema: Schema) -> int:
    """Return how many first entries of the next fragment fit into a reply, and add them to the reply's page. The number
    is below the fragment's length only for a first fragment that is too large for any reply.

    Raises:
        ProtocolError: (code "too_large") not one entry fits into a reply to this learner.
    """
    if not page.is_empty or _size(fragment, schema) <= page.most_payload:
        return len(fragment) if _takes(page, fragment, schema) else 0
    entries, ends = _bytes_of_entries(fragment, schema)
    sizes = np.cumsum(entries)[1:-1] + ends[1:-1] + _overhead(schema)  # sizes of the first 2, 3, ... entries
    room = (sizes <= page.payload_room).nonzero()[0]
    count = 2 + int(room[-1]) if len(room) else 1
    _takes(page, fragment if len(fragment) == 1 else fragment.split(count, schema)[0], schema)
    return count


def _takes(page: ReplyPage, fragment: Fragment, schema: Schema) -> bool:
    size = _size(fragment, schema)
    return page.count_row(f"a fragment of {len(fragment)} entries", _row(fragment, size), size)


def _size(fragment: Fragment, schema: Schema) -> int:
    """Return the maximum bytes of a fragment's container: arrays, head, and a table row and a gap for each block."""
    return bytes_of(fragment) + _overhead(schema)


def _overhead(schema: Schema) -> int:
    return HEAD.size + (ROW.size + ALIGNMENT) * (3 * len(schema.names) + len(OF_EPISODE))


def _bytes_of_entries(fragment: Fragment, schema: Schema) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return [T] bytes of each entry, and [T] of the state behind it, which ends a fragment that is split there."""
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
    """Raise ProtocolError for a fragment with an entry that fits into no reply.

    Args:
        most: Maximum bytes of a reply's payload.

    Raises:
        ProtocolError: (code "too_large") an entry with the following state takes more.
    """
    if 2 * _size(fragment, schema) <= most:
        return
    entries, ends = _bytes_of_entries(fragment, schema)
    size = _overhead(schema) + int((entries + ends).max())
    if size > most:
        text = (
            f"an entry and its next state take {size} bytes; a remote learner receives at most {most} (message_bytes)"
        )
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
    """Return the fragments of a received ROLLOUTS message, completely checked. Arrays may be views of the payload.

    Args:
        now: Time of arrival, on the clock of the fragments' owner.

    Raises:
        ProtocolError: the message is invalid. No other error is raised, whatever the bytes.
    """
    parts = _parts(rows, payload)
    return [_fragment(row, part, schema, now, limits) for row, part in zip(rows, parts, strict=True)]


def unpacked_size(rows: Sequence[FragmentRow], payload: Buffer | None) -> int:
    """Return the bytes of the fragments of a received message after unpacking, by the containers' tables.

    Raises:
        ProtocolError: the payload is shorter than the rows state.
    """
    return sum(map(unpacked_bytes, _parts(rows, payload)))


def _parts(rows: Sequence[FragmentRow], payload: Buffer | None) -> list[memoryview]:
    data = memoryview(b"" if payload is None else payload).cast("B")
    sizes = [row.bytes for row in rows]
    if sum(sizes) != len(data):
        raise ProtocolError(
            "container", f"the rows describe {sum(sizes)} bytes of fragments, but the payload has {len(data)}"
        )
    ends = np.cumsum([0, *sizes]).tolist()
    return [data[begin:end] for begin, end in itertools.pairwise(ends)]


def _fragment(row: FragmentRow, part: memoryview, schema: Schema, now: float, limits: Limits) -> Fragment:
    body = EpisodePush(has_final=row.has_final, terminated=row.terminated, cut=row.cut, bootstrap=row.bootstrap)
    checked = checked_episode(body, part, schema, Parameters(), _MOST_ENTRIES, limits=limits, checksum=None)
    return Fragment(row.client, row.number, checked.episode, checked.age, now)
