"""Batches of whole episodes, alone or in groups with the same start, such as answers to a prompt.

An episode's weight is the mean weight of its entries, a group's the mean of its episodes. Draws are systematic: episode
e appears on average B * P(e) times in a batch of B, with P(e) = weight / total, and twice only if that is above 1. If
`max_times_sampled` limits draws, it appears at most once: episodes are drawn one after the other without replacement,
and importance is relative to those that were left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire.arguments import whole
from memoire.errors import EmptyMemory, ParameterError

from .batch import ID, Batch, GatheredSamples, PriorityUpdate
from .conversion import real_errors
from .gathering import Float64s, Int64s
from .memory import MAX_ROWS, Memory
from .parameters import Parameters
from .sampling import importance
from .schema import Schema


class EpisodeBatch(Batch):
    """Whole episodes, padded with zeros to the longest: a `Batch` of sequences with these differences.

    Shapes: B episodes, T entries of the longest. `steps` are the lengths, and `mask` [B, T] is True for real entries.
    obs [B, T + 1, *F] has the final state after the last entry (zeros if unknown).

        ids             [B, T] of the entries; ids outside of the mask are meaningless
        importance      float32 [B]: of the episode, or of its group
        group           int64 [B] index of the episode's group among those drawn. Episodes of a group are adjacent,
                        the oldest first. Without groups each episode has its own index
    """

    def __init__(
        self, schema: Schema, gathered: GatheredSamples, corrections: Any, group: Int64s, update: Any, divisor: Any
    ):
        super().__init__(schema, gathered, corrections, update, divisor=divisor)
        self._arrays["group"] = group

    def update_priorities(self, td_errors: Any) -> PriorityUpdate:
        """Set the priorities of the entries: [B, T], of which errors outside of `mask` do not count, or [B] for all
        entries of an episode alike.

        Raises:
            ParameterError: the shape is another, or an error in the mask is not finite.
        """
        mask = self._arrays["mask"]
        errors = real_errors(td_errors)
        if errors.shape == mask.shape[:1]:
            errors = np.broadcast_to(errors[:, None], mask.shape)
        if errors.shape != mask.shape:
            expected = f"shape {mask.shape}, as the mask has, or {mask.shape[:1]}"
            raise ParameterError("td_errors", f"shape {errors.shape}", expected)
        return self._update(self._arrays["ids"][mask], errors[mask])


class _StoredEpisodes(NamedTuple):
    """Closed episodes of a memory that can be drawn, oldest first."""

    rows: Int64s
    """[E] rows of the episodes' first entries."""
    lengths: Int64s
    """[E] number of entries of each episode."""
    weights: Float64s
    """[E] mean weight of the episodes' drawable entries."""


def sample(
    memory: Memory,
    count: int,
    beta: Callable[[Parameters], float],
    update: Callable[[NDArray[Any], Any], Any],
    *,
    group: str | None = None,
    group_size: int | None = None,
    owner: bytes = b"",
) -> EpisodeBatch:
    """Draw whole closed episodes, or whole groups of episodes; see `Buffer.sample_episodes`.

    Args:
        beta: Function that returns the importance exponent of the draw; called while the memory is held.
        update: Function that `update_priorities` of the batch calls with ids and errors of N entries, both [N].
        owner: 16 bytes of the ids [B, T], of dtype `batch.ID`; without it ids are numbers, int64 [B, T].
    """
    group_size = _check(memory.schema, count, group, group_size)
    with memory.held():
        stored = _stored(memory)
        labels = np.arange(len(stored.rows)) if group is None else _labels(memory, stored.rows, group)
        members = _LabelMembers(labels, group_size)
        weights = members.weights(stored.weights)
        if not weights.any():
            raise EmptyMemory(memory.num_entries, _reason(memory, group, members))
        parameters = memory.parameters
        drawn, shares = _draw(memory.generator, weights, count, parameters)
        parts = [members.of(label) for label in drawn]
        chosen = np.concatenate(parts)
        gathered, rows = memory.gather_episodes(stored.rows[chosen], int(stored.lengths[chosen].max()))
        if group is not None:
            _check_constant(memory, group, rows)
        gathered.weight[:] = stored.weights[chosen]
        memory._count_draws(gathered.ids[rows >= 0])
        exponent = beta(parameters)
    total, positive = weights.sum(), weights[weights > 0.0]
    corrections, divisor = importance(
        shares / total, len(positive), exponent, parameters.normalize, float(positive.min() / total)
    )
    if owner:
        ids = np.empty(gathered.ids.shape, ID)
        ids["client"], ids["number"] = np.frombuffer(owner, "<u8"), gathered.ids
        gathered.ids = ids
    turn = np.repeat(np.arange(len(drawn)), [len(part) for part in parts])
    return EpisodeBatch(memory.schema, gathered, corrections[turn], turn, update, divisor)


def _check(schema: Schema, count: Any, group: Any, group_size: Any) -> int:
    """Check the arguments, and return the number of episodes that a group must have, 0 for any number."""
    whole("count", count, 1, MAX_ROWS)
    if taken := sorted({"mask", "group"}.intersection(schema.roots)):
        raise ParameterError.with_text(
            f"The schema has a column {taken[0]!r}, a name that batches of episodes use. Rename the column."
        )
    plain = [name for name in schema.names if schema[name].role == "plain" and name not in schema.ragged]
    if group is not None and group not in plain:
        expected = f"None or a plain column of fixed shape of the schema ({', '.join(plain)})"
        raise ParameterError("group", group, expected)
    if group_size is None:
        return 0
    if group is None:
        raise ParameterError.with_text(f"group_size={group_size!r} needs group=, the column that defines the groups.")
    return whole("group_size", group_size, 1, MAX_ROWS)


def _stored(memory: Memory) -> _StoredEpisodes:
    """Return the drawable episodes of a memory that the caller holds."""
    memory.sums()  # the call sets weights of entries that have become too old to 0
    inside = memory.contents()
    episodes, meta = inside["episodes"], inside["meta"]
    slots = np.flatnonzero(episodes["state"] == 2)
    first = episodes["first_row"][slots]
    slots = slots[np.lexsort((meta["number"][first], meta["born"][first]))]
    weighed = np.flatnonzero(inside["weights"] > 0.0)
    masses = inside["weights"][weighed]
    if memory.parameters.prioritization == "rank":
        masses = memory.weights(meta["number"][weighed])
    owners = meta["episode"][weighed]
    sums = np.bincount(owners, masses, len(episodes))
    means = sums / np.maximum(np.bincount(owners, minlength=len(episodes)), 1)
    slots = slots[means[slots] > 0.0]
    return _StoredEpisodes(episodes["first_row"][slots], episodes["length"][slots], means[slots])


def _labels(memory: Memory, rows: Int64s, group: str) -> Int64s:
    """Return the group's number of each of these rows, by the bytes of their values in the group's column."""
    values = np.empty((len(rows), memory.schema[group].nbytes), np.uint8)
    memory.copy_rows(group, rows, values)
    if not values.size:
        return np.zeros(len(rows), np.int64)
    keys = values.view(np.dtype((np.void, values.shape[1]))).reshape(-1)
    labels: Int64s = np.unique(keys, return_inverse=True)[1].astype(np.int64)
    return labels


class _LabelMembers:
    """Episodes of each label; with `size` above 0 only the newest `size`, and only labels that have as many."""

    def __init__(self, labels: Int64s, size: int) -> None:
        self.order = np.argsort(labels, kind="stable")
        counts = np.bincount(labels)
        self.ends = np.cumsum(counts)
        self.begins = self.ends - counts
        self.size = size
        self.most = int(counts.max(initial=0))
        if size:
            self.begins = np.maximum(self.ends - size, self.begins)

    def of(self, label: int) -> Int64s:
        """Return the episodes of a label, the oldest first."""
        return self.order[self.begins[label] : self.ends[label]]

    def weights(self, each: Float64s) -> Float64s:
        """Return the mean weight of each label's episodes; 0 for labels with too few."""
        counts = self.ends - self.begins
        edges = np.stack([self.begins, self.ends], axis=1).reshape(-1)
        sums: Float64s = np.add.reduceat(np.append(each[self.order], 0.0), edges)[::2] if len(edges) else np.zeros(0)
        return np.where(counts >= self.size, sums / np.maximum(counts, 1), 0.0)


def _draw(
    random: np.random.Generator, weights: Float64s, count: int, parameters: Parameters
) -> tuple[Int64s, Float64s]:
    """Draw labels [count], and return them with numbers proportional to their probabilities: systematically in a
    random order; or the heaviest first, repeated if there are too few; or one after the other without replacement.

    Raises:
        EmptyMemory: each label may be drawn once, and there are fewer than `count`.
    """
    able = np.flatnonzero(weights)
    if parameters.max_times_sampled:
        if count > len(able):
            reason = f"{count} were requested, but {len(able)} can be drawn, each once (max_times_sampled)"
            raise EmptyMemory(0, reason)
        chosen = able[np.argsort(random.exponential(size=len(able)) / weights[able])[:count]]
        # The sum starts at the last episode: subtracting heavy weights from a total would round light weights away.
        never = np.delete(weights, chosen).sum()
        remaining = never + np.cumsum(weights[chosen][::-1])[::-1]
        num_able = len(able) - np.arange(count)
        return chosen, weights[chosen] * (weights.sum() / remaining) * (num_able / len(able))
    if parameters.prioritization == "greedy":
        chosen = np.resize(able[np.argsort(-weights[able], kind="stable")], count)
    else:
        order = random.permutation(able)
        edges = np.cumsum(weights[order])
        points = (np.arange(count) + random.random()) * (edges[-1] / count)
        # The last point may round up to the total.
        chosen = order[np.minimum(np.searchsorted(edges, points, side="right"), len(order) - 1)]
    return chosen, weights[chosen]


def _reason(memory: Memory, group: str | None, members: _LabelMembers) -> str:
    if not memory.num_episodes:
        return "no episode has ended, and only ended ones are drawn"
    if 0 < members.most < members.size:
        return f"no group by {group!r} has {members.size} episodes; the largest has {members.most}"
    return f"of {memory.num_episodes} ended episodes, no entry has a positive weight"


def _check_constant(memory: Memory, group: str, rows: Int64s) -> None:
    """Raise if a column changes within an episode. rows: [B, T], below 0 behind an episode's end."""
    column = memory.schema[group]
    values = np.empty((*rows.shape, column.nbytes), np.uint8)
    memory.copy_rows(group, rows, values)
    changes = ((values != values[:, :1]).any(axis=2) & (rows >= 0)).nonzero()
    if len(changes[0]):
        which, step = int(changes[0][0]), int(changes[1][0])
        first, other = (values[which, at].view(column.dtype).reshape(column.shape).tolist() for at in (0, step))
        raise ParameterError.with_text(
            f"Column {group!r} cannot define groups: its value changes within an episode, from {first} to {other} at "
            f"step {step}."
        )
