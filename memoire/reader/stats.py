"""What a reader has done, at one moment. Pure: no lock, no socket, no clock."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memoire.pool.draw import PooledBatch
from memoire.pool.freshness import Freshness, FreshnessMonitor
from memoire.replay.rollouts import Rollouts

if TYPE_CHECKING:
    from .io import ReaderThread


@dataclass(frozen=True, slots=True)
class ReaderStats:
    """A reader at one moment; for whoever watches."""

    reader: str
    """Its id in hex."""
    name: str
    """That a person or Kubernetes gave it; "" for none."""
    servers: tuple[str, ...]
    """Names of the servers that answer."""
    away: tuple[str, ...]
    """Names of those that do not, and are left out."""
    batches: int
    samples: int
    rollouts_taken: int
    """Entries of rollouts that calls took."""
    rollouts_kept: int
    """Entries that came and are kept for the next call."""
    rollouts_stale: int
    """Entries that came and were passed over here, since their model was too old by then."""
    short: int
    """Samples that a server was asked for and no longer had."""
    waited: float
    """Seconds that calls waited for a batch."""
    waits_for: str
    """Why the next batch has to wait for entries to be recorded; "" when it has not."""
    prefetched: int
    freshness: Freshness | None
    """Of a recent batch; None before the first one."""
    scalars: dict[str, float]
    """What `scalars` set."""
    resends: int
    refused: dict[str, int]
    feedback_given: int
    feedback_lost: int
    parameters_version: int
    finished: bool
    faults: int


class DeliveredBatches:
    """The batches that calls took, and how long these waited. The owner locks."""

    def __init__(self) -> None:
        self.batches = 0
        self.waited = 0.0  # seconds
        self.feedback = 0  # samples for which TD errors were given
        self._looks = FreshnessMonitor()

    @property
    def freshness(self) -> Freshness | None:
        """Of a recent batch; None before the first one."""
        return self._looks.newest

    def look(self, drawn: PooledBatch, newest: int, now: float) -> None:
        """Look how fresh a batch is, now and then; `newest` is the newest version. Takes no lock of the owner's."""
        if self._looks.is_due(now):
            self._looks.saw(drawn.gathered, drawn.importance, drawn.left_out, newest)

    def look_taken(self, rollouts: Rollouts, newest: int, now: float) -> None:
        """The same of entries of rollouts that were taken."""
        if self._looks.is_due(now):
            self._looks.took(rollouts.age, rollouts.model_version, newest)

    def figures(self, samples: int) -> dict[str, float]:
        """What servers show of this reader, which has drawn so many samples."""
        fresh = self.freshness
        figures = {} if fresh is None else dataclasses.asdict(fresh)
        figures |= {"batches": self.batches, "samples": samples, "waited": self.waited}
        return {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}


def stats_of(
    reader: str, name: str, thread: ReaderThread, handed_out: DeliveredBatches, scalars: Mapping[str, float]
) -> ReaderStats:
    """All figures at this moment. From any thread."""
    directory, rounds, channels, takes = thread.directory, thread.rounds, thread.channels, thread.takes
    terms, known = directory.terms, directory.known
    return ReaderStats(
        reader=reader,
        name=name,
        servers=tuple(server.name for server in known if not server.is_away),
        away=tuple(server.name for server in known if server.is_away),
        batches=handed_out.batches,
        samples=thread.prefetch.samples,
        rollouts_taken=takes.taken,
        rollouts_kept=takes.kept,
        rollouts_stale=takes.stale,
        short=rounds.short,
        waited=handed_out.waited,
        waits_for=rounds.waits_for,
        prefetched=len(thread.prefetch),
        freshness=handed_out.freshness,
        scalars=dict(scalars),
        resends=channels.resends,
        refused=summed([rounds.refused, *(channel.refused for channel in channels.of.values())]),
        feedback_given=handed_out.feedback,
        feedback_lost=thread.feedback.lost,
        parameters_version=0 if terms is None else terms.parameters_version,
        finished=directory.is_finished,
        faults=thread.worker.errors,
    )


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts by code, over several places that count."""
    found: Counter[str] = Counter()
    for each in counts:
        found.update(each)
    return dict(found)
