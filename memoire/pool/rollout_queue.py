"""Fragments in order of arrival, each entry handed out once. Pure: no lock, no clock.

    a(512) b(512) c(512)      take 800 ──▶ a(512), b(288)         what is left: b(224), c(512)
                              newest model 9, max_model_lag 1     c was made by model 7: passed over, 512 entries

A fragment is split where that makes a take exact; the rest stays first, and its head ends in the state of the rest's
first entry.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal

from memoire.arguments import whole
from memoire.errors import ParameterError
from memoire.replay.ragged import Ragged
from memoire.replay.rollouts import Fragment
from memoire.replay.schema import Schema
from memoire.suggestions import one_of

Release = Literal["now", "publish"]
RELEASES: Final = ("now", "publish")


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
        self._names: Counter[tuple[bytes, int]] = Counter()  # fragments of each client and number that are held
        self._clients: Counter[bytes] = Counter()  # fragments of each client that are held
        self.newest_model = 0
        """Its version; 0: none was published."""
        self.until_publish = 0
        """Entries that were taken, and whose room is given back with the next model."""
        self._newest_stale = (0, 0)  # the newest version that was passed over last, and the newest model then

    def saw_model(self, version: int) -> int:
        """There is a model of this version; returns entries whose room is given back by that."""
        if version == self.newest_model:
            return 0
        self.newest_model = version
        room, self.until_publish = self.until_publish, 0
        return room

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

    def add(self, fragment: Fragment) -> None:
        """Hold one more, behind all others."""
        self._fragments.append(fragment)
        self._count(fragment, 1)

    def make_room(self, entries: int, byte_limit: int) -> tuple[int, int]:
        """Drop the oldest until at most so many entries and bytes are held; returns fragments and entries dropped."""
        dropped = lost = 0
        while self._fragments and (self.entries > entries or self.bytes > byte_limit):
            lost += len(self._pop())
            dropped += 1
        self.counts.overwritten += lost
        self.counts.overwritten_fragments += dropped
        return dropped, lost

    def pass_over(self, max_lag: int | None) -> int:
        """Drop what is further behind the newest model than that, by each fragment's oldest entry; returns the entries.

        Nothing is dropped where no model was published.
        """
        if max_lag is None or self.newest_model == 0:
            return 0
        least = self.newest_model - max_lag
        stale = [fragment for fragment in self._fragments if fragment.oldest_model < least]
        if not stale:
            return 0
        self._fragments = deque(fragment for fragment in self._fragments if fragment.oldest_model >= least)
        for fragment in stale:
            self._count(fragment, -1)
        lost = sum(map(len, stale))
        self.counts.stale += lost
        self._newest_stale = max(fragment.oldest_model for fragment in stale), self.newest_model
        return lost

    def take(self, wanted: TakeRequest) -> tuple[list[Fragment], int]:
        """The oldest fragments, which are not held from now on, or none while there are too few; and the entries whose
        room is given back at once.
        """
        if self.entries < wanted.steps or (wanted.min_clients > 1 and self.clients < wanted.min_clients):
            return [], 0
        return self._gone(self._taken(wanted.steps, wanted.exact), wanted.release)

    def _gone(self, taken: list[Fragment], release: Release) -> tuple[list[Fragment], int]:
        """Count what was taken; with it, the entries whose room is given back at once."""
        count = sum(map(len, taken))
        self.counts.taken += count
        if release == "now":
            return taken, count
        self.until_publish += count
        return taken, 0

    def give(self, wanted: TakeRequest, least: int, fits: Callable[[Fragment], bool]) -> tuple[list[Fragment], int]:
        """The same for a learner far away, who comes again for the rest: as many as are there, and as the reply has
        room for; none while fewer than `least` entries are held.

        Args:
            fits: Whether the reply has room for a further fragment. What it raises leaves everything here.
        """
        if self.entries < max(1, least):
            return [], 0
        return self._gone(self._taken(wanted.steps, wanted.exact, fits), wanted.release)

    def _taken(self, steps: int, exact: bool, fits: Callable[[Fragment], bool] | None = None) -> list[Fragment]:
        taken: list[Fragment] = []
        missing = steps
        while missing > 0 and self._fragments:
            fragment, rest = self._fragments[0], None
            if exact and len(fragment) > missing:
                fragment, rest = fragment.split(missing, self.schema)
            if fits is not None and not fits(fragment):
                break
            self._pop()
            if rest is not None:
                self._fragments.appendleft(rest)
                self._count(rest, 1)
                self.counts.split += 1
            taken.append(fragment)
            missing -= len(fragment)
        return taken

    def clear(self) -> int:
        """Let everything go; returns the entries whose room is given back, those included that wait for a model."""
        room = self.entries + self.until_publish
        self._fragments.clear()
        self._names.clear()
        self._clients.clear()
        self.entries = self.bytes = self.until_publish = 0
        return room

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

    def _pop(self) -> Fragment:
        fragment = self._fragments.popleft()
        self._count(fragment, -1)
        return fragment

    def _count(self, fragment: Fragment, sign: int) -> None:
        """A fragment is held from now on (1), or no more (-1)."""
        self.entries += sign * len(fragment)
        self.bytes += sign * bytes_of(fragment)
        name = fragment.client, fragment.number
        self._names[name] += sign
        self._clients[fragment.client] += sign
        if not self._names[name]:
            del self._names[name]
        if not self._clients[fragment.client]:
            del self._clients[fragment.client]


def bytes_of(fragment: Fragment) -> int:
    """Bytes of a fragment's arrays."""
    of = fragment.episode
    arrays = [*of.columns.values(), *(of.final_state or {}).values(), of.init_w, of.model_version, fragment.age]
    return sum(each.nbytes + each.lengths.nbytes if isinstance(each, Ragged) else each.nbytes for each in arrays)
