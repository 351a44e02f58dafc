"""Who learns from a server, and what they say of themselves. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from memoire.errors import ProtocolError
from memoire.wire.messages import Hello

MAX_LEARNERS = 64
"""Learners that are known. Beyond, the one heard least recently is not shown until its next HELLO, and its replies are
not compressed.
"""
SILENCE_TIMEOUT = 60.0
"""Seconds after which a learner is no longer shown; it says HELLO every two."""


@dataclass(frozen=True, slots=True)
class LearnerStats:
    """A reader, as a server knows it. Times are seconds since 1970."""

    learner: str
    """Its id in hex."""
    table: str
    """Name of the table that it draws from."""
    name: str
    """That a person or Kubernetes gave it; "" for none."""
    host: str
    pid: int
    software: str
    first_seen: float
    last_seen: float
    scalars: dict[str, float]
    """What `Reader.scalars` set."""
    figures: dict[str, float]
    """What it counts by itself: batches, samples, waited, age_median, ..."""


class Learners:
    """The readers that said HELLO lately. Not thread-safe: the owner locks."""

    def __init__(self) -> None:
        self._learners: OrderedDict[bytes, LearnerStats] = OrderedDict()  # who was heard last is last
        self._codecs: dict[bytes, frozenset[str]] = {}  # compressions that each of them can undo

    def met(self, learner: bytes, said: Hello, now: float, table: str = "") -> None:
        """A reader of this table said HELLO.

        Raises:
            ProtocolError: a figure is not finite.
        """
        for name, value in (*said.scalars.items(), *said.figures.items()):
            if not math.isfinite(value):
                raise ProtocolError("value", f"scalar {name!r} is {value}; only finite numbers are kept")
        known = self._learners.pop(learner, None)
        self._learners[learner] = LearnerStats(
            learner=learner.hex(),
            table=table,
            name=said.name,
            host=said.host,
            pid=said.pid,
            software=said.software,
            first_seen=now if known is None else known.first_seen,
            last_seen=now,
            scalars=dict(said.scalars),
            figures=dict(said.figures),
        )
        self._codecs[learner] = frozenset(said.codecs)
        while len(self._learners) > MAX_LEARNERS:
            gone, _ = self._learners.popitem(last=False)
            del self._codecs[gone]

    def has(self, learner: bytes, codec: str) -> bool:
        """Whether that learner said that it can undo a compression; not of one that is not known (any more)."""
        return codec in self._codecs.get(learner, ())

    def now(self, now: float) -> tuple[LearnerStats, ...]:
        """Those that were heard within `SILENCE_TIMEOUT` seconds, the newest word last."""
        return tuple(each for each in self._learners.values() if each.last_seen >= now - SILENCE_TIMEOUT)


def merged(learners: tuple[LearnerStats, ...], own: Mapping[str, float]) -> dict[str, float]:
    """Scalars of all learners by name; of several with the same name whoever was heard last counts, and `own` first."""
    found: dict[str, float] = {}
    for learner in learners:
        found |= learner.scalars
    return found | dict(own)
