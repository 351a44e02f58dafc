"""Rollouts: recorded entries in order, which an on-policy learner takes once, and estimators on them.

    fragments of two actors    a a a | b b | a a         lengths [3, 2, 2]
    columns                    [7, *F], one entry after the other, without padding
    final                      [3, *F], the state behind each fragment's last entry

A fragment is a part of an episode: consecutive entries of one environment. A fragment can be split anywhere, since
the state behind an entry is the next one's.

The estimators are generalized advantages and V-trace targets, in pure NumPy:

    lengths [3, 2]     entries  0 1 2 | 3 4          one fragment after the other, without padding
    bootstrap [2]      value of the state behind entry 2, and of the one behind entry 4

A loop runs backwards over the steps of the longest fragment; each step is computed for all fragments at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memoire.arguments import whole
from memoire.errors import NoSuchField, ParameterError, WrongType

from .columns import Ragged
from .dataset import Episode
from .sampling import ForkedGenerator
from .schema import Schema

Float32s = NDArray[np.float32]


def gae(
    rewards: ArrayLike, values: ArrayLike, bootstrap: ArrayLike, lengths: ArrayLike, discount: float, lam: float
) -> tuple[Float32s, Float32s]:
    """Return advantages and returns of N entries in F fragments, one after the other.

    delta_t = r_t + discount * V(s_t+1) - V(s_t) and A_t = delta_t + discount * lam * A_t+1 within a fragment; the
    return is A_t + V(s_t). Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage
    Estimation, ICLR 2016, equation 16.

    Args:
        rewards: [N], or [N, *R] of a reward with several dimensions.
        values: Value of each entry's state, in the shape of `rewards`.
        bootstrap: [F], or [F, *R]: value of the state behind each fragment's last entry; 0 if it terminated.
        lengths: [F] entries of each fragment; their sum is N.
        discount: gamma, in [0, 1].
        lam: lambda, in [0, 1]: 0 looks one step ahead, 1 sums all rewards.

    Returns:
        Advantages and returns, both float32 in the shape of `rewards`.
    """
    r, v, last, counts = _checked(rewards, values, bootstrap, lengths)
    _fraction("discount", discount)
    _fraction("lam", lam)
    deltas = r + discount * _shift(v, last, counts) - v
    advantages = _accumulate(deltas, np.full(r.shape, discount * lam), counts)
    return advantages.astype(np.float32), (advantages + v).astype(np.float32)


def vtrace(
    rewards: ArrayLike,
    values: ArrayLike,
    bootstrap: ArrayLike,
    lengths: ArrayLike,
    log_ratios: ArrayLike,
    discount: float,
    *,
    lam: float = 1.0,
    rho_max: float = 1.0,
    c_max: float = 1.0,
) -> tuple[Float32s, Float32s]:
    """Return V-trace targets and policy-gradient advantages of N entries in F fragments.

    Espeholt et al., IMPALA, ICML 2018, equation 1: v_s = V(s) + sum of (discount^t prod c) rho delta; the advantage is
    rho (r + discount * v_s+1 - V(s)). With equal policies targets are those of `gae` with the same `lam`.

    Args:
        rewards, values, bootstrap, lengths, discount: As for `gae`.
        log_ratios: [N] log of the learner's probability of each action over that of the policy that acted.
        lam: Factor of the trace coefficients c, in [0, 1].
        rho_max, c_max: Largest importance ratios, above 0.

    Returns:
        Targets and advantages, both float32 in the shape of `rewards`.
    """
    r, v, last, counts = _checked(rewards, values, bootstrap, lengths)
    _fraction("discount", discount)
    _fraction("lam", lam)
    logs = np.asarray(log_ratios, np.float64)
    if logs.shape != r.shape[:1] or np.isnan(logs).any():
        raise ParameterError("log_ratios", f"shape {logs.shape}", f"a number for each entry, shape {r.shape[:1]}")
    ratio = np.exp(np.minimum(logs, 50.0)).reshape(-1, *([1] * (r.ndim - 1)))
    rho, c = np.minimum(ratio, rho_max), np.minimum(ratio, c_max)
    deltas = rho * (r + discount * _shift(v, last, counts) - v)
    targets = v + _accumulate(deltas, np.broadcast_to(discount * lam * c, r.shape), counts)
    advantages = rho * (r + discount * _shift(targets, last, counts) - v)
    return targets.astype(np.float32), advantages.astype(np.float32)


def _checked(
    rewards: ArrayLike, values: ArrayLike, bootstrap: ArrayLike, lengths: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    r, v = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    last, counts = np.asarray(bootstrap, np.float64), np.asarray(lengths, np.int64)
    if counts.ndim != 1 or (counts < 1).any() or r.ndim < 1 or int(counts.sum()) != len(r):
        received = f"{counts.size} lengths that add up to {int(counts.sum())}, for {np.shape(rewards)}"
        raise ParameterError(
            "lengths", received, "one for each fragment, at least 1, that add up to the number of entries"
        )
    shapes: tuple[tuple[str, NDArray[Any], tuple[int, ...]], ...] = (
        ("values", v, r.shape),
        ("bootstrap", last, (len(counts), *r.shape[1:])),
    )
    for name, array, shape in shapes:
        if array.shape != shape:
            raise ParameterError(name, f"shape {array.shape}", f"shape {shape}")
        if not np.isfinite(array).all():
            raise ParameterError(name, "a value that is not finite", "finite values: the value network's")
    return r, v, last, counts


def _fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ParameterError(name, value, "a number in [0, 1]")


def _shift(values: NDArray[np.float64], last: NDArray[np.float64], lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the value behind each entry: that of the next entry, or `last` at a fragment's end."""
    following = np.empty_like(values)
    following[:-1] = values[1:]
    following[np.cumsum(lengths) - 1] = last
    return following


def _accumulate(
    deltas: NDArray[np.float64], factors: NDArray[np.float64], lengths: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return x with x_t = delta_t + factor_t * x_t+1 within each fragment, and 0 behind its end."""
    order = np.argsort(-lengths, kind="stable")
    sizes, ends = lengths[order], np.cumsum(lengths)[order]
    sums = np.zeros_like(deltas)
    longest = int(sizes[0]) if len(sizes) else 0
    alive = np.searchsorted(-sizes, -np.arange(1, longest + 1), side="right")  # fragments of at least 1, 2, ... entries
    for back, count in enumerate(alive.tolist(), 1):
        rows = ends[:count] - back
        sums[rows] = deltas[rows] + (factors[rows] * sums[rows + 1] if back > 1 else 0.0)
    return sums


@dataclass(frozen=True, slots=True)
class Fragment:
    """Consecutive entries of one environment, with the client that recorded them. Arrays are never changed."""

    client: bytes
    """Id of the client, 16 bytes."""
    number: int
    """Client's number of the fragment, kept by both parts of a split."""
    episode: Episode
    """The T entries, with columns [T, *F]."""
    age: NDArray[np.float32]
    """[T] seconds since the entries were recorded, at arrival."""
    arrived: float
    """Time of arrival, by the clock of the pool that holds the fragment."""

    def __len__(self) -> int:
        return len(self.episode)

    @property
    def oldest_model(self) -> int:
        """Lowest version of the models that made the entries."""
        return int(self.episode.model_version.min())

    def split(self, at: int, schema: Schema) -> tuple[Fragment, Fragment]:
        """Return the first `at` entries, cut off in the state of the next entry, and the remaining entries."""
        whole_one, columns = self.episode, self.episode.columns
        final = {name: columns[name][at] for name in schema.states}
        value = None if schema.value is None else np.asarray(columns[schema.value][at], np.float32)
        head = self._part(slice(0, at), final_state=final, terminated=False, bootstrap_value=value, is_cut=True)
        kept = {name: getattr(whole_one, name) for name in ("final_state", "terminated", "bootstrap_value", "is_cut")}
        return head, self._part(slice(at, len(self)), **kept)

    def _part(self, rows: slice, **ending: Any) -> Fragment:
        of = self.episode
        arrays = {name: array[rows] for name, array in of.columns.items()}
        born = None if of.born is None else of.born[rows]
        facts: dict[str, Any] = {
            "init_w": of.init_w[rows],
            "learned": of.learned[rows],
            "model_version": of.model_version[rows],
        }
        part = dataclasses.replace(of, columns=arrays, born=born, **facts, **ending)
        return dataclasses.replace(self, episode=part, age=self.age[rows])


class Rollouts:
    """Fragments that a learner took, oldest first; each entry is handed out once.

    Shapes: N entries of all fragments, one after the other; F fragments; *S a column's own shape, *R the reward's.

        rollouts["obs"]     [N, *S] of each column but the return; nested columns by root or by leaf, ragged columns
                            as `Ragged`
        final["obs"]        [F, *S] of each state column: the state behind the last entry; zeros if unknown
        lengths             int64 [F] entries of each fragment; their sum is N
        terminated          bool [F] True if the episode ended there in a terminal state
        truncated           bool [F] True if the episode ended there otherwise; a cut episode continues
        has_final           bool [F] True if the state behind the last entry is known
        bootstrap           float32 [F, *R] value of that state, from the actor or the next entry; 0 after a terminal
                            state, and NaN if unknown
        model_version       int64 [N] versions of the models that acted; 0: unknown
        age                 float32 [N] seconds since the entries were recorded, when they were taken
        client              uint8 [F, 16] ids of the clients that recorded them
        discount            gamma of the table that they were taken from, per reward dimension or one number for all;
                            None without a table

    Arrays belong to the caller.

    Example:
        rollouts = table.take(128)
        advantages, returns = rollouts.gae(np.zeros(len(rollouts)), np.zeros(len(rollouts.lengths)))
    """

    def __init__(
        self,
        schema: Schema,
        columns: Mapping[str, Any],
        final: Mapping[str, Any],
        facts: Mapping[str, NDArray[Any]],
        discount: tuple[float, ...] | None = None,
    ) -> None:
        self._schema, self.discount = schema, discount
        self.columns, self.final = dict(columns), dict(final)
        self.lengths, self.terminated, self.truncated = facts["lengths"], facts["terminated"], facts["truncated"]
        self.has_final, self.bootstrap, self.client = facts["has_final"], facts["bootstrap"], facts["client"]
        self.model_version, self.age = facts["model_version"], facts["age"]

    @classmethod
    def from_fragments(
        cls, schema: Schema, fragments: Sequence[Fragment], now: float, discount: tuple[float, ...] | None = None
    ) -> Rollouts:
        """Copy fragments together. `now` is on the clock of their arrival; `discount` is the table's."""
        episodes = [fragment.episode for fragment in fragments]
        columns = {
            name: _joined([each.columns[name] for each in episodes], schema, name) for name in schema.entry_names
        }
        final = {name: _finals([each.final_state for each in episodes], schema, name) for name in schema.states}
        known = np.array([each.final_state is not None for each in episodes])
        facts: dict[str, NDArray[Any]] = {
            "lengths": np.array([len(each) for each in episodes], np.int64),
            "terminated": np.array([bool(each.terminated) for each in episodes]),
            "truncated": np.array([not each.terminated and not each.is_cut for each in episodes]),
            "has_final": known,
            "bootstrap": np.stack([_bootstrap(each, schema) for each in episodes]),
            "model_version": np.concatenate([each.model_version for each in episodes]),
            "age": np.concatenate([each.age + np.float32(max(0.0, now - each.arrived)) for each in fragments]),
            "client": np.array([np.frombuffer(each.client, np.uint8) for each in fragments]),
        }
        return cls(schema, columns, final, facts, discount)

    @property
    def schema(self) -> Schema:
        """The columns of an entry."""
        return self._schema

    def __len__(self) -> int:
        """Return N, the number of entries in all fragments."""
        return len(self.model_version)

    def __getitem__(self, name: str) -> Any:
        """Return a column by its name, or a nested one by its root. Raises NoSuchField."""
        if name in self.columns:
            return self.columns[name]
        if name in self._schema.roots and name != self._schema.qvest:
            return self._schema.nest(name, {leaf: self.columns[leaf] for leaf in self._schema.leaves(name)})
        raise NoSuchField("rollouts", repr(name), (), tuple(self.columns))

    def __contains__(self, name: object) -> bool:
        return name in self.columns or (name in self._schema.roots and name != self._schema.qvest)

    def __repr__(self) -> str:
        versions = f"models {self.model_version.min()} to {self.model_version.max()}" if len(self) else "no models"
        return f"<rollouts: {len(self)} entries in {len(self.lengths)} fragments, {versions}>"

    def padded(self) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]:
        """Return (columns, mask), for recurrent networks: every column but ragged ones as [F, T, *S], padded with zeros
        to the longest fragment T, and the mask [F, T], True for entries.
        """
        mask = np.arange(int(self.lengths.max(initial=0))) < self.lengths[:, None]
        arrays: dict[str, NDArray[Any]] = {}
        for name, values in self.columns.items():
            if not isinstance(values, Ragged):
                arrays[name] = np.zeros((*mask.shape, *values.shape[1:]), values.dtype)
                arrays[name][mask] = values
        return arrays, mask

    def minibatches(
        self, size: int, epochs: int = 1, rng: np.random.Generator | None = None
    ) -> Iterator[NDArray[np.int64]]:
        """Return an iterator of shuffled indices [B]: each entry once an epoch; an epoch's last ones may be fewer.

        Args:
            size: Entries B of a minibatch, at least 1.
            epochs: Number of passes over all entries, at least 1.
            rng: A NumPy generator; None makes a random one.
        """
        size, epochs = whole("size", size, 1), whole("epochs", epochs, 1)
        if rng is not None and not isinstance(rng, np.random.Generator):
            raise WrongType("rng", "a numpy.random.Generator or None", type(rng).__name__)
        return self._minibatches(size, epochs, ForkedGenerator() if rng is None else rng)

    def _minibatches(self, size: int, epochs: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        for _ in range(epochs):
            order = rng.permutation(len(self))
            for begin in range(0, len(order), size):
                yield order[begin : begin + size]

    def gae(
        self, values: ArrayLike, final_values: ArrayLike, discount: float | None = None, lam: float = 0.95
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return generalized advantages and returns, both in the shape of the rewards; see the function `gae`.

        Args:
            values: [N, *R] of the entries' states.
            final_values: [F, *R] of the final states; those of terminal states are ignored.
            discount: gamma; None takes the table's. Required for rollouts without a table.
            lam: lambda, in [0, 1].

        Raises:
            ParameterError: `discount` differs from the table's, or is missing without a table; or a shape is wrong.
        """
        gamma = self.gamma(discount)
        return gae(self._rewards(), values, self._behind(final_values), self.lengths, gamma, lam)

    def vtrace(
        self,
        values: ArrayLike,
        final_values: ArrayLike,
        log_ratios: ArrayLike,
        discount: float | None = None,
        *,
        lam: float = 1.0,
        rho_max: float = 1.0,
        c_max: float = 1.0,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return V-trace targets and advantages, both in the shape of the rewards; see the function `vtrace`.

        Args:
            values, final_values, discount: As for `gae`.
            log_ratios: [N] log of the learner's probability of each action over that of the policy that acted.
        """
        ends = self._behind(final_values)
        options = {"lam": lam, "rho_max": rho_max, "c_max": c_max}
        gamma = self.gamma(discount)
        return vtrace(self._rewards(), values, ends, self.lengths, log_ratios, gamma, **options)

    def gamma(self, given: float | None = None, name: str = "discount") -> float:
        """Return the discount of all reward dimensions: the table's, or `given` without a table.

        Args:
            name: Name of `given` in errors.

        Raises:
            ParameterError: `given` differs from the table's, it is missing without a table, or the table's differs
                between reward dimensions.
        """
        if self.discount is None:
            if given is None:
                raise ParameterError.with_text(
                    f"Pass {name}=, a number in [0, 1]: these rollouts come from no table that has it."
                )
            return given
        table_discount = self.discount[0]
        if any(each != table_discount for each in self.discount):
            expected = "one number for all reward dimensions; call memoire.replay.rollouts for each of them"
            raise ParameterError("discount", self.discount, expected)
        if given not in (None, table_discount):
            raise ParameterError(name, given, f"{table_discount}, which the table has, or left out")
        return table_discount

    def _rewards(self) -> NDArray[Any]:
        if self._schema.reward is None:
            raise ParameterError.with_text("The schema has no reward column: advantages need rewards.")
        rewards: NDArray[Any] = self.columns[self._schema.reward]
        return rewards

    def _behind(self, final_values: ArrayLike) -> NDArray[np.float64]:
        """Return the values of the final states, with 0 for terminal states."""
        values = np.array(final_values, np.float64)
        if values.shape != self.bootstrap.shape:
            raise ParameterError("final_values", f"shape {values.shape}", f"shape {self.bootstrap.shape}")
        values[self.terminated] = 0.0
        return values


def _joined(parts: list[Any], schema: Schema, name: str) -> Any:
    if name not in schema.ragged:
        return np.concatenate(parts)
    return Ragged(np.concatenate([each.values for each in parts]), np.concatenate([each.lengths for each in parts]))


def _finals(states: list[Any], schema: Schema, name: str) -> Any:
    """Return one column of the final states; zeros, or no elements, if a state is unknown."""
    column = schema[name]
    if name in schema.ragged:
        empty = np.zeros((0, *column.element), column.dtype)
        return Ragged.from_arrays(
            (empty if each is None else each[name] for each in states), column.dtype, column.element
        )
    finals = np.zeros((len(states), *column.shape), column.dtype)
    for i, state in enumerate(states):
        if state is not None:
            finals[i] = state[name]
    return finals


def _bootstrap(episode: Episode, schema: Schema) -> NDArray[np.float32]:
    """Return the value of the state behind an episode's last entry, [*R]; NaN if unknown."""
    if episode.bootstrap_value is not None:
        return np.asarray(episode.bootstrap_value, np.float32).reshape(schema.reward_shape)
    return np.full(schema.reward_shape, 0.0 if episode.terminated else np.nan, np.float32)
