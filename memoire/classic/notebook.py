"""Prioritized replay buffer of the seed's notebook: Python objects in slots, drawn in proportion to priority ** alpha.

The names and numbers are the notebook's, over the engine's sum tree: any capacity, batches without a Python loop over
tree levels, and a defined result for every edge case. For arrays, windows, n-step returns and actors see `Buffer`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import setitem
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memoire import Column, Schema
from memoire.building import ForkedGenerator, Held, PriorityTree, StrictAttributes, at_once, whole
from memoire.errors import EmptyMemory, ParameterError


@dataclass
class Transition:
    """One step with the notebook's fields; each instance has its own arrays.

    Example:
        step = memoire.Transition(reward=1.0, done=1)
    """

    current_state: NDArray[Any] = field(default_factory=lambda: np.zeros((1, 10)))
    action: int = 0
    reward: float = 0.0
    next_state: NDArray[Any] = field(default_factory=lambda: np.zeros((1, 10)))
    done: int = 0

    @staticmethod
    def schema(state: ArrayLike | None = None) -> Schema:
        """Return the schema of this step for `Buffer`, which derives next_state and done itself.

        Args:
            state: A state, for its dtype and shape; None takes the notebook's zeros (1, 10).
        """
        template = np.asarray(Transition().current_state if state is None else state)
        return Schema(
            {
                "current_state": Column(template.dtype, template.shape, "state"),
                "action": Column(np.int64),
                "reward": Column(np.float32, (), "reward"),
            }
        )


class Samples(TypedDict):
    """Samples that `PrioritizedReplayBuffer.sample` returns. Shapes: B batch_size."""

    weights: NDArray[np.float32]
    """[B] in (0, 1], factor of each sample's loss: (N P(i)) ** -beta over its largest possible value."""
    indexes: NDArray[np.int64]
    """[B] slots of `data`, for `update_priorities`."""
    handles: NDArray[np.int64]
    """[B] handles that `add` returned. Handles are never reused, so an update of an overwritten slot can be dropped."""
    transitions: list[Any]
    """[B] the transitions, as they were added."""


class PrioritizedReplayBuffer(StrictAttributes):
    """Ring of `capacity` transitions with proportional prioritization. Schaul et al., ICLR 2016, section 3.3.

    Thread-safe. A copy or pickle continues the random draws. Attributes: `data` (the slots), `next_idx` (the next slot
    to write), `size` (number of filled slots), `max_priority` (largest priority so far, 1 at first, which new
    transitions get).

    Args:
        capacity: Number of transitions that fit, at least 1.
        alpha: 0 draws all equally, 1 in proportion to the priorities. At least 0.
        seed: Seed of the draws; None takes entropy from the system.
        stratified: True draws one sample from each of `batch_size` segments of equal probability.

    Raises:
        ParameterError: capacity or alpha is out of its range.

    Example:
        buffer = memoire.PrioritizedReplayBuffer(1000, alpha=0.6)
        buffer.extend(memoire.Transition(reward=float(step)) for step in range(10))
        samples = buffer.sample(4, beta=0.4)
        buffer.update_priorities(samples["indexes"], [1.0, 2.0, 0.5, 3.0], samples["handles"])
    """

    def __init__(self, capacity: int, alpha: float, *, seed: int | None = None, stratified: bool = False) -> None:
        capacity = whole("capacity", capacity, 1, 2**31 - 1)
        if not 0.0 <= float(alpha) < np.inf:
            raise ParameterError("alpha", alpha, "a finite number of at least 0")
        self.capacity, self.alpha, self.stratified = capacity, float(alpha), stratified
        self.max_priority = 1.0
        self.data: list[Any] = [None] * capacity
        self.next_idx = self.size = 0
        self._handles = np.full(capacity, -1, np.int64)
        self._added = 0
        self._tree = PriorityTree(capacity)
        self._rng = ForkedGenerator(seed)
        self._lock = threading.Lock()
        self._guard()

    def __len__(self) -> int:
        return self.size

    def add(self, transition: Any) -> int:
        """Write a transition into the next slot with the largest priority so far; return its handle, 0, 1, 2, ..."""
        return int(self.extend([transition])[0])

    def extend(self, transitions: Iterable[Any]) -> NDArray[np.int64]:
        """Add several transitions at once; return their handles, int64 [N]. Of more than `capacity` the last stay."""
        items = list(transitions)
        with Held(self._lock):
            handles = np.arange(self._added, self._added + len(items))
            slots, added = handles % self.capacity, self._added + len(items)
            facts = {"_added": added, "next_idx": added % self.capacity, "size": min(self.capacity, added)}
            put = [(setitem, (self.data, slot, each)) for slot, each in zip(slots.tolist(), items, strict=True)]
            at_once(
                [
                    (self._tree.set, (slots, self.max_priority**self.alpha)),
                    *put,
                    (setitem, (self._handles, slots, handles)),
                    (vars(self).update, (facts,)),
                ]
            )
            return handles

    def priority_sum(self) -> float:
        """Return the sum of priority ** alpha over all stored transitions; 0 for an empty buffer."""
        return self._tree.total

    def priority_min(self) -> float:
        """Return the least priority ** alpha above 0; infinity for an empty buffer.

        The notebook returns 0 while a priority is 0, and its `sample` divides by that.
        """
        return self._tree.minimum

    _sum, _min = priority_sum, priority_min

    def find_prefix_sum_idx(self, prefix_sum: float) -> int:
        """Return the largest slot i so that priority ** alpha, summed over the slots before i, is at most `prefix_sum`.

        A slot of priority 0 is never returned: a prefix of at least the whole sum gives the last slot with a priority.

        Raises:
            EmptyMemory: no stored transition has a priority above 0.
            ValueError: the prefix is negative or not finite.
        """
        if not self._tree.positive:
            raise EmptyMemory(self.size)
        return int(self._tree.find([float(prefix_sum)])[0])

    def sample(self, batch_size: int, beta: float) -> Samples:
        """Draw samples with replacement, P(i) = priority_i ** alpha over their sum.

        Args:
            batch_size: Number of samples, at least 1.
            beta: Strength of the correction by weights, in [0, 1].

        Raises:
            EmptyMemory: no stored transition has a priority above 0.
            ParameterError: an argument is out of its range.
        """
        batch_size = whole("batch_size", batch_size, 1)
        if not 0.0 <= beta <= 1.0:
            raise ParameterError("beta", beta, "a number in [0, 1]")
        with Held(self._lock):
            if not self._tree.positive:
                raise EmptyMemory(self.size)
            fractions = self._rng.random(batch_size)
            if self.stratified:
                fractions = np.minimum((np.arange(batch_size) + fractions) / batch_size, 1.0 - 2.0**-53)
            indexes = self._tree.draw(fractions)
            if self.stratified:
                self._rng.shuffle(indexes)
            # The population and the sum cancel in the ratio to the largest weight.
            weights = (self._tree.get(indexes) / self._tree.minimum) ** -beta
            return {
                "weights": weights.astype(np.float32),
                "indexes": indexes,
                "handles": self._handles[indexes],
                "transitions": [self.data[i] for i in indexes],
            }

    def update_priorities(
        self, indexes: ArrayLike, priorities: ArrayLike, handles: ArrayLike | None = None
    ) -> tuple[int, int]:
        """Set new priorities of slots; if a slot is listed twice, its last priority counts.

        Args:
            indexes: [B] filled slots.
            priorities: [B], finite and at least 0. A slot of priority 0 is never drawn (add an epsilon).
            handles: [B], as `sample` returned them; slots that were overwritten since are skipped.

        Returns:
            (applied, stale): the numbers of updated and of skipped slots.

        Raises:
            ParameterError: a slot is empty, a priority is out of its range, or the lengths differ. Nothing was changed.
        """
        slots = np.asarray(indexes)
        values = np.asarray(priorities, np.float64)
        known = None if handles is None else np.asarray(handles, np.int64)
        if slots.ndim != 1 or (slots.size and slots.dtype.kind not in "iu"):
            raise ParameterError("indexes", indexes, "whole numbers of one dimension")
        if values.shape != slots.shape or (known is not None and known.shape != slots.shape):
            raise ParameterError("priorities", f"shape {values.shape}", f"as long as the indexes, {slots.shape}")
        if not ((values >= 0.0) & np.isfinite(values)).all():
            bad = int(np.flatnonzero(~((values >= 0.0) & np.isfinite(values)))[0])
            raise ParameterError(f"priorities[{bad}]", float(values[bad]), "finite and at least 0")
        with Held(self._lock):
            outside = (slots < 0) | (slots >= self.size)
            if outside.any():
                raise ParameterError("indexes", int(slots[outside][0]), f"slots that are filled, 0 to {self.size - 1}")
            fresh = np.ones(len(slots), bool) if known is None else self._handles[slots] == known
            if fresh.any():
                largest = max(self.max_priority, float(values[fresh].max()))
                change = self._tree.set, (slots[fresh].astype(np.int64), values[fresh] ** self.alpha)
                at_once([change, (vars(self).update, ({"max_priority": largest},))])
            return int(fresh.sum()), int((~fresh).sum())

    def __getstate__(self) -> dict[str, Any]:
        with Held(self._lock):
            facts = {name: value for name, value in vars(self).items() if name not in ("_lock", "_tree")}
            copies = {"data": list(self.data), "_handles": self._handles.copy(), "_rng": copy.copy(self._rng)}
            return facts | copies | {"weights": self._tree.get(np.arange(self.capacity))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        weights = state.pop("weights")
        vars(self).update(state, _lock=threading.Lock(), _tree=PriorityTree(len(weights)))
        self._tree.set(np.arange(len(weights)), weights)

    def is_full(self) -> bool:
        """Return True if every slot is filled."""
        return self.capacity == self.size

    def __repr__(self) -> str:
        return f"PrioritizedReplayBuffer({self.size} of {self.capacity}, alpha={self.alpha})"


PriorityExperienceReplayBuffer = PrioritizedReplayBuffer
"""Name of `PrioritizedReplayBuffer` in the seed's notebook."""
