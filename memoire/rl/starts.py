"""Start states: the best known states, from which further episodes begin, and the episodes of observers.

    first ──▶ a ──▶ c      kept: the first state, and the best others by cost; all are distinct
          └─▶ b            lineage(c): first, a, c, each with the action that led to it

The id of a state is a checksum of its columns, so it is the same on every rank.

The episodes of observers become rollouts, and rollouts become batches:

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
from memoire.errors import DataError, NoActionAllowed, NoSuchField, ParameterError
from memoire.kinds import MAX_LINEAGE, StartsStats, unpack

from . import weights
from .saving import packed_tree, warn_of_changed_settings


class Origin(Protocol):
    """Source of start states, such as `StartStates`."""

    schema: RowSchema

    def cost_of(self, columns: Mapping[str, Any]) -> float:
        """Return the cost of a state, columns [*F]."""

    def take_in(self, episode: ObservedEpisode) -> int:
        """Keep those states of an episode that are new and good enough; return how many."""


@dataclass(frozen=True)
class Start:
    """A state that `StartStates` keeps."""

    id: int
    columns: Mapping[str, Any]
    """The state's columns, [*F] each."""
    cost: float
    parent: int
    """Id of the parent, the state before; 0 for the first state, or if unknown."""
    action: Mapping[str, Any]
    """Action that led from the parent to this state: some columns of the entry."""


@dataclass(frozen=True)
class ObservedEpisode:
    """One episode that an observer has run."""

    job: int
    """Number of the observer's job."""
    fragment: Fragment
    """Entries of the episode; `Rollouts` are made of fragments."""
    options: Mapping[str, Any]
    start: Start | None = None
    """Start state of the episode; None if the start was not drawn."""
    source: Origin | None = None
    """Source from which the start state was drawn."""

    def __len__(self) -> int:
        return len(self.fragment)

    @property
    def columns(self) -> dict[str, Any]:
        """Columns [T, *F] of the episode's T entries; a ragged column is a `Ragged`."""
        return self.fragment.episode.columns

    @property
    def final(self) -> dict[str, NDArray[Any]] | None:
        """The state after the last entry, each state column [*F]; None if the observer did not send it."""
        return self.fragment.episode.final_state

    @property
    def terminated(self) -> bool:
        """True if the episode ended in a terminal state."""
        return bool(self.fragment.episode.terminated)

    @property
    def observer(self) -> bytes:
        """Client id of the observer, 16 bytes."""
        return self.fragment.client

    @property
    def version(self) -> int:
        """Lowest version of the models that acted."""
        return self.fragment.oldest_model

    @property
    def start_cost(self) -> float:
        """Cost of the start state; NaN if it was not drawn."""
        return float("nan") if self.start is None else self.start.cost

    @property
    def cost(self) -> float:
        """Lowest cost of the states after the start state; NaN if that was not drawn."""
        if self.source is None:
            return float("nan")
        return min(map(self.source.cost_of, self.states()), default=self.start_cost)

    def states(self) -> Iterator[dict[str, Any]]:
        """Yield the states after the start state in order, each column [*F], with the final state last."""
        names = self.fragment.episode.columns if self.source is None else self.source.schema.names
        for i in range(1, len(self)):
            yield {name: self.columns[name][i] for name in names}
        if self.final is not None:
            yield {name: self.final[name] for name in names}


def rollouts_of(schema: Schema, episodes: Sequence[ObservedEpisode]) -> Rollouts:
    """Return all entries of these episodes, in order, as `Rollouts`. Raises ParameterError without episodes."""
    if not episodes:
        raise ParameterError("episodes", "none", "at least one")
    return Rollouts.from_fragments(schema, [each.fragment for each in episodes], time.monotonic())


def ragged_minibatches(
    rollouts: Rollouts, size: int, epochs: int = 1, rng: np.random.Generator | None = None
) -> Iterator[tuple[NDArray[np.int64], dict[str, NDArray[Any]]]]:
    """Yield indices [B] and columns [B, *F] of entries in random order; each entry comes once an epoch.

    Each ragged column is padded with zeros to the longest value of its batch; `NAME_length` [B] holds the lengths.

    Args:
        rollouts: N entries.
        size: Entries of a batch, B; an epoch's last batch may have fewer.
        epochs: Number of times that each entry comes.
        rng: A NumPy generator; None makes a random one.
    """
    for index in rollouts.minibatches(size, epochs, rng):
        yield index, padded_columns({name: values[index] for name, values in rollouts.columns.items()})


def padded_columns(columns: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Pad ragged columns with zeros, and add `NAME_length` [B] for each; other columns [B, *F] are not changed."""
    padded: dict[str, NDArray[Any]] = {}
    for name, values in columns.items():
        if isinstance(values, Ragged):
            padded[name], padded[f"{name}_length"] = values.padded(), values.lengths
        else:
            padded[name] = values
    return padded


def sample_masked(logits: ArrayLike, mask: ArrayLike, rng: np.random.Generator) -> tuple[Any, Any]:
    """Return sampled actions int64 [*N] and their log probabilities float32 [*N], by the softmax of allowed logits.

    Args:
        logits: [*N, A].
        mask: bool [*N, A]; True allows the action.

    Raises:
        NoActionAllowed: a row allows no action; names the row.
        ParameterError: shapes differ, or an allowed logit is NaN or infinite.
    """
    scores, allowed = np.asarray(logits, np.float64), np.asarray(mask, np.bool_)
    if scores.shape != allowed.shape or not scores.ndim:
        raise ParameterError("mask", f"shape {allowed.shape}", f"shape {scores.shape} of the logits, [*N, A]")
    empty = np.argwhere(~allowed.any(-1))
    if len(empty):
        raise NoActionAllowed("the only row" if scores.ndim == 1 else f"row {empty[0].tolist()}", scores.shape[-1])
    if not np.isfinite(scores[allowed]).all():
        raise ParameterError("logits", "NaN or infinity where the mask allows it", "finite numbers")
    shifted = np.where(allowed, scores, -np.inf)
    shifted = shifted - shifted.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    # Gumbel (1954): the index of the largest sum is a sample of the softmax.
    choice = np.where(allowed, logs + rng.gumbel(size=scores.shape), -np.inf).argmax(-1)
    logp = np.take_along_axis(logs, np.expand_dims(choice, -1), -1)[..., 0]
    return choice, logp.astype(np.float32)


Link = tuple[int, Mapping[str, Any]]
"""Parent of a state, and the action that led from the parent to it."""
TOPIC: Final = "starts/"
"""Prefix of topics: ranks exchange the best states of NAME on topic starts/NAME."""


class StartStates:
    """Set of the best states to begin from. One thread at a time may use it; any thread may call `stats`.

    The probability of drawing a state is proportional to exp(-cost / temperature).

    Args:
        name: Name of the source; ranks exchange states under it.
        schema: Columns of a state, as `Inference` takes them.
        first: First state, columns [*F]. The first state is never evicted.
        key: Called with the columns of a state; returns its cost, which is low for good states.
        keep: Most states that are kept.
        temperature: In the unit of the cost: infinity draws all states equally often, 0 only the best ones.
        action: Columns of an entry that `lineage` returns as the action.
        seed: Seed of the draws; None takes entropy from the system.

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
        """Settings as `arrays` saves them. After `restore` the restored seed replaces None."""
        self._states: dict[int, Start] = {}
        self._links: dict[int, Link] = {}  # links of states and of evicted ancestors
        self._draws = 0
        self._weights: tuple[list[int], NDArray[np.float64]] | None = None  # ids, cumulative sums of weights
        self.first = self.add(first)
        """Id of the first state."""
        self.best = self._states[self.first]
        """State of the lowest cost so far, kept or evicted."""

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, state: object) -> bool:
        return state in self._states

    def __getitem__(self, state: int) -> Start:
        """Return the state with this id. Raises NoSuchField if it is not kept."""
        if state not in self._states:
            raise NoSuchField("start states", str(state), (), ())
        return self._states[state]

    def cost_of(self, columns: Mapping[str, Any]) -> float:
        """Return the cost of a state [*F] by the key. Raises ParameterError if it is not finite."""
        cost = float(self._key(columns))
        if not math.isfinite(cost):
            raise ParameterError("key", cost, "a finite cost of each state")
        return cost

    def id_of(self, columns: Mapping[str, Any]) -> int:
        """Return the id of a state [*F], kept or not; never 0."""
        return self._pack_state(columns)[0]

    def add(self, columns: Mapping[str, Any], parent: int = 0, action: Mapping[str, Any] | None = None) -> int:
        """Keep a state [*F] if it is new and good enough; return its id.

        Args:
            parent: Id of the state before it, which is kept, or an ancestor of a kept state.
            action: The action that led from the parent to the state.
        """
        state, rows = self._pack_state(columns)
        self._keep(Start(state, rows, self.cost_of(columns), parent, dict(action or {})))
        self._trim()
        return state

    def take_in(self, episode: ObservedEpisode) -> int:
        """Keep those states of an episode that are new and good enough; return how many were added."""
        parent = 0 if episode.start is None else episode.start.id
        before = set(self._states)
        for i, columns in enumerate(episode.states()):
            action = {name: np.asarray(episode.columns[name][i]).tolist() for name in self._action}
            state, rows = self._pack_state(columns)
            self._keep(Start(state, rows, self.cost_of(columns), parent, action))
            parent = state
        self._trim()
        return len(self._states.keys() - before)

    def sample(self) -> Start:
        """Draw a start state; a state of low cost is drawn more often."""
        if self._weights is None:
            self._weights = self._cumulative_weights()
        self._draws += 1
        ids, sums = self._weights
        return self._states[ids[int(np.searchsorted(sums, self._rng.random() * sums[-1], side="right"))]]

    def lineage(self, state: int | None = None) -> list[tuple[int, Mapping[str, Any]]]:
        """Return the path to a state, by default the best: ids from the first state on, with the actions between."""
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
        """Return counts, costs and the newest ancestors of the best state. The method may be called by any thread."""
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
        """Return the best state and the links from that state to the first one; also while other threads write."""
        while True:
            best, links = self.best, self._links
            if best.id in links:  # all ancestors of a linked state are linked, since only whole paths are evicted
                return best, links

    # Ranks and checkpoints

    @property
    def topic(self) -> str:
        """Topic on which ranks exchange states."""
        return TOPIC + self.name

    def body(self, most: int = 64) -> bytes:
        """Return a body of the best states and their lineages, to publish on `topic` and to `merge` on other ranks."""
        best = sorted(self._states.values(), key=_sort_key)[: whole("most", most, 1)]
        return weights.pack(self._arrays(best))

    def merge(self, body: bytes) -> int:
        """Add the states of another rank's `body`; return how many are new.

        Raises:
            DataError: `body` is malformed, or has other columns or another first state.
        """
        return self._take(weights.unpack(body, self.topic))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the whole state as named arrays [*F], for a checkpoint."""
        random_state = {"rng": packed_tree(self._rng.bit_generator.state), "settings": packed_tree(self.settings)}
        return self._arrays(list(self._states.values())) | random_state

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> int:
        """Add the states of arrays [*F] from `arrays` and continue its random draws; return how many states are new.

        Settings that differ keep their new values; the log names both values.

        Raises:
            DataError: the arrays are damaged, have other columns or another first state, or have unknown settings.
            ParameterError: the arrays were drawn with another seed.
        """
        try:
            settings = dict(unpack(arrays["settings"].tobytes()))
            seed = settings["seed"]
            generator = np.random.default_rng()
            generator.bit_generator.state = unpack(arrays["rng"].tobytes())
        except (KeyError, ValueError, TypeError) as error:
            raise DataError(self.topic, f"holds no states of {self.name!r} ({error})") from error
        if settings.keys() != self.settings.keys():
            text = f"has the settings {', '.join(settings)}; expected {', '.join(self.settings)}"
            raise DataError(self.topic, text)
        if self.settings["seed"] not in (None, seed):
            raise ParameterError("seed", self.settings["seed"], f"{seed}, as in the checkpoint, or left out")
        added = self._take(arrays)
        warn_of_changed_settings({**self.settings, "seed": seed}, settings, f"StartStates {self.name!r}")
        self.settings["seed"] = seed
        self._rng.bit_generator.state = generator.bit_generator.state
        return added

    def _take(self, arrays: Mapping[str, NDArray[Any]]) -> int:
        """Add states with their lineages; return how many are new."""
        try:
            links = {int(state): (int(parent), action) for state, parent, action in unpack(arrays["links"].tobytes())}
            states = unpacked(arrays["states"].tobytes(), self.schema)
        except (KeyError, ValueError, TypeError) as error:
            raise DataError(self.topic, f"holds no states of {self.name!r} ({error})") from error
        if self.first not in links:
            raise DataError(self.topic, f"has another first state than these StartStates {self.name!r}")
        before = len(self._states)
        for columns in states:
            self._adopt(self._pack_state(columns)[0], columns, links)
        self._trim()
        return len(self._states) - before

    def _adopt(self, state: int, columns: Mapping[str, Any], links: Mapping[int, Any]) -> None:
        """Keep a state of another rank, and its unknown ancestors. Raises DataError for a lineage that is a cycle.

        Every known state is linked to the first state, so the search ends at the first known ancestor.
        """
        step, seen = state, set[int]()
        while step and step not in self._links and step not in seen:
            seen.add(step)
            step = links.get(step, (0, {}))[0]
        if step in seen:
            raise DataError(self.topic, f"has a lineage with a cycle at state {step}")
        self._links |= {each: links.get(each, (0, {})) for each in seen}
        parent, action = self._links[state]
        self._keep(Start(state, columns, self.cost_of(columns), parent, action))

    def _arrays(self, states: Sequence[Start]) -> dict[str, NDArray[Any]]:
        links = self._paths([*(each.id for each in states), self.first])
        columns = {name: [each.columns[name] for each in states] for name in self.schema.names}
        rows = {name: each if name in self.schema.ragged else np.stack(each) for name, each in columns.items()}
        _, payload = packed_rows(self.schema, rows)
        link_rows = [[state, parent, action] for state, (parent, action) in links.items()]
        return {"states": np.frombuffer(payload, np.uint8), "links": packed_tree(link_rows)}

    def _paths(self, states: Iterable[int]) -> dict[int, Link]:
        """Return the links from the first state to these states."""
        links: dict[int, Link] = {}
        for state in states:
            while state and state not in links:
                links[state] = self._links[state]
                state = links[state][0]
        return links

    def _pack_state(self, columns: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        payload = packed_row(self.schema, {name: columns[name] for name in columns if name in self.schema})
        digest = hashlib.blake2b(payload, digest_size=7).digest()  # 56 bits, which fit any integer of JSON
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
        """Evict the worst states beyond `keep`, and links without states."""
        if len(self._states) <= self.keep:
            return
        ranked = sorted(self._states.values(), key=lambda each: (each.id != self.first, *_sort_key(each)))
        self._states = {each.id: each for each in sorted(ranked[: self.keep], key=_sort_key)}
        self._weights = None
        self._links = self._paths([*self._states, self.best.id])

    def _cumulative_weights(self) -> tuple[list[int], NDArray[np.float64]]:
        costs = np.array([each.cost for each in self._states.values()])
        above = costs - costs.min()
        scaled = (above == 0.0) if self._temperature == 0.0 else np.exp(-above / self._temperature)
        return list(self._states), np.cumsum(scaled.astype(np.float64))


def _sort_key(state: Start) -> tuple[float, int]:
    return state.cost, state.id
