"""Fragments in order of arrival, each entry handed out once. Pure: no lock, no clock.

    a(512) b(512) c(512)      take 800 ──▶ a(512), b(288)         what is left: b(224), c(512)
                              newest model 9, max_model_lag 1     c was made by model 7: passed over, 512 entries

A fragment is split where that makes a take exact; the rest stays first, and its head ends in the state of the rest's
first entry.

How far clients may record ahead of a queue whose entries are handed out once: as far as it has room.

    capacity 4096     8 clients are granted 512 each, and wait when they have recorded them
    take(4096)        room for 4096 more, at once or when the next model is published

Room that is lost is found again while a learner waits: after `STALLED_TIMEOUT` without any news, what was granted and
not used is taken back, since whoever had it may have died, and entries that were counted and never came are forgiven.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal

from memoire import _core
from memoire._core import setting
from memoire.arguments import one_of, whole
from memoire.errors import ParameterError
from memoire.replay.columns import Ragged
from memoire.replay.episode_store import Changes, adding, putting
from memoire.replay.limiter import ClusterSurplus, Limiter, ServerSurplus
from memoire.replay.parameters import Parameters
from memoire.replay.rollouts import Fragment
from memoire.replay.schema import Schema

Release = Literal["now", "publish"]
RELEASES: Final = ("now", "publish")
FRAGMENT_BYTES: Final = 3072
"""What a fragment takes in memory beside its arrays."""


@dataclass(frozen=True, slots=True)
class TakeRequest:
    """What a learner asks for.

    Args:
        steps: Entries, at least 1.
        exact: Split the last fragment, if it has more entries than are missing; else it is taken whole.
        min_clients: Clients of which entries have to be held.
        release: When the room of what is taken is given back.

    Raises:
        ParameterError: one of them is out of its range.
    """

    steps: int
    exact: bool = True
    min_clients: int = 0
    release: Release = "now"

    def __post_init__(self) -> None:
        if self.release not in RELEASES:
            raise ParameterError("release", self.release, one_of(self.release, RELEASES))
        whole("steps", self.steps, 1)
        whole("min_clients", self.min_clients, 0)


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


STALLED_TIMEOUT = 1.0
"""Seconds without news from any client after which there is room for all entries that a learner misses."""


class RoomLimiter(Limiter):
    """A `Limiter` of a table of rollouts: `surplus` is the entries that were recorded and whose room is not given back.

    Args:
        parameters: Of the table; those that limit samples mean nothing here.
        capacity: Entries there is room for; 0: nobody ever waits, and the oldest entries leave.
    """

    def __init__(self, parameters: Parameters, capacity: int) -> None:
        tolerance = float(capacity) if capacity else None
        super().__init__(Parameters(samples_per_insert=1.0, samples_per_insert_tolerance=tolerance))
        self._begun = True
        self._news_at = -math.inf  # when a client reported more than before, or was granted more

    def configure(self, parameters: Parameters) -> None:
        """Nothing: the capacity does not change."""

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._begun = True

    def reported(self, client: bytes, inserted: int, sequence: int, entries: int, now: float) -> bool:
        """A client has recorded so many entries in all: `Limiter.reported`."""
        is_news = super().reported(client, inserted, sequence, entries, now)
        if is_news:
            self._news_at = now
        return is_news

    def grant(self, client: bytes, sharers: int, entries: int, now: float) -> tuple[int, str]:
        """`Limiter.grant`. A client that has just been granted room may use it: nobody is stalled meanwhile."""
        if self.has_band and (missing := self._missing(entries, now)):
            self._find_room(missing)
        outstanding = self._outstanding
        found = super().grant(client, sharers, entries, now)
        if self._outstanding > outstanding:
            self._news_at = now
        return found

    def _find_room(self, missing: int) -> None:
        """Have room for so many entries: of those who have used none of theirs for long, and beyond the capacity."""
        for known in self._clients.values():
            known.through = known.inserted
        self._outstanding = 0
        lost = self._surplus + missing - (self.parameters.samples_per_insert_tolerance or 0.0)
        if lost > 0.0:
            self._forgiven += lost
            self._surplus -= lost

    def _settle(self, entries: int, now: float) -> None:
        """Nothing: what is beyond the capacity is forgiven when somebody asks for room."""

    def _share(self, room: float, sharers: int, lasting: float) -> float:
        """An equal part: fragments want all of it."""
        return room / max(1, sharers)

    def _needed(self, entries: int, sharers: int, now: float) -> int:
        """Nothing beyond a client's share of the room: there is enough, since it was found."""
        return 0

    def _missing(self, entries: int, now: float) -> int:
        """Entries that a learner has waited for although no client moves; 0 where there is nobody like that."""
        if now - self._news_at < STALLED_TIMEOUT:
            return 0
        wanted = self._starving(now) - self.parameters.cache_size  # nothing comes in caches here
        return max(0, wanted - entries)

    def _why_not_record(self) -> str:
        capacity = self.parameters.samples_per_insert_tolerance or 0.0
        return (
            f"waiting until a learner takes entries: {self._surplus:.0f} are recorded and not taken, or their room is "
            f"given back with the next model (capacity={capacity:.0f}, on_full='wait')"
        )

    def told(self, cluster: ClusterSurplus) -> bool:
        """False: each server has room of its own."""
        return False

    def standing(self) -> ServerSurplus | None:
        """None: a take has nothing to wait for but entries."""
        return None
