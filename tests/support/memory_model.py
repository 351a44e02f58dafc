"""The truth about a memory in slow, plain Python: what its weights and samples must be, written from the definitions.

The model does not know pages: with one lane it says exactly which episodes leave, with several it is told which did.
"""

from dataclasses import dataclass, field

import numpy as np

from memoire.replay.parameters import Parameters


@dataclass
class Entry:
    values: dict
    init_w: float
    number: int
    version: int
    priority: float | None = None
    learned: bool = False
    born: float = 0.0
    drawn: int = 0


@dataclass
class Episode:
    lane: int
    entries: list = field(default_factory=list)
    closed: bool = False
    multiplier: float = 1.0
    update_value: bool = True
    update_weight: bool = True
    final: dict | None = None
    terminated: bool = False
    bootstrap: np.ndarray | None = None
    returns: np.ndarray | None = None

    @property
    def ended(self) -> bool:
        return self.final is not None or self.terminated


class Model:
    def __init__(self, schema, capacity: int, parameters: Parameters, live: bool) -> None:
        self.schema, self.capacity, self.parameters, self.live = schema, capacity, parameters, live
        self.closed: list[Episode] = []
        self.lanes: dict[int, Episode] = {}
        self.max_priority = 1.0
        self.now, self.newest_model = 0.0, 0
        self.reward_shape = schema[schema.reward].shape if schema.reward else ()

    # What happened

    def open(self, lane: int) -> None:
        self.lanes[lane] = Episode(lane)

    def add(self, lane: int, values: dict, init_w: float, number: int, version: int = 0) -> None:
        episode = self.lanes[lane]
        episode.entries.append(Entry(values, init_w, number, version, born=self.now))
        self.newest_model = max(self.newest_model, version)
        if self.live:
            self.ripen(episode)

    def ripen(self, episode: Episode) -> None:
        for entry in episode.entries[: max(0, len(episode.entries) - self.parameters.multi_step)]:
            if entry.priority is None:
                entry.priority = self.max_priority

    def close(self, lane: int, **how) -> None:
        episode = self.lanes.pop(lane)
        episode.closed = True
        for name, value in how.items():
            setattr(episode, name, value)
        self.closed.append(episode)
        self.value(episode)
        self.prioritize(episode)

    def configure(self, parameters: Parameters) -> None:
        old, self.parameters = self.parameters, parameters
        for episode in self.closed:
            if (old.mix_lambda, old.discount) != (parameters.mix_lambda, parameters.discount):
                self.value(episode)
            self.prioritize(episode)
        if self.live:
            for episode in self.lanes.values():
                self.ripen(episode)

    def update(self, numbers, errors) -> tuple[int, int]:
        entries = {entry.number: entry for episode in self.episodes() for entry in episode.entries}
        applied = 0
        for number, error in zip(numbers, errors, strict=True):
            if number in entries:
                entries[number].priority = abs(error) + 1e-6
                entries[number].learned = True
                self.max_priority = max(self.max_priority, entries[number].priority)
                applied += 1
        return applied, len(numbers) - applied

    def drew(self, numbers) -> None:
        entries = {entry.number: entry for episode in self.episodes() for entry in episode.entries}
        for number in numbers:
            entries[number].drawn += 1

    def is_fresh(self, entry: Entry) -> bool:
        times, age, lag = (getattr(self.parameters, name) for name in ("max_times_sampled", "max_age", "max_model_lag"))
        is_young = age is None or self.now - entry.born <= age
        return (
            is_young
            and (not times or entry.drawn < times)
            and (lag is None or self.newest_model - entry.version <= lag)
        )

    def forget(self, present: set) -> list[Episode]:
        """Drop the episodes that have left; each must have left as a whole, and no open one."""
        left = []
        for episode in self.episodes():
            found = sum(entry.number in present for entry in episode.entries)
            assert found in (0, len(episode.entries)), "a part of an episode has left"
            if found == 0 and episode.entries:
                assert episode.closed, "an open episode has left"
                left.append(episode)
        self.closed = [episode for episode in self.closed if not any(episode is gone for gone in left)]
        return left

    # What must be so

    def episodes(self) -> list[Episode]:
        return [*self.closed, *self.lanes.values()]

    def vector(self, numbers) -> np.ndarray:
        size = int(np.prod(self.reward_shape))
        return np.array(numbers * size if len(numbers) == 1 else numbers).reshape(self.reward_shape)

    def value(self, episode: Episode) -> None:
        """TD(lambda) by its definition, forwards from each entry: a mixture of n-step returns."""
        zero = np.zeros(self.reward_shape)
        length = len(episode.entries)
        if self.schema.value is None or not episode.update_value:
            episode.returns = np.zeros((length, *self.reward_shape))
            return
        gamma, lam = self.vector(self.parameters.discount), self.parameters.mix_lambda
        rewards = [entry.values[self.schema.reward].astype(float) for entry in episode.entries]
        bootstrap = zero if episode.bootstrap is None else episode.bootstrap
        values = [entry.values[self.schema.value].astype(float) for entry in episode.entries] + [bootstrap]
        returns = []
        for t in range(length):
            total, steps = zero, length - t
            for n in range(1, steps + 1):
                n_step = sum((gamma**i * rewards[t + i] for i in range(n)), zero) + gamma**n * values[t + n]
                share = lam ** (n - 1) * (1 - lam) if n < steps else lam ** (n - 1)
                total = total + share * n_step
            returns.append(total)
        episode.returns = np.array(returns).reshape(length, *self.reward_shape)

    def prioritize(self, episode: Episode) -> None:
        coeff = self.vector(self.parameters.reward_coeff)
        for t, entry in enumerate(episode.entries):
            if entry.learned:
                continue
            if not episode.update_weight:
                entry.priority = None
            elif self.schema.value is not None:
                surprise = np.abs(episode.returns[t].astype(np.float32) - entry.values[self.schema.value])
                entry.priority = float((coeff * surprise).sum())
                self.max_priority = max(self.max_priority, entry.priority)
            elif entry.priority is None:
                entry.priority = self.max_priority

    def weight(self, episode: Episode, t: int) -> float:
        parameters, entry = self.parameters, episode.entries[t]
        if not episode.closed and not self.live:
            return 0.0
        if parameters.start == "skip" and t < parameters.frame_stack - 1:
            return 0.0
        if not self.is_fresh(entry):
            return 0.0
        if not episode.ended and t + parameters.multi_step > len(episode.entries) - 1:
            return 0.0
        share = entry.init_w * episode.multiplier
        if parameters.prioritization == "proportional":
            return share if entry.priority is None else share * entry.priority**parameters.priority_exponent
        # What entries are ranked by: the priority itself, and one of 0 comes last instead of nowhere.
        return 0.0 if share == 0.0 else max(share * (1.0 if entry.priority is None else entry.priority), 1e-280)

    def weights(self) -> dict[int, float]:
        return {
            entry.number: self.weight(episode, t)
            for episode in self.episodes()
            for t, entry in enumerate(episode.entries)
        }

    def frames(self, episode: Episode, end: int, column: str) -> np.ndarray:
        shape, dtype = self.schema[column].shape, self.schema[column].dtype
        stack = []
        for t in range(end - self.parameters.frame_stack + 1, end + 1):
            if t < 0 and self.parameters.start == "zero":
                stack.append(np.zeros(shape, dtype))
            elif t == len(episode.entries):
                stack.append(np.zeros(shape, dtype) if episode.final is None else episode.final[column])
            else:
                stack.append(episode.entries[max(t, 0)].values[column])
        return np.stack(stack)

    def sample(self, number: int) -> dict:
        """Everything about the sample of an entry that can be drawn."""
        episode, t = next(
            (episode, t)
            for episode in self.episodes()
            for t, entry in enumerate(episode.entries)
            if entry.number == number
        )
        length, gamma = len(episode.entries), self.vector(self.parameters.discount)
        steps = min(self.parameters.multi_step, length - t)
        end = t + steps
        zero = np.zeros(self.reward_shape)
        if self.schema.reward:
            rewards = [entry.values[self.schema.reward].astype(float) for entry in episode.entries[t:end]]
            reward = sum((gamma**j * r for j, r in enumerate(rewards)), zero)
        else:
            reward = zero
        expected = {
            "steps": steps,
            "reward": reward,
            "discount": zero if end == length and episode.terminated else gamma**steps * np.ones(self.reward_shape),
            "version": episode.entries[t].version,
            "age": self.now - episode.entries[t].born,
            "prev": {},
            "next": {},
        }
        for name, column in self.schema.items():
            if column.role == "state":
                expected["prev"][name] = self.frames(episode, t, name)
                expected["next"][name] = self.frames(episode, end, name)
                continue
            expected["prev"][name] = self.plain(episode, t, name)
            if end < length:
                expected["next"][name] = self.plain(episode, end, name)
            elif column.role == "value" and episode.final is not None:
                expected["next"][name] = zero if episode.bootstrap is None else episode.bootstrap
            else:
                expected["next"][name] = np.zeros(column.shape, column.dtype)
        return expected

    def plain(self, episode: Episode, t: int, name: str) -> np.ndarray:
        if self.schema[name].role == "return":
            return episode.returns[t] if episode.closed else np.zeros(self.reward_shape)
        return episode.entries[t].values[name]


class Ring:
    """Which episodes one lane keeps: rows in a ring, a whole episode leaves when one of its rows is needed."""

    def __init__(self, capacity: int) -> None:
        self.owner: list[object] = [None] * capacity
        self.head = 0

    def add(self, episode: object) -> None:
        owner = self.owner[self.head]
        if owner is not None:
            assert owner is not episode
            self.clear(owner)
        self.owner[self.head] = episode
        self.head = (self.head + 1) % len(self.owner)

    def clear(self, episode: object) -> None:
        self.owner = [None if owner is episode else owner for owner in self.owner]

    def discard(self, episode: object, length: int) -> None:
        self.clear(episode)
        self.head = (self.head - length) % len(self.owner)

    def __contains__(self, episode: object) -> bool:
        return any(owner is episode for owner in self.owner)
