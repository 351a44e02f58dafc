"""Start states: the best states that were found, from which further episodes begin.

    first ──▶ a ──▶ c      kept: distinct states, the best so many by their cost, and the first one always
          └─▶ b            lineage(c): first, a, c, with the action that led to each

A state's id is a checksum of its columns, so that it is the same on every rank.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memoire.arguments import name as checked_name
from memoire.arguments import whole
from memoire.errors import DataError, NoSuchField, ParameterError
from memoire.inference.computation import packed_row, packed_rows, unpacked
from memoire.inference.stats import MAX_LINEAGE, StartsStats
from memoire.replay.forks import ForkedGenerator
from memoire.replay.row_schema import RowSchema, row_schema_from
from memoire.suggestions import checked_names

from . import weights
from .agent_state import warn_of_told
from .episodes import ObservedEpisode, Start

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
        self._links: dict[
            int, tuple[int, Mapping[str, Any]]
        ] = {}  # parent and action, also of ancestors that have left
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
        """How many states there are, how good they are, and how the best one came about. Any thread may ask."""
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

    def _best_and_links(self) -> tuple[Start, Mapping[int, tuple[int, Mapping[str, Any]]]]:
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
        own = {"rng": _text(self._rng.bit_generator.state), "settings": _text(self.settings)}
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
            settings = dict(json.loads(_bytes(arrays["settings"])))
            seed = settings["seed"]
            drawn = np.random.default_rng()
            drawn.bit_generator.state = json.loads(_bytes(arrays["rng"]))
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
            links = {int(state): (int(parent), action) for state, parent, action in json.loads(_bytes(arrays["links"]))}
            states = unpacked(_bytes(arrays["states"]), self.schema)
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
        links = {state: link for each in chosen for state, link in self._path(each.id).items()}
        links[self.first] = self._links[self.first]
        columns = {name: [each.columns[name] for each in chosen] for name in self.schema.names}
        _, payload = packed_rows(
            self.schema, {name: _side_by_side(self.schema, name, columns[name]) for name in columns}
        )
        told = [[state, parent, action] for state, (parent, action) in links.items()]
        return {"states": np.frombuffer(payload, np.uint8), "links": _text(told)}

    def _path(self, state: int) -> dict[int, tuple[int, Mapping[str, Any]]]:
        found: dict[int, tuple[int, Mapping[str, Any]]] = {}
        while state and state not in found:
            found[state] = self._links[state]
            state = found[state][0]
        return found

    def _packed(self, columns: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        payload = packed_row(self.schema, {name: columns[name] for name in columns if name in self.schema})
        digest = hashlib.blake2b(payload, digest_size=7).digest()  # 56 bits: JSON of others has them exactly
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
        paths: dict[int, tuple[int, Mapping[str, Any]]] = {}
        for state in (*self._states, self.best.id):
            while state and state not in paths:
                paths[state] = self._links[state]
                state = paths[state][0]
        self._links = paths

    def _weighed(self) -> tuple[list[int], NDArray[np.float64]]:
        costs = np.array([each.cost for each in self._states.values()])
        above = costs - costs.min()
        scaled = (above == 0.0) if self._temperature == 0.0 else np.exp(-above / self._temperature)
        return list(self._states), np.cumsum(scaled.astype(np.float64))


def _rank(state: Start) -> tuple[float, int]:
    return state.cost, state.id


def _side_by_side(schema: RowSchema, name: str, values: list[Any]) -> Any:
    return values if name in schema.ragged else np.stack([np.asarray(value) for value in values])


def _text(value: Any) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _bytes(array: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()
