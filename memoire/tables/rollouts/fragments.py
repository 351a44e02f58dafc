"""Fragments of rollouts: in order of arrival, each entry handed out once, and on their way to a learner far away. Pure.

    a(512) b(512) c(512)      take 800 ──▶ a(512), b(288)         what is left: b(224), c(512)
                              newest model 9, max_model_lag 1     c was made by model 7: passed over, 512 entries

A fragment is split where that makes a take exact; the rest stays first, and its head ends in the state of the rest's
first entry.

A ROLLOUTS message has a row for each fragment in its tail, and their containers behind each other:

    fragments   [client a, 512 entries] [client b, 288]         rows say how each one ended
    payload     EPISODE container ......|EPISODE container ..   a row says how many bytes are its own

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
from memoire.replay.writing import Changes, adding, putting
from memoire.tables.base import TakeRequest
from memoire.tables.episodes.memory import checked_episode
from memoire.wire import containers as pack
from memoire.wire import types
from memoire.wire.containers import unpacked_bytes
from memoire.wire.frames import Buffer
from memoire.wire.messages import Body, Count, Episode, FragmentRow, Small, Word, body
from memoire.wire.parts import ALIGNMENT, HEAD, OF_EPISODE, ROW, Payload
from memoire.wire.receivers import Page

FRAGMENT_BYTES: Final = 3072
"""What a fragment takes in memory beside its arrays."""


@dataclass(slots=True)
class RolloutCounts:
    """What became of entries, since the queue was made. Of all that came, each is held, or counted once here."""

    taken: int = 0
    stale: int = 0
    """Passed over at a take: their model was too old."""
    overwritten: int = 0
    """Dropped for want of room."""
    overwritten_fragments: int = 0
    split: int = 0
    """Fragments that a take has split."""


class RolloutQueue:
    """Holds fragments, oldest first. Not thread-safe.

    Args:
        schema: What an entry is.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.counts = RolloutCounts()
        self.entries = 0
        """Held."""
        self.bytes = 0
        """Of their arrays."""
        self._fragments: deque[Fragment] = deque()
        self._names: dict[tuple[bytes, int], int] = {}  # fragments of each client and number that are held
        self._clients: dict[bytes, int] = {}  # fragments of each client that are held
        self.newest_model = 0
        """Its version; 0: none was published."""
        self.until_publish = 0
        """Entries that were taken, and whose room is given back with the next model."""
        self.owed = 0
        """Entries whose room is given back, and of which clients are still to be told."""
        self._newest_stale = (0, 0)  # the newest version that was passed over last, and the newest model then

    def saw_model(self, version: int) -> None:
        """There is a model of this version: takes that waited for it give their room back."""
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
        """At most so many fragments, the newest first."""
        return list(islice(reversed(self._fragments), most))

    @property
    def clients(self) -> int:
        """Clients that have recorded what is held."""
        return len(self._clients)

    def add(self, fragment: Fragment, taken: int = 0) -> None:
        """Hold one more, behind all others.

        Args:
            taken: Entries of it whose room was not taken before, as a client's is.
        """
        counted = self._counting((), [fragment]) + adding(self, owed=-taken)
        _core.at_once([(self._fragments.append, (fragment,)), *counted])

    @property
    def taken(self) -> int:
        """Bytes that all fragments take in memory."""
        return self.bytes + FRAGMENT_BYTES * len(self._fragments)

    def make_room(self, entries: int, byte_limit: int, most: int) -> int:
        """Drop the oldest fragments until at most so many entries and bytes are held; returns how many.

        Args:
            byte_limit: Of their arrays.
            most: Bytes that they may take in memory.
        """
        dropped: list[Fragment] = []
        over, over_bytes, over_taken = self.entries - entries, self.bytes - byte_limit, self.taken - most
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
        _core.at_once(self._leaving(dropped) + adding(counts, **sums) + adding(self, owed=lost))
        return len(dropped)

    def pass_over(self, max_lag: int | None) -> None:
        """Drop what is further behind the newest model than that, by each fragment's oldest entry. Nothing is dropped
        where no model was published.
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
        changes += adding(self.counts, stale=lost) + adding(self, owed=lost)
        _core.at_once(changes + self._counting(stale))

    def take(self, wanted: TakeRequest) -> list[Fragment]:
        """The oldest fragments, which are not held from now on, or none while there are too few."""
        if self.entries < wanted.steps or (wanted.min_clients > 1 and self.clients < wanted.min_clients):
            return []
        return self._taken(wanted)

    def give(self, wanted: TakeRequest, least: int, fitting: Callable[[Fragment], int]) -> list[Fragment]:
        """The same for a learner far away, who comes again for the rest: as many as are there, and as the reply has
        room for; none while fewer than `least` entries are held.

        Args:
            fitting: How many of the first entries of a further fragment the reply has room for. What it raises leaves
                everything here.
        """
        if self.entries < max(1, least):
            return []
        return self._taken(wanted, fitting)

    def _taken(self, wanted: TakeRequest, fitting: Callable[[Fragment], int] = len) -> list[Fragment]:
        """The oldest fragments, which leave at once."""
        gone: list[Fragment] = []
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
            gone.append(fragment)
            taken.append(part)
            stays += [] if rest is None else [rest]
            missing = missing - len(part) if rest is None else 0
        count = sum(map(len, taken))
        changes = self._leaving(gone, stays) + adding(self.counts, taken=count, split=len(stays))
        _core.at_once(changes + adding(self, **{"owed" if wanted.release == "now" else "until_publish": count}))
        return taken

    def clear(self) -> None:
        """Let everything go, and give the room back, that included which waits for a model."""
        owed = self.owed + self.entries + self.until_publish
        gone = [(each.clear, ()) for each in (self._fragments, self._names, self._clients)]
        _core.at_once([*gone, *setting(self, entries=0, bytes=0, until_publish=0, owed=owed)])

    def why_not(self, wanted: TakeRequest) -> str:
        """What a take waits for; "" where it need not."""
        clients, steps, min_clients = self.clients, wanted.steps, wanted.min_clients
        if self.entries >= steps:
            if clients >= min_clients:
                return ""
            there = f"{clients} of min_clients={min_clients}"
            return f"waiting for entries of {min_clients - clients} more clients ({there})"
        passed = ""
        if self._newest_stale[1]:
            version, newest = self._newest_stale
            passed = (
                f"; {self.counts.stale} entries were passed over (max_model_lag), the last ones of model {version} "
                f"when {newest} was the newest"
            )
        held = f"{self.entries} of {steps} held, of {clients} clients"
        return f"waiting for {steps - self.entries} more entries ({held}){passed}"

    def _leaving(self, gone: Sequence[Fragment], stays: Sequence[Fragment] = ()) -> Changes:
        """The changes by which these, the oldest, leave, but for the rest of the last one, if there is one."""
        fragments = self._fragments
        changes: Changes = [(fragments.popleft, ())] * len(gone)
        changes += [(fragments.appendleft, (rest,)) for rest in stays]
        return changes + self._counting(gone, stays)

    def _counting(self, gone: Sequence[Fragment], came: Sequence[Fragment] = ()) -> Changes:
        """The changes that count fragments as held no more, and others as held from now on."""
        entries = size = 0
        names: dict[tuple[bytes, int], int] = {}
        clients: dict[bytes, int] = {}
        for sign, fragments in ((-1, gone), (1, came)):
            for each in fragments:
                entries, size = entries + sign * len(each), size + sign * bytes_of(each)
                name = each.client, each.number
                names[name] = names.get(name, self._names.get(name, 0)) + sign
                clients[each.client] = clients.get(each.client, self._clients.get(each.client, 0)) + sign
        changes = adding(self, entries=entries, bytes=size)
        tables: tuple[tuple[dict[Any, int], dict[Any, int]], ...] = ((self._names, names), (self._clients, clients))
        for table, counts in tables:
            for key, count in counts.items():
                changes += putting(count, key, table) if count else [(table.pop, (key, None))]
        return changes


def bytes_of(fragment: Fragment) -> int:
    """Bytes of a fragment's arrays."""
    of = fragment.episode
    arrays = [*of.columns.values(), *(of.final_state or {}).values(), of.init_w, of.model_version, fragment.age]
    return sum(each.nbytes + each.lengths.nbytes if isinstance(each, Ragged) else each.nbytes for each in arrays)


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
