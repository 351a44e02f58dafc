"""Figures of a pool: what it counts, and the frozen picture that it gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PoolCounts:
    """What a pool has done since it was made. Belongs to the pool's lock; `PoolStats` explains each."""

    added: int = 0
    drawn: int = 0
    overwritten: int = 0
    overwritten_samples: int = 0
    left: int = 0
    misses: int = 0
    passed_over: int = 0
    applied: int = 0
    stale: int = 0

    def add(self, overwritten: int, samples: int) -> None:
        """One more was stored; so many, with so many samples, made room for it."""
        self.added += 1
        self.overwritten += overwritten
        self.overwritten_samples += samples


@dataclass(frozen=True)
class PoolStats:
    """What a pool holds and has done; counts are since it was made."""

    clients: int
    caches: int
    bytes: int
    unused: int
    """Samples never drawn."""
    held: int
    """Samples of all held caches, drawn ones included."""
    added: int
    drawn: int
    """Samples."""
    overwritten: int
    """Caches taken out for want of room, before all their samples were used."""
    overwritten_samples: int
    """The unused samples in them."""
    left: int
    """Clients that left after being silent."""
    misses: int
    """Draws that found too few samples."""
    passed_over: int = 0
    """Samples that were let go because their entries had become too old (`max_age`, `max_model_lag`)."""
    applied: int = 0
    """Priorities that learners have set here; in held caches, their owners set them."""
    stale: int = 0
    """Priorities for entries that had left."""
    split: int = 0
    """Fragments of rollouts that a take has split."""
