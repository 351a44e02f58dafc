"""Fragments of rollouts as those see them who watch, save and put back. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from memoire.replay.dataset import KeptEpisode
from memoire.replay.rollouts import Fragment
from memoire.replay.schema import Schema

from .inspection import Distribution, Histogram
from .rollout_queue import RolloutQueue
from .stats import PoolStats


def kept_of(fragment: Fragment, schema: Schema, now: float, wall: float) -> KeptEpisode:
    """A fragment as a snapshot has it: an episode that is named by its client, and what that calls it.

    Args:
        now, wall: The moment, by the clock of the fragment's arrival, and in seconds since 1970.
    """
    count, columns = len(fragment), dict(fragment.episode.columns)
    born = wall - (now - fragment.arrived) - fragment.age.astype(np.float64)
    if schema.qvest is not None:
        return_column = schema[schema.qvest]
        columns[schema.qvest] = np.zeros((count, *return_column.shape), return_column.dtype)
    facts: dict[str, Any] = {"priority": np.full(count, -1.0, np.float32), "drawn": np.zeros(count, np.uint32)}
    return KeptEpisode(fragment.client, fragment.number, replace(fragment.episode, columns=columns, born=born, **facts))


def fragment_of(kept: KeptEpisode, now: float, wall: float) -> Fragment:
    """The fragment that was saved so; `now` and `wall` as of `kept_of`."""
    episode = kept.episode
    born = np.full(len(episode), wall) if episode.born is None else episode.born
    age = np.maximum(wall - born, 0.0).astype(np.float32)
    return Fragment(kept.owner, kept.number, episode, age, now)


def distribution_of(held: Sequence[Fragment], entries: int, now: float, most: int) -> Distribution:
    """How old and how heavy entries are: of these fragments, at most so many entries.

    Args:
        entries: Of all fragments that are held.
        now: By the clock of their arrival.
    """
    nothing = np.empty(0, np.float32)
    weights = np.concatenate([nothing, *(each.episode.init_w for each in held)])[:most]
    ages = np.concatenate([nothing, *(each.age + np.float32(now - each.arrived) for each in held)])[:most]
    return Distribution(
        looked=len(ages),
        held=entries,
        population=float(entries),
        total_weight=float(entries),
        effective=float(entries) if entries else None,
        weights=Histogram.of(weights),
        ages=Histogram.of(np.maximum(ages, 0.0)),
    )


def stats_of(queue: RolloutQueue, clients: int, added: int, misses: int) -> PoolStats:
    """Figures of a queue; what is called caches elsewhere are fragments here, and samples are entries."""
    counts = queue.counts
    return PoolStats(
        clients=clients,
        caches=len(queue),
        bytes=queue.bytes,
        unused=queue.entries,
        held=queue.entries,
        added=added,
        drawn=counts.taken,
        overwritten=counts.overwritten_fragments,
        overwritten_samples=counts.overwritten,
        left=0,
        misses=misses,
        passed_over=counts.stale,
        split=counts.split,
    )
