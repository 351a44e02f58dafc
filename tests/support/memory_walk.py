"""Random calls on a memory and on a model of it, and comparisons of both.

Each step asks `choose` for its choices: in test_memory.py hypothesis answers and can shrink a failure; on long walks
a random generator answers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from memoire.errors import EmptyEpisodeError, EmptyMemory, EpisodeClosedError, EpisodeTooLong, NoDrawsLeft, StaleEntry
from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memory_checks import check_memory

CLOSE = {"rtol": 2e-5, "atol": 2e-5}
ENDINGS = {"classic": None, "final only": None, "terminated": True, "dead end": True, "truncated": False, "cut": False}


def make_schema(reward_shape: tuple, kind: str, is_ragged: bool) -> Schema:
    cloud = {"cloud": Column(np.float32, (None, 3), "state")} if is_ragged else {}
    columns: dict = {
        "obs": {"a": Column(np.float32, (2,), "state"), "b": Column(np.uint8, (), "state"), **cloud},
        "action": Column(np.int64),
        "flag": Column(np.bool_, (3,)),
        "nothing": Column(np.float64, (0,)),
    }
    if kind != "no reward":
        columns["reward"] = Column(np.float32, reward_shape, "reward")
    if kind == "value":
        columns["qvest"] = Column(np.float32, reward_shape, "return")  # in the middle of the columns on purpose
        columns["value"] = Column(np.float32, reward_shape, "value")
    if is_ragged:
        columns["words"] = Column(np.int32, (None,))
    columns["last"] = Column(np.int16, (5,))
    return Schema(columns)


def zeros_of(column: Column) -> np.ndarray:
    """Return zeros in place of a missing value; in a ragged column, no rows."""
    return np.zeros((0, *column.element) if column.is_ragged else column.shape, column.dtype)


class Walk:
    """A memory and its model, built by choices; `step` takes one more. With `is_ragged` two columns are ragged."""

    def __init__(self, choose: Callable[[Sequence[Any]], Any], *, is_ragged: bool = False) -> None:
        self.choose = choose
        capacity = choose([1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 31, 64, 127])
        page_rows = choose([None, 1, 2, 4, 8, 64])
        kind = choose(["value", "value", "reward", "no reward"])
        reward_shape = choose([(), (1,), (2,), (2, 3)])
        self.lanes = choose([1, 1, 2, 4])
        live = choose([False, True])
        self.schema = make_schema(reward_shape, kind, is_ragged)
        self.reward_shape = reward_shape if kind != "no reward" else ()
        parameters = self.parameters()
        self.memory = Memory(self.schema, capacity, parameters, live=live, seed=3, page_rows=page_rows)
        self.memory.set_clock(1000.0)
        self.model = Model(self.schema, capacity, parameters, live)
        self.model.now = 1000.0
        self.version = 4
        self.ring = Ring(capacity) if self.lanes == 1 else None
        self.rng = np.random.default_rng(capacity)
        self.numbers: set[int] = set()
        self.gone: list[int] = []

    STEPS = [*3 * ["add"], *2 * ["extend"], "add_many", *3 * ["close"], "open", "update", "configure", "wait", "draw"]

    def step(self) -> None:
        getattr(self, self.choose(self.STEPS))()
        self.check()

    def parameters(self) -> Parameters:
        size = int(np.prod(self.reward_shape))
        return Parameters(
            priority_exponent=self.choose([0.0, 0.5, 0.6, 1.0]),
            mix_lambda=self.choose([0.0, 0.7, 1.0]),
            frame_stack=self.choose([1, 2, 4]),
            multi_step=self.choose([1, 2, 5]),
            max_episode=self.choose([0, 0, 0, 1, 3]),
            discount=self.choose([(0.9,), (1.0,), tuple(np.linspace(0.0, 1.0, size))]),
            reward_coeff=self.choose([(1.0,), (0.5,), tuple(np.linspace(2.0, 0.0, size))]),
            start=self.choose(["skip", "repeat", "zero"]),
            next=self.schema.names,
            prioritization=self.choose(["proportional", "proportional", "rank", "greedy"]),
            stratified=self.choose([False, True]),
            max_times_sampled=self.choose([0, 0, 1, 3]),
            max_age=self.choose([None, None, 2.0, 5.0]),
            max_model_lag=self.choose([None, None, 0, 2]),
        )

    def values(self, axes: tuple = ()) -> tuple:
        return tuple(self.value(self.schema[name], axes) for name in self.schema.entry_names)

    def value(self, column: Column, axes: tuple = ()) -> Any:
        if column.is_ragged and axes:
            return [self.value(column) for _ in range(axes[0])]
        shape = (self.rng.integers(6), *column.element) if column.is_ragged else axes + column.shape
        return (self.rng.normal(size=shape) * 50 + 50).astype(column.dtype)

    def lane(self) -> int:
        """Return a lane, which mostly has an open episode; open one if need be."""
        lane = self.choose(range(self.lanes))
        if lane not in self.model.lanes and self.choose(range(8)):
            self.open_lane(lane)
        return lane

    def open(self) -> None:
        self.open_lane(self.choose(range(self.lanes)))

    def open_lane(self, lane: int) -> None:
        episodes, old = self.memory.num_episodes, self.model.lanes.get(lane)
        self.memory.open(lane)
        assert self.memory.num_episodes == episodes
        if old is not None:
            self.gone += [entry.number for entry in old.entries]
            if self.ring is not None:
                self.ring.discard(old, len(old.entries))
        self.model.open(lane)
        self.forget()

    def add(self) -> None:
        lane, init_w = self.lane(), self.choose([1.0, 1.0, 0.0, 2.5])
        for _ in range(self.choose([1, 2, 3, 7])):
            values = self.values()
            generated = self.memory.generated
            try:
                number = self.memory.add(lane, values, init_w, self.version)
            except EpisodeClosedError:
                assert lane not in self.model.lanes
                return
            except EpisodeTooLong as error:
                assert generated == self.memory.generated
                assert error.length == len(self.model.lanes[lane].entries)
                if self.ring is None:
                    inside = self.memory.contents()
                    assert inside["takeable_pages"] == 0 or inside["lanes"]["wrapped"][lane]
                else:
                    assert error.length == self.memory.capacity
                return
            self.remember(lane, values, init_w, number, self.version)
            self.forget()

    def extend(self) -> None:
        lane = self.lane()
        count = self.choose([0, 1, 3, self.memory.capacity // 3, self.memory.capacity - 1, self.memory.capacity + 1])
        values, init_w = self.values((count,)), self.rng.choice([0.0, 1.0, 1.5], count)
        length = self.memory.open_length(lane)
        try:
            numbers = self.memory.extend(lane, values, init_w, model_version=self.version)
        except EpisodeClosedError:
            assert lane not in self.model.lanes
            return
        except EpisodeTooLong:
            assert self.memory.open_length(lane) == length
            assert self.ring is None or length + count > self.memory.capacity
            return
        for t, number in enumerate(numbers.tolist()):
            self.remember(lane, [column[t] for column in values], init_w[t], number, self.version)
        self.forget()

    def add_many(self) -> None:
        lanes = [lane for lane in range(self.lanes) if self.choose([False, True, True])]
        for lane in lanes:
            if lane not in self.model.lanes and self.choose(range(16)):
                self.open_lane(lane)
        values, generated = self.values((len(lanes),)), self.memory.generated
        try:
            numbers = self.memory.add_many(lanes, values, 1.0, self.version)
        except EpisodeClosedError:
            assert not set(lanes) <= self.model.lanes.keys() and generated == self.memory.generated
            return
        except EpisodeTooLong:
            assert generated == self.memory.generated
            return
        for i, (lane, number) in enumerate(zip(lanes, numbers.tolist(), strict=True)):
            self.remember(lane, [column[i] for column in values], 1.0, number, self.version)
        self.forget()

    def close(self) -> None:
        lane = self.choose(range(self.lanes))
        length = self.memory.open_length(lane)
        if length <= 0:
            assert (length < 0) == (lane not in self.model.lanes)
            with pytest.raises(EpisodeClosedError if length < 0 else EmptyEpisodeError):
                self.memory.close(lane)
            return
        ending = self.choose(list(ENDINGS))
        terminated = ENDINGS[ending]
        final = bootstrap = None
        if ending in ("terminated", "truncated", "final only"):
            final = {name: self.value(self.schema[name]) for name in self.schema.states}
        if not terminated and self.choose([False, True]):
            bootstrap = self.rng.normal(size=self.reward_shape).astype(np.float32)
        how = {"multiplier": self.choose([1.0, 1.0, 0.5, 0.0])}
        how |= {name: self.choose([True, True, False]) for name in ("update_value", "update_weight")}
        before, limit = self.memory.num_episodes, self.memory.parameters.max_episode
        self.memory.close(lane, final_state=final, terminated=terminated, bootstrap_value=bootstrap, **how)
        assert self.memory.num_episodes == (min(before + 1, limit) if limit else before + 1)
        self.model.close(lane, final=final, terminated=bool(terminated), bootstrap=bootstrap, **how)
        self.forget()

    def update(self) -> None:
        known = [*self.model.weights(), *self.gone[-3:], 10**9, -1]
        chosen = [self.choose(known) for _ in range(self.choose([1, 2, 6]))]
        errors = self.rng.normal(size=len(chosen)) * 3
        assert self.memory.update_priorities(chosen, errors) == self.model.update(chosen, errors)

    def configure(self) -> None:
        parameters = self.parameters()
        self.memory.configure(parameters)
        self.forget()
        self.model.configure(parameters)

    def wait(self) -> None:
        """Let time pass, and newer models arrive."""
        self.model.now += self.choose([0.5, 1.0, 3.0])
        self.memory.set_clock(self.model.now)
        self.version = max(1, self.version + self.choose([-1, 0, 1, 2]))
        if self.choose([False, True]):
            self.model.newest_model = max(self.model.newest_model, self.version + 1)
            self.memory.saw_model(self.version + 1)

    def draw(self) -> None:
        """Draw samples; assert that the weights before allow each, and that no used-up entry is drawn."""
        count, before = self.choose([1, 3, 12]), self.model.weights()
        times = self.model.parameters.max_times_sampled
        entries = self.model.entries()
        left = sum(times - entries[number].drawn for number, weight in before.items() if weight > 0.0)
        assert self.memory.draws_left == (left if times else -1)
        possible = left >= count if times else any(before.values())
        total, positive, _ = self.memory.sums()
        try:
            drawn = self.memory.sample(count)
        except NoDrawsLeft as error:
            assert times and 0 < left < count and (error.left, error.wanted) == (left, count)
            return
        except EmptyMemory:
            assert not possible and not any(before.values())
            return
        assert possible and (drawn.total_weight, drawn.num_positive) == (total, positive)
        numbers = drawn.gathered.ids.tolist()
        self.model.drew(numbers)
        for number in numbers:
            assert before[number] > 0.0
            assert not times or entries[number].drawn <= times
        assert ((drawn.weights > 0.0) & (drawn.weights <= total * (1 + 1e-9))).all()

    def remember(self, lane: int, values: Sequence[Any], init_w: float, number: int, version: int) -> None:
        assert number not in self.numbers
        self.numbers.add(number)
        if self.ring is not None:
            self.ring.add(self.model.lanes[lane])
        named = dict(zip(self.schema.entry_names, values, strict=True))
        self.model.add(lane, named, init_w, number, version)

    def forget(self) -> None:
        """Drop departed episodes from the model; with one lane only the ring, or the limit, may evict episodes."""
        meta = self.memory.contents()["meta"]
        left = self.model.forget(set(meta["number"][meta["episode"] >= 0].tolist()))
        self.gone += [entry.number for episode in left for entry in episode.entries]
        if self.ring is None:
            return
        limited = self.memory.parameters.max_episode > 0
        for episode in left:
            assert limited or episode not in self.ring, "an episode left although its room was not needed"
            self.ring.clear(episode)
        for episode in self.model.closed:
            assert episode in self.ring, "an episode stayed although its room was needed"

    def check(self) -> None:
        """Assert that every report of the memory agrees with the model."""
        memory = self.memory
        check_memory(memory)
        expected = self.model.weights()
        assert memory.num_entries == len(expected)
        assert memory.num_episodes == len(self.model.closed)
        numbers = np.array(list(expected), np.int64)
        weights = memory.contents()["weights"][numbers % memory.capacity]
        np.testing.assert_allclose(weights, list(expected.values()), rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(memory.weights(numbers), self.masses(numbers, weights), rtol=1e-12)
        np.testing.assert_allclose(memory.max_priority, self.model.max_priority, rtol=1e-4)
        if self.gone:
            with pytest.raises(StaleEntry):
                memory.gather([self.gone[-1]])
        drawable = numbers[weights > 0]
        if not len(drawable):
            with pytest.raises(EmptyMemory):
                memory.draw(1)
            return
        drawn = memory.draw(20).tolist() if memory.draws_left in (-1, *range(20, 10**6)) else []
        assert set(drawn) <= set(drawable)
        chosen = drawable if len(drawable) < 6 else self.rng.choice(drawable, 6, replace=False)
        self.compare(memory.gather(chosen), chosen)
        self.model.drew(drawn)

    def masses(self, numbers: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return values proportional to chances; among equal weights the entry in the lower row ranks first."""
        parameters = self.memory.parameters
        if parameters.prioritization == "proportional":
            return weights
        ranks = np.empty(len(numbers))
        ranks[np.lexsort((numbers % self.memory.capacity, -weights))] = np.arange(1, len(numbers) + 1)
        exponent = parameters.priority_exponent if parameters.prioritization == "rank" else 0.0
        return np.where(weights > 0.0, ranks**-exponent, 0.0)

    def compare(self, batch: Any, numbers: np.ndarray) -> None:
        for i, number in enumerate(numbers.tolist()):
            want = self.model.sample(number)
            assert batch.steps[i] == want["steps"]
            assert batch.model_version[i] == want["version"]
            assert batch.age[i] == pytest.approx(want["age"], abs=1e-6)
            np.testing.assert_allclose(batch.reward[i], want["reward"], **CLOSE)
            np.testing.assert_allclose(batch.discount[i], want["discount"], **CLOSE)
            for side, mine in (("prev", batch.prev), ("next", batch.next)):
                assert mine.keys() == want[side].keys()
                for name, value in want[side].items():
                    if self.schema[name].is_ragged:
                        self.compare_ragged(mine[name][i], getattr(batch, f"{side}_lengths")[name][i], value)
                    else:
                        np.testing.assert_allclose(mine[name][i], value, **CLOSE, err_msg=f"{side} {name}")
        np.testing.assert_array_equal(batch.ids, numbers)

    def compare_ragged(self, padded: Any, lengths: Any, values: Any) -> None:
        """Assert that padded rows hold these values, then zeros; for a state `values` is a list of rows."""
        assert lengths.dtype == np.int32
        if not isinstance(values, list):
            padded, lengths, values = [padded], [lengths], [values]
        for row, length, value in zip(padded, lengths, values, strict=True):
            np.testing.assert_array_equal(row[:length], value)
            assert not row[length:].any()


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
        entries = self.entries()
        applied = 0
        for number, error in zip(numbers, errors, strict=True):
            if number in entries:
                entries[number].priority = abs(error) + 1e-6
                entries[number].learned = True
                self.max_priority = max(self.max_priority, entries[number].priority)
                applied += 1
        return applied, len(numbers) - applied

    def drew(self, numbers) -> None:
        entries = self.entries()
        for number in numbers:
            entries[number].drawn += 1

    def is_fresh(self, entry: Entry) -> bool:
        times, age, lag = (getattr(self.parameters, name) for name in ("max_times_sampled", "max_age", "max_model_lag"))
        is_young = age is None or self.now - entry.born <= age
        is_new = lag is None or self.newest_model - entry.version <= lag
        return is_young and is_new and (not times or entry.drawn < times)

    def forget(self, present: set) -> list[Episode]:
        """Drop and return the episodes that have left; assert that each left as a whole, and no open one did."""
        left = []
        for episode in self.episodes():
            count = sum(entry.number in present for entry in episode.entries)
            assert count in (0, len(episode.entries)), "a part of an episode has left"
            if count == 0 and episode.entries:
                assert episode.closed, "an open episode has left"
                left.append(episode)
        self.closed = [episode for episode in self.closed if not any(episode is gone for gone in left)]
        return left

    def episodes(self) -> list[Episode]:
        return [*self.closed, *self.lanes.values()]

    def places(self) -> Iterator[tuple[Episode, int]]:
        return ((episode, t) for episode in self.episodes() for t in range(len(episode.entries)))

    def entries(self) -> dict[int, Entry]:
        return {entry.number: entry for episode in self.episodes() for entry in episode.entries}

    def vector(self, numbers) -> np.ndarray:
        size = int(np.prod(self.reward_shape))
        return np.array(numbers * size if len(numbers) == 1 else numbers).reshape(self.reward_shape)

    def value(self, episode: Episode) -> None:
        """Compute returns by the definition of TD(lambda), forwards from each entry: a mixture of n-step returns."""
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
        # Entries are ranked by the priority itself; an entry of priority 0 ranks last instead of being excluded.
        return 0.0 if share == 0.0 else max(share * (1.0 if entry.priority is None else entry.priority), 1e-280)

    def weights(self) -> dict[int, float]:
        return {episode.entries[t].number: self.weight(episode, t) for episode, t in self.places()}

    def frames(self, episode: Episode, end: int, column: str) -> Any:
        nothing, stack = zeros_of(self.schema[column]), []
        for t in range(end - self.parameters.frame_stack + 1, end + 1):
            if t < 0 and self.parameters.start == "zero":
                stack.append(nothing)
            elif t == len(episode.entries):
                stack.append(nothing if episode.final is None else episode.final[column])
            else:
                stack.append(episode.entries[max(t, 0)].values[column])
        return stack if self.schema[column].is_ragged else np.stack(stack)

    def sample(self, number: int) -> dict:
        """Return the expected sample of an entry that can be drawn."""
        episode, t = next((episode, t) for episode, t in self.places() if episode.entries[t].number == number)
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
                expected["next"][name] = zeros_of(column)
        return expected

    def plain(self, episode: Episode, t: int, name: str) -> np.ndarray:
        if self.schema[name].role == "return":
            return episode.returns[t] if episode.closed else np.zeros(self.reward_shape)
        return episode.entries[t].values[name]


class Ring:
    """Episodes that one lane keeps: rows in a ring. An episode leaves as a whole when one of its rows is needed."""

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
