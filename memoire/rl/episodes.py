"""Episodes of observers: they become rollouts, and rollouts become batches.

RESULT ──▶ ObservedEpisode ──▶ rollouts_of ──▶ ragged_minibatches
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memoire.errors import NothingAllowed, ParameterError
from memoire.replay.ragged import Ragged
from memoire.replay.rollouts import Fragment, Rollouts
from memoire.replay.row_schema import RowSchema
from memoire.replay.schema import Schema


class Origin(Protocol):
    """Where starts come from: `StartStates`."""

    schema: RowSchema

    def cost_of(self, columns: Mapping[str, Any]) -> float:
        """Of a state, columns [*F]."""

    def take_in(self, episode: ObservedEpisode) -> int:
        """Keep what is worth it of an episode's states."""


@dataclass(frozen=True)
class Start:
    """A state that was kept."""

    id: int
    columns: Mapping[str, Any]
    """Each column [*F]."""
    cost: float
    parent: int
    """Id of the state before it; 0: it is the first one, or nobody said."""
    action: Mapping[str, Any]
    """What led here from there: some columns of the entry."""


@dataclass(frozen=True)
class ObservedEpisode:
    """One episode that an observer has done."""

    job: int
    """Its number."""
    fragment: Fragment
    """Its entries, as `Rollouts` are made of."""
    options: Mapping[str, Any]
    start: Start | None = None
    """Where it began."""
    source: Origin | None = None
    """Where that was drawn."""

    def __len__(self) -> int:
        return len(self.fragment)

    @property
    def columns(self) -> dict[str, Any]:
        """Each column [T, *F] of its T entries; a ragged one as `Ragged`."""
        return self.fragment.episode.columns

    @property
    def final(self) -> dict[str, NDArray[Any]] | None:
        """The state after the last entry, each state column [*F]; None if the observer did not say it."""
        return self.fragment.episode.final_state

    @property
    def terminated(self) -> bool:
        """Whether it ended in a state after which nothing can be earned."""
        return bool(self.fragment.episode.terminated)

    @property
    def observer(self) -> bytes:
        """Id of the observer: 16 bytes."""
        return self.fragment.client

    @property
    def version(self) -> int:
        """The lowest version of the weights that acted."""
        return self.fragment.oldest_model

    @property
    def start_cost(self) -> float:
        """Of the state in which it began; NaN if it was not drawn."""
        return float("nan") if self.start is None else self.start.cost

    @property
    def cost(self) -> float:
        """The lowest of the states after its start; NaN if its start was not drawn."""
        if self.source is None:
            return float("nan")
        return min(map(self.source.cost_of, self.states()), default=self.start_cost)

    def states(self) -> Iterator[dict[str, Any]]:
        """The states after its start in order, each column [*F]: of the entries but the first, and the final one."""
        names = self.fragment.episode.columns if self.source is None else self.source.schema.names
        for i in range(1, len(self)):
            yield {name: self.columns[name][i] for name in names}
        if self.final is not None:
            yield {name: self.final[name] for name in names}


def rollouts_of(schema: Schema, episodes: Sequence[ObservedEpisode]) -> Rollouts:
    """All entries of these episodes, one after the other: columns [N, *F], with `gae`, `minibatches` and the rest."""
    if not episodes:
        raise ParameterError("episodes", "none", "at least one")
    return Rollouts.of(schema, [each.fragment for each in episodes], time.monotonic())


def ragged_minibatches(
    rollouts: Rollouts, size: int, epochs: int = 1, rng: np.random.Generator | None = None
) -> Iterator[tuple[NDArray[np.int64], dict[str, NDArray[Any]]]]:
    """Entries in random order, each once an epoch: indices [B], and columns [B, *F] as networks take them.

    A ragged column is padded with zeros to the longest value of its batch, and `NAME_length` [B] has the lengths.

    Args:
        rollouts: N entries.
        size: Entries of a batch, B; an epoch's last batch may have fewer.
        epochs: How often each entry comes.
        rng: A NumPy generator; None makes a random one.
    """
    for index in rollouts.minibatches(size, epochs, rng):
        yield index, padded_columns({name: values[index] for name, values in rollouts.columns.items()})


def padded_columns(columns: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Columns [B, *F]; ragged ones padded with zeros, and `NAME_length` [B] beside them."""
    made: dict[str, NDArray[Any]] = {}
    for name, values in columns.items():
        if isinstance(values, Ragged):
            made[name], made[f"{name}_length"] = values.padded(), values.lengths
        else:
            made[name] = values
    return made


def masked(logits: ArrayLike, mask: ArrayLike, rng: np.random.Generator) -> tuple[Any, Any]:
    """Choose an allowed action in each row by the softmax of its logits: choices int64 [*N], and float32 [*N] the log
    of their probabilities among what is allowed.

    Args:
        logits: [*N, A].
        mask: bool [*N, A]: what is allowed.

    Raises:
        NothingAllowed: a row allows nothing; it says which one.
        ParameterError: shapes differ, or an allowed logit is NaN or infinite.
    """
    given, allowed = np.asarray(logits, np.float64), np.asarray(mask, np.bool_)
    if given.shape != allowed.shape or not given.ndim:
        raise ParameterError("mask", f"shape {allowed.shape}", f"shape {given.shape} of the logits, [*N, A]")
    empty = np.argwhere(~allowed.any(-1))
    if len(empty):
        raise NothingAllowed("the only row" if given.ndim == 1 else f"row {empty[0].tolist()}", given.shape[-1])
    if not np.isfinite(given[allowed]).all():
        raise ParameterError("logits", "NaN or infinity where the mask allows it", "finite numbers")
    shifted = np.where(allowed, given, -np.inf)
    shifted = shifted - shifted.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    # Gumbel (1954): the place of the largest sum is a draw of the softmax.
    choice = np.where(allowed, logs + rng.gumbel(size=given.shape), -np.inf).argmax(-1)
    logp = np.take_along_axis(logs, np.expand_dims(choice, -1), -1)[..., 0]
    return choice, logp.astype(np.float32)
