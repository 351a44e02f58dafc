"""Start states: the best states that were found, from which further episodes begin.

    first ──▶ a ──▶ c      kept: distinct states, the best so many by their cost, and the first one always
          └─▶ b            lineage(c): first, a, c, with the action that led to each

A state's id is a checksum of its columns, so that it is the same on every rank.

Episodes of observers: they become rollouts, and rollouts become batches.

RESULT ──▶ ObservedEpisode ──▶ rollouts_of ──▶ ragged_minibatches
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memoire import Ragged, Rollouts, Schema
from memoire.building import (
    ForkedGenerator,
    Fragment,
    RowSchema,
    checked_names,
    packed_row,
    packed_rows,
    row_schema_from,
    unpacked,
    whole,
)
from memoire.building import name as checked_name
from memoire.errors import DataError, NoSuchField, NothingAllowed, ParameterError
from memoire.kinds import MAX_LINEAGE, StartsStats, unpack

from . import weights
from .saving import packed_tree, warn_of_told


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


Link = tuple[int, Mapping[str, Any]]
"""A state's parent, and the action that led from there."""
TOPIC: Final = "starts/"
"""Ranks tell each other of the best states of NAME on topic starts/NAME."""


class StartStates:
    """States to begin from, of one origin. One thread at a time may use it, and any thread may call `stats`.

    A state is drawn with a probability in proportion to exp(-cost / temperature).

    Args:
        name: Of the origin; ranks exchange states by it.
        schema: Columns of a state, as `Inference` takes them.
        first: The state [*F] that everything begins with. It never leaves.
        key: Called with the columns of a state; returns its cost: the lower, the better.
        keep: States that are kept at most.
        temperature: In the unit of the cost: infinity draws all states equally often, 0 only the best ones.
        action: Columns of an entry that `lineage` tells.
        seed: Of the draws.

    Raises:
        ParameterError, SchemaError, WrongType: an argument is wrong.
    """

    @checked_names()
    def __init__(
        self,
        name: str,
        schema: Any,
        first: Mapping[str, Any],
        key: Callable[[Mapping[str, Any]], float],
        keep: int = 2000,
        *,
        temperature: float = 1.0,
        action: Sequence[str] = (),
        seed: int | None = None,
    ) -> None:
        self.name, self.keep = checked_name("name", name), whole("keep", keep, 1)
        self.schema: RowSchema = row_schema_from("schema", schema)
        self._key, self._action = key, tuple(action)
        if not temperature >= 0.0:
            raise ParameterError("temperature", temperature, "a number of at least 0")
        self._temperature, self._rng = float(temperature), ForkedGenerator(seed)
        self.settings: dict[str, Any] = {
            "keep": keep, "temperature": self._temperature, "action": list(action), "seed": seed,
        }  # fmt: skip
        """What it was told, as `arrays` keeps it; a seed that was restored is in place of None."""
        self._states: dict[int, Start] = {}
        self._links: dict[int, Link] = {}  # also of ancestors that have left
        self._draws = 0
        self._weights: tuple[list[int], NDArray[np.float64]] | None = None  # ids, and the sums of their weights
        self.first = self.add(first)
        """Id of the first state."""
        self.best = self._states[self.first]
        """The state of the lowest cost that was ever there."""

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, state: object) -> bool:
        return state in self._states

    def __getitem__(self, state: int) -> Start:
        """The state of this id. Raises NoSuchField: it is not kept."""
        if state not in self._states:
            raise NoSuchField("start states", str(state), (), ())
        return self._states[state]

    def cost_of(self, columns: Mapping[str, Any]) -> float:
        """What the key says of a state [*F]."""
        cost = float(self._key(columns))
        if not math.isfinite(cost):
            raise ParameterError("key", cost, "a finite cost of each state")
        return cost

    def id_of(self, columns: Mapping[str, Any]) -> int:
        """The id of a state [*F], whether it is kept or not; never 0."""
        return self._packed(columns)[0]

    def add(self, columns: Mapping[str, Any], parent: int = 0, action: Mapping[str, Any] | None = None) -> int:
        """Keep a state [*F] if it is new and good enough; returns its id.

        Args:
            parent: Id of the state before it, which is kept, or leads to one that is.
            action: What led here from there.
        """
        state, rows = self._packed(columns)
        self._keep(Start(state, rows, self.cost_of(columns), parent, dict(action or {})))
        self._trim()
        return state

    def take_in(self, episode: ObservedEpisode) -> int:
        """Keep the states of an episode that are new and good enough; returns how many of them stay."""
        parent = 0 if episode.start is None else episode.start.id
        there = set(self._states)
        for i, columns in enumerate(episode.states()):
            action = {name: np.asarray(episode.columns[name][i]).tolist() for name in self._action}
            state, rows = self._packed(columns)
            self._keep(Start(state, rows, self.cost_of(columns), parent, action))
            parent = state
        self._trim()
        return len(self._states.keys() - there)

    def sample(self) -> Start:
        """Draw a state to begin with."""
        if self._weights is None:
            self._weights = self._weighed()
        self._draws += 1
        ids, sums = self._weights
        return self._states[ids[int(np.searchsorted(sums, self._rng.random() * sums[-1], side="right"))]]

    def lineage(self, state: int | None = None) -> list[tuple[int, Mapping[str, Any]]]:
        """The path that led to a state, the best one by default: ids from the first state on, and the action before
        each; {} before the first one.
        """
        state = self.best.id if state is None else state
        if state not in self._links:
            raise NoSuchField("start states", str(state), (), ())
        path = []
        while state:
            parent, action = self._links[state]
            path.append((state, action))
            state = parent
        return path[::-1]

    def stats(self) -> StartsStats:
        """How many states there are, how good they are, and how the best one came about: by the newest
        ancestors of the best state. Any thread may ask.
        """
        states, (best, links) = self._states, self._best_and_links()
        path: list[int] = []
        state = best.id
        while state:
            path.append(state)
            state = links[state][0]
        costs = [(states[each].cost, step) for step, each in enumerate(reversed(path[1:])) if each in states]
        lineage = (*costs, (best.cost, len(path) - 1))
        return StartsStats(
            self.name, len(states), self._draws, best.cost, states[self.first].cost, lineage[-MAX_LINEAGE:]
        )

    def _best_and_links(self) -> tuple[Start, Mapping[int, Link]]:
        """The best state, and links that lead from it to the first one: also while another thread replaces them."""
        while True:
            best, links = self.best, self._links
            if best.id in links:  # and so are its ancestors: only whole paths leave
                return best, links

    # Ranks and checkpoints

    @property
    def topic(self) -> str:
        """Under which ranks exchange states."""
        return TOPIC + self.name

    def body(self, most: int = 64) -> bytes:
        """The best states with their lineages, to be published on `topic` and given to `merge` elsewhere."""
        chosen = sorted(self._states.values(), key=_rank)[: whole("most", most, 1)]
        return weights.pack(self._arrays(chosen))

    def merge(self, body: bytes) -> int:
        """Take in states of another rank; returns how many are new here.

        Raises:
            DataError: it is not what `body` makes, or of other columns or another first state.
        """
        return self._take(weights.unpack(body, self.topic))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as named arrays [*F], for a checkpoint."""
        own = {"rng": packed_tree(self._rng.bit_generator.state), "settings": packed_tree(self.settings)}
        return self._arrays(list(self._states.values())) | own

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> int:
        """Take in arrays [*F] that `arrays` made, and draw on as they would; returns how many states are new here.

        Settings that differ stay as told, and the log names both.

        Raises:
            DataError: they are damaged, of other columns or another first state, or have settings that are unknown
                here.
            ParameterError: they were drawn by another seed.
        """
        try:
            settings = dict(unpack(arrays["settings"].tobytes()))
            seed = settings["seed"]
            drawn = np.random.default_rng()
            drawn.bit_generator.state = unpack(arrays["rng"].tobytes())
        except (KeyError, ValueError, TypeError) as error:
            raise DataError(self.topic, f"holds no states of {self.name!r} ({error})") from error
        if settings.keys() != self.settings.keys():
            text = f"has the settings {', '.join(settings)}, and here they are {', '.join(self.settings)}"
            raise DataError(self.topic, text)
        if self.settings["seed"] not in (None, seed):
            raise ParameterError("seed", self.settings["seed"], f"{seed}, as in the checkpoint, or left out")
        added = self._take(arrays)
        warn_of_told({**self.settings, "seed": seed}, settings, f"{self.name!r}")
        self.settings["seed"] = seed
        self._rng.bit_generator.state = drawn.bit_generator.state
        return added

    def _take(self, arrays: Mapping[str, NDArray[Any]]) -> int:
        """Take in states with their lineages."""
        try:
            links = {int(state): (int(parent), action) for state, parent, action in unpack(arrays["links"].tobytes())}
            states = unpacked(arrays["states"].tobytes(), self.schema)
        except (KeyError, ValueError, TypeError) as error:
            raise DataError(self.topic, f"holds no states of {self.name!r} ({error})") from error
        if self.first not in links:
            raise DataError(self.topic, f"has another first state than {self.name!r} has here")
        before = len(self._states)
        for columns in states:
            self._adopt(self._packed(columns)[0], columns, links)
        self._trim()
        return len(self._states) - before

    def _adopt(self, state: int, columns: Mapping[str, Any], links: Mapping[int, Any]) -> None:
        """Keep a state of somebody else, with those of its ancestors that are unknown here: no path can run in a
        circle, since one that is known leads to the first state by known ones.
        """
        step, seen = state, set[int]()
        while step and step not in self._links and step not in seen:
            seen.add(step)
            step = links.get(step, (0, {}))[0]
        if step in seen:
            raise DataError(self.topic, f"has a lineage that runs in a circle, at {step}")
        self._links |= {each: links.get(each, (0, {})) for each in seen}
        parent, action = self._links[state]
        self._keep(Start(state, columns, self.cost_of(columns), parent, action))

    def _arrays(self, chosen: Sequence[Start]) -> dict[str, NDArray[Any]]:
        links = self._paths([*(each.id for each in chosen), self.first])
        columns = {name: [each.columns[name] for each in chosen] for name in self.schema.names}
        rows = {name: each if name in self.schema.ragged else np.stack(each) for name, each in columns.items()}
        _, payload = packed_rows(self.schema, rows)
        told = [[state, parent, action] for state, (parent, action) in links.items()]
        return {"states": np.frombuffer(payload, np.uint8), "links": packed_tree(told)}

    def _paths(self, states: Iterable[int]) -> dict[int, Link]:
        """The links that lead to these states from the first one."""
        found: dict[int, Link] = {}
        for state in states:
            while state and state not in found:
                found[state] = self._links[state]
                state = found[state][0]
        return found

    def _packed(self, columns: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        payload = packed_row(self.schema, {name: columns[name] for name in columns if name in self.schema})
        digest = hashlib.blake2b(payload, digest_size=7).digest()  # 56 bits: programs of others have them exactly
        return int.from_bytes(digest, "little") or 1, unpacked(payload, self.schema)[0]

    def _keep(self, state: Start) -> None:
        if state.id in self._states:
            return
        before = state.parent if state.parent in self._links else 0
        self._links.setdefault(state.id, (before, state.action))
        parent, action = self._links[state.id]
        kept = Start(state.id, state.columns, state.cost, parent, action)
        self._states[state.id] = kept
        self._weights = None
        if not hasattr(self, "best") or kept.cost < self.best.cost:
            self.best = kept

    def _trim(self) -> None:
        """Let the worst states leave, and links that lead to nothing."""
        if len(self._states) <= self.keep:
            return
        ranked = sorted(self._states.values(), key=lambda each: (each.id != self.first, *_rank(each)))
        self._states = {each.id: each for each in sorted(ranked[: self.keep], key=_rank)}
        self._weights = None
        self._links = self._paths([*self._states, self.best.id])

    def _weighed(self) -> tuple[list[int], NDArray[np.float64]]:
        costs = np.array([each.cost for each in self._states.values()])
        above = costs - costs.min()
        scaled = (above == 0.0) if self._temperature == 0.0 else np.exp(-above / self._temperature)
        return list(self._states), np.cumsum(scaled.astype(np.float64))


def _rank(state: Start) -> tuple[float, int]:
    return state.cost, state.id
