"""Conversion of the arguments of `Writer.step` to values of columns, and detection of ends and resets.

A vector environment that resets its members by itself has one of two modes at the end of an episode. In mode next_step
it returns the true final observation, and the next step only resets. In mode same_step it returns the first observation
of the next episode, and the true final one in `info`. Stored unchanged, both give transitions that cross a reset. The
rules are those of https://farama.org/Vector-Autoreset-Mode.

`ResetCheck` detects that an environment was not reset after its episode ended.

If `env.reset()` is forgotten, the next episode begins in the observation in which the last one ended. A repeated start
is normal in a bandit or an environment with a constant observation, and possible in a small one with random starts. A
single repeated start proves nothing; several in a row, at observations where no episode began before, do.

At a termination next_obs is never used, and some programs pass the first observation of the next episode. After
terminations only a row of one-step episodes counts, until an episode is longer: the row shows a program that passes
first observations, or an environment that is stepped on.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping
from copy import copy
from math import prod
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.arguments import one_of, similar_names
from memoire.errors import EntryError, EpisodeOver, FinalObservationMissing, ParameterError, SchemaError

from .columns import Column
from .conversion import describe_value, exact_array, finite
from .schema import Schema
from .writing import Changes, put_changes

AUTORESET = ("next_step", "same_step", "disabled")


def autoreset_mode(mode: Any) -> str:
    """Return an item of `AUTORESET` from its name in any spelling, or from a gymnasium.vector.AutoresetMode."""
    text = str(getattr(mode, "value", mode))
    known = {name.replace("_", ""): name for name in AUTORESET}.get(text.lower().replace("_", "").replace("-", ""))
    if known is None:
        raise ParameterError("autoreset", mode, one_of(mode, AUTORESET))
    return known


def layout(envs: Any = None, num_envs: int | None = None, autoreset: Any = None) -> tuple[int | None, str]:
    """Return (num_envs, autoreset) for `Writer`; arguments that are None are read from the environment.

    Args:
        envs: A Gymnasium environment or vector environment, or None; no method is called.
        num_envs: Members of a vector environment; None without `envs` is a single environment.
        autoreset: A mode; None reads `envs.metadata["autoreset_mode"]`. A single environment without it is "disabled".

    Raises:
        ParameterError: a vector environment does not declare its mode, or an argument contradicts the environment.
    """
    declared_envs = getattr(envs, "num_envs", None)
    if num_envs is None:
        num_envs = declared_envs
    elif envs is not None and declared_envs is not None and declared_envs != num_envs:
        raise ParameterError("num_envs", num_envs, f"{declared_envs}, as the environment declares")
    declared_mode = (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
    if autoreset is None:
        autoreset = declared_mode
    elif declared_mode is not None and autoreset_mode(autoreset) != autoreset_mode(declared_mode):
        raise ParameterError("autoreset", autoreset, f"{autoreset_mode(declared_mode)!r}, as the environment declares")
    if autoreset is None and num_envs is not None:
        raise ParameterError("autoreset", None, f"set for vector environments: one of {', '.join(AUTORESET)}")
    return num_envs, autoreset_mode("disabled" if autoreset is None else autoreset)


def final_observation(info: Mapping[str, Any] | None, environment: int, is_single: bool) -> tuple[Any, int | None]:
    """Return (final, environment): the final observation of an episode, from the `info` of a step in mode same_step,
    and the environment's index in it, or None if it is one observation rather than a batch.

    Raises:
        FinalObservationMissing: `info` lacks it.
    """
    # Gymnasium 1 has a mask and an array of objects: an observation of each member whose episode ended, or None.
    # Other libraries have one batched observation, and Gymnasium 0 used the longer name.
    name = "final_obs" if info is None or "final_obs" in info else "final_observation"
    final = None if info is None else info.get(name)
    if final is not None and not is_single:
        mask = info.get("_" + name) if info is not None else None
        if mask is not None and not mask[environment]:
            raise FinalObservationMissing(environment)
        if isinstance(final, np.ndarray) and final.dtype == object:
            final = final[environment]
        else:
            return final, environment
    if final is None:
        raise FinalObservationMissing(environment)
    return final, None


_log = logging.getLogger(__name__)

MAX_FIRST_OBSERVATIONS: Final = 4096
"""Largest number of first observations that are remembered."""
PROOF: Final = 3
"""Suspicious starts in a row that prove a missing reset."""
PROOF_AT_ONCE: Final = 2
"""Suspicious starts in a row that prove a missing reset if the episode ends at its first step, as repeated ends do."""
PROOF_AT_TERMINATION: Final = 16
"""Proof after episodes that terminated: suspicious starts in a row, each of an episode of one step."""
WORTH_A_WORD: Final = 2
"""Starts in a row at the end of the episode before, suspicious or not, that are worth a warning."""


State = tuple[NDArray[Any], ...]
"""State columns of one entry, in the schema's order, in their own dtypes and shapes."""


def digest(state: State) -> int:
    """Return a 64-bit hash of a state, the same in every process."""
    hasher = hashlib.blake2b(digest_size=8)
    for array in state:
        hasher.update(b"%d " % array.nbytes)
        hasher.update(np.ascontiguousarray(array).tobytes())
    return int.from_bytes(hasher.digest(), "little")


class End(NamedTuple):
    """End of one environment's episode."""

    environment: int
    is_terminal: bool
    final: State
    bootstrap: Any


class _LastEnd(NamedTuple):
    """End of an environment's last episode."""

    final: int
    """Digest of the final observation."""
    length: int
    is_terminal: bool = False


class ResetCheck:
    """First observations of a writer's environments, as digests, and the ends of their last episodes."""

    def __init__(self) -> None:
        self.is_warned = False
        """True if the warning about a doubtful start was logged."""
        self._ended: dict[int, _LastEnd] = {}  # last ends by environment, until the next episode
        self._rows: dict[int, int] = {}  # suspicious starts in a row, by environment
        self._doubts: dict[int, int] = {}  # repeated starts in a row, by environment
        self._firsts: set[int] = set()
        self._new: list[int] = []  # first observations that are not yet in `_firsts`
        self._goes_on = False  # True once an episode that began where one terminated was longer than a step

    def state(self) -> dict[str, Any]:
        """Return the state as JSON carries it, for `restore_state`."""
        tables = {name: list(getattr(self, name).items()) for name in ("_ended", "_rows", "_doubts")}
        return tables | {"firsts": sorted(self._firsts), "flags": [self.is_warned, self._goes_on]}

    def restore_state(self, state: Mapping[str, Any] | None, members: int) -> None:
        """Restore a check of `members` environments. Raises KeyError, TypeError or ValueError if `state` is invalid."""
        if state is None:
            return
        self._ended = {int(each): _LastEnd(int(end[0]), int(end[1]), bool(end[2])) for each, end in state["_ended"]}
        self._rows, self._doubts = ({int(each): int(row) for each, row in state[name]} for name in ("_rows", "_doubts"))
        self._firsts = set(map(int, state["firsts"]))
        self.is_warned, self._goes_on = map(bool, state["flags"])
        if any(not 0 <= member < members for member in self._ended):
            raise ValueError("the state has the end of a member that does not exist")

    @property
    def awaited(self) -> tuple[int, ...]:
        """Environments whose episode has ended, so that their next step begins another one."""
        return tuple(self._ended)

    def record_end(self, environment: int, final: int, length: int, *, terminated: bool = False) -> Changes:
        """Return the changes that record the end of an episode of `length` steps in the observation `final`."""
        return put_changes(_LastEnd(final, length, terminated), environment, self._ended)

    def reset(self, environment: int) -> Changes:
        """Return the changes after a reported reset of this environment: its next start is not checked."""
        return [(each.pop, (environment, None)) for each in (self._ended, self._rows, self._doubts)]

    def check(
        self, environments: Collection[int], state_of: Callable[[int], State], ending: Collection[int]
    ) -> dict[int, int]:
        """Return digests of the states in which these environments begin an episode.

        Args:
            state_of: Function that returns the state of an environment.
            ending: Environments in which the step that begins the episode also ends it.

        Raises:
            EpisodeOver: an environment was certainly not reset.
        """
        begins = {environment: digest(state_of(environment)) for environment in environments}
        for environment, first in begins.items():
            if self.is_forgotten(environment, first, environment in ending):
                raise EpisodeOver(environment, self._ended[environment].length)
        return begins

    def with_recorded_begins(self, begins: dict[int, int], ending: Collection[int] = ()) -> tuple[ResetCheck, Changes]:
        """Return the check that replaces this check after episodes begin, and the changes that complete it. Warns once.

        Args:
            begins: Digest of the first observation, by environment.
            ending: Environments whose episode ends with the same step.
        """
        new = copy(self)
        new._ended, new._rows, new._doubts, new._new = (
            dict(self._ended),
            dict(self._rows),
            dict(self._doubts),
            [],
        )
        for environment, first in begins.items():
            if new.record_begin(environment, first, environment in ending) >= WORTH_A_WORD and not self.is_warned:
                self.is_warned = new.is_warned = True
                _log.warning(
                    "episodes of environment %d begin in the observations in which the ones before ended. If "
                    "env.reset() was forgotten, call it after each end (terminated or truncated). If episodes do begin "
                    "there, ignore this warning. It is logged once per writer.",
                    environment,
                )
        return new, [(self._firsts.update, (new._new,))]

    def is_forgotten(self, environment: int, first: int, ends: bool) -> bool:
        """Return True if a start completes a row of suspicious ones that proves a missing reset.

        Args:
            first: Digest of the observation in which the episode begins.
            ends: True if the step that begins the episode also ends it.
        """
        if not self._is_repeated(environment, first):
            return False
        row = self._row(environment, first, ends)
        if self._ended[environment].is_terminal:
            return row >= PROOF_AT_TERMINATION
        return row >= (PROOF_AT_ONCE if ends else PROOF)

    def record_begin(self, environment: int, first: int, ends: bool = False) -> int:
        """Record that an episode has begun in this environment; `first` is the digest of its first observation.

        Returns the number of episodes in a row, including the new episode, that began with the observation that ended
        the episode before.
        """
        if not self._is_repeated(environment, first):
            _core.at_once(self.reset(environment))
            if len(self._firsts) < MAX_FIRST_OBSERVATIONS:
                self._new.append(first)
            return 0
        self._rows[environment] = self._row(environment, first, ends)
        self._goes_on |= self._ended[environment].is_terminal and not ends
        del self._ended[environment]
        doubts = self._doubts[environment] = self._doubts.get(environment, 0) + 1
        return doubts

    def _is_repeated(self, environment: int, first: int) -> bool:
        before = self._ended.get(environment)
        return before is not None and before.final == first

    def _row(self, environment: int, first: int, ends: bool) -> int:
        """Return the suspicious starts in a row up to this start. A start is suspicious if no episode began at this
        observation before, and if the row follows an episode of several steps, unlike those of a bandit.
        """
        row = self._rows.get(environment, 0)
        if self._ended[environment].is_terminal and (self._goes_on or not ends):
            return 0
        is_known = first in self._firsts or first in self._new
        is_suspicious = not is_known and (row > 0 or self._ended[environment].length > 1)
        return row + 1 if is_suspicious else 0


ORDER = "The order is step(obs, action, reward, terminated, truncated, next_obs, info)."
# Parameters of `step`: a column may have such a name only if the parameter is the column's value.
_PARAMETERS = frozenset({"self", "obs", "action", "reward", "terminated", "truncated", "next_obs", "info"}) | {
    "bootstrap_value", "init_w", "model_version", "members",
}  # fmt: skip


class StepConverter:
    """Converter of steps' arguments for one schema, and for one environment or a number of environments. Immutable.

    Shapes: N environments, of which a single one has no axis; F a column's own shape, R the reward's.
    """

    def __init__(self, schema: Schema, num_envs: int | None) -> None:
        self._schema, self._single, self._count = schema, num_envs is None, 1 if num_envs is None else num_envs
        self.root, self.extras = _roots(schema)
        """Declared name of the observation, and declared names of the columns that `step` takes as extras."""
        self.nested = tuple(root for root in schema.roots if schema.leaves(root) != (root,))
        """Declared names of nested values."""
        self._lead = () if self._single else (self._count,)
        self._columns = [(name, schema[name], self._lead + schema[name].shape) for name in schema.entry_names]

    def values(self, args: dict[str, Any], reward: Any) -> list[Any]:
        """Return a value for each column; for a vector environment in the column's dtype and shape, [N, *F]."""
        if self._schema.reward is not None:
            args[self._schema.reward] = reward
        for root in self.nested:
            args.update(zip(self._schema.leaves(root), self._flat(root, args[root]), strict=True))
        if self._single:  # the memory converts the values
            return [args[name] for name, _, _ in self._columns]
        return [
            value
            if type(value := args[name]) is np.ndarray and value.dtype == column.dtype and value.shape == shape
            else _convert(name, column, value, shape, self._lead)
            for name, column, shape in self._columns
        ]

    def rewards(self, reward: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Return rewards to add to returns of this shape: float64 [N, *R], not rounded to the column's float32."""
        try:
            return np.asarray(reward, np.float64).reshape(shape)
        except (TypeError, ValueError) as error:
            name = self._schema.reward
            column = "a number" if name is None else str(self._schema[name])
            raise EntryError(name or "reward", column + _per_environment(self._lead), describe_value(reward)) from error

    def flags(self, name: str, value: Any) -> NDArray[np.bool_]:
        """Return `terminated` or `truncated` as a bool array [N]."""
        try:
            array = np.asarray(value)
        except (TypeError, ValueError):
            array = np.empty(0)
        flags = array.astype(np.bool_)
        if flags.size != self._count or array.dtype.kind not in "biuf" or (flags != array).any():
            raise EntryError(name, f"True or False{_per_environment(self._lead)}", describe_value(value), ORDER)
        return flags.reshape(self._count)

    def ends(
        self,
        terminated: Any,
        truncated: Any,
        bootstrap_value: Any,
        resetting: NDArray[np.bool_] | None,
        final_state: Callable[[int], State],
    ) -> list[End]:
        """Return the ends of a step, before anything is stored; environments that are being reset [N] have none."""
        terminal, stopped = self.flags("terminated", terminated), self.flags("truncated", truncated)
        if not np.count_nonzero(terminal) and not np.count_nonzero(stopped):
            return []
        done = terminal | stopped
        if resetting is not None:
            done &= ~resetting
        bootstrap = self.bootstrap(bootstrap_value)
        return [
            End(i, bool(terminal[i]), final_state(i), None if terminal[i] else bootstrap[i])
            for i in np.flatnonzero(done).tolist()
        ]

    def members(self, ids: Any, *, always_all: bool) -> NDArray[np.int64] | None:
        """Return the members [B] that make a step, int64; None for all in order, as long as no step had fewer."""
        everyone = np.arange(self._count)
        if ids is None:
            return everyone
        members = np.asarray(ids)
        is_fit = not self._single and members.dtype.kind in "iu" and members.ndim == 1 and members.size > 0
        if not is_fit or members.min() < 0 or members.max() >= self._count or len(np.unique(members)) != len(members):
            different = f"[n] different whole numbers from 0 to {self._count - 1}"
            expected = "None for a single environment" if self._single else different
            raise ParameterError("members", ids, expected)
        if always_all and np.array_equal(members, everyone):
            return None
        return members.astype(np.int64)

    def checked_id(self, ids: Any, former: Any) -> Any:
        """Return the id of a single environment, which must equal `former` once that is known; None for several.

        Raises ParameterError if the ids are those of some members only, or of all in another order.
        """
        id_array = np.asarray(ids).reshape(-1)
        if self._single:
            if id_array.size != 1:  # the ids of several environments do not identify this one
                return former
            if former is None or id_array[0] == former:
                return id_array[0]
            expected = f"{former}, as before: this writer records one environment"
        elif np.array_equal(id_array, np.arange(self._count)):
            return None
        else:
            expected = f"all {self._count} members in order (0 to {self._count - 1})"
        expected_ids = f'{expected}, or be passed to step() as members=info["env_id"] (num_envs= counts all members)'
        raise ParameterError("info['env_id']", id_array.tolist(), expected_ids)

    def bootstrap(self, value: Any) -> Any:
        """Return the final states' values [N, *R], or N times None."""
        name = self._schema.value
        if value is None or name is None:
            return [None] * self._count
        column = self._schema[name]
        values = _convert("bootstrap_value", column, value, self._lead + column.shape, self._lead)
        return values.reshape(self._count, *column.shape)

    def state(self, obs: Any, environment: int | None) -> State:
        """Return the state columns of one observation, in the schema's order; `environment` selects it from a batch."""
        leaves = zip(self._schema.leaves(self.root), self._flat(self.root, obs), strict=True)
        picked = ((name, leaf if environment is None else leaf[environment]) for name, leaf in leaves)
        return tuple(
            finite(name, column, _convert(name, column, value, column.shape, ()))
            for name, value in picked
            if (column := self._schema[name]).role == "state"
        )

    def _flat(self, root: str, value: Any) -> list[Any]:
        try:
            return self._schema.flatten(root, value)
        except SchemaError as error:
            raise EntryError(root, ", ".join(self._schema.leaves(root)), f"{describe_value(value)}: {error}") from error

    def first(self, obs: Any) -> Any:
        """Return the first leaf of an observation."""
        return self._flat(self.root, obs)[0] if self.root in self.nested else obs

    def advice(self, obs: Any, reward: Any, terminated: Any, truncated: Any, next_obs: Any) -> str:
        """Return advice on the likely mistake in a rejected step, or "" if there is none."""
        try:
            shape, after = _shape(self.first(obs)), _shape(self.first(next_obs))
        except EntryError:
            return ""
        column = self._schema[self._schema.leaves(self.root)[0]]
        whole = self._lead + column.shape
        if whole != self._lead and whole in map(_shape, (reward, terminated, truncated)) and after != whole:
            return f"It looks like an observation is passed as another argument. {ORDER}"
        if column.is_ragged or shape is None or shape == whole:
            return ""
        if self._single and shape[1:] == column.shape and len(shape) == len(whole) + 1:
            return (
                f"This writer records one environment, but obs has {shape[0]}: make the writer with writer(envs), or "
                f"with num_envs={shape[0]} and autoreset=."
            )
        if not self._single and shape == column.shape:
            return (
                f"This writer records {self._count} environments, but obs has one: pass the observations of all, or "
                f"make a writer without num_envs."
            )
        return ""

    def differing_rows(self, obs: Any, other: Any) -> NDArray[np.bool_]:
        """Return a mask [N], True where the stored forms of two observations differ."""
        mask = np.zeros(self._count, np.bool_)
        leaves = self._schema.leaves(self.root)
        for name, one, two in zip(leaves, self._flat(self.root, obs), self._flat(self.root, other), strict=True):
            column = self._schema[name]
            shape = self._lead + column.shape
            a, b = (_convert(name, column, value, shape, self._lead) for value in (one, two))
            if column.is_ragged:
                pairs = zip(a, b, strict=True) if self._lead else ((a, b),)
                mask |= [not np.array_equal(*pair, equal_nan=column.dtype.kind == "f") for pair in pairs]
                continue
            unequal = (a != b) & ((a == a) | (b == b))  # NaN equals NaN
            mask |= unequal.reshape(self._count, -1).any(axis=1)
        return mask

    def parts(self, obs: Any) -> list[Any]:
        """Split an observation into N copies, one per environment, nested as the schema is."""
        leaves = self._schema.leaves(self.root)
        arrays = [
            _convert(name, self._schema[name], value, self._lead + self._schema[name].shape, self._lead)
            for name, value in zip(leaves, self._flat(self.root, obs), strict=True)
        ]
        rows = [arrays] if self._single else [[array[i] for array in arrays] for i in range(self._count)]
        return [self._schema.nest(self.root, dict(zip(leaves, map(np.array, row), strict=True))) for row in rows]

    def join_observations(self, parts: list[Any]) -> Any:
        """Join the observations of `parts` into one, [N, ...]."""
        if self._single:
            return parts[0]
        leaves = self._schema.leaves(self.root)
        columns = zip(*(self._flat(self.root, part) for part in parts), strict=True)
        return self._schema.nest(
            self.root,
            {
                name: list(column) if self._schema[name].is_ragged else np.stack(column)
                for name, column in zip(leaves, columns, strict=True)
            },
        )

    def exact_entry(self, values: list[Any]) -> tuple[Any, ...]:
        """Return the values of one entry in the form of their columns, such as a scalar from a reward [1]."""
        return tuple(
            value
            if type(value) is np.ndarray and value.dtype == column.dtype and value.shape == shape and shape
            else _convert(name, column, value, shape, ())
            for value, (name, column, shape) in zip(values, self._columns, strict=True)
        )

    def member_state(self, obs: Any, environment: int) -> State:
        """Return the state columns of one environment in an observation."""
        return self.state(obs, None if self._single else environment)

    def final_state(self, next_obs: Any, info: Mapping[str, Any] | None, autoreset: str, environment: int) -> State:
        """Return the final state of an environment's episode, from the result of a step in a mode of autoreset."""
        if autoreset != "same_step":
            return self.member_state(next_obs, environment)
        return self.state(*final_observation(info, environment, self._single))

    def usual_steps(
        self, memory: object, lanes: NDArray[np.int64], returns: NDArray[np.float64], check: bool
    ) -> _core.UsualSteps | None:
        """Return the object that takes usual steps in one call; None for other memories, and nested or ragged columns.

        Args:
            lanes: [N] lanes of the memory.
            returns: [N, *R] sums of rewards, which each step updates.
            check: True to compare each observation with the next_obs of the step before.
        """
        schema = self._schema
        if self.nested or schema.ragged or not isinstance(memory, _core.EntryStore):
            return None
        arguments = {self.root: "obs", schema.reward: "reward"}
        sources = tuple([arguments.get(name, name) for name in schema.entry_names])
        return _core.UsualSteps(memory, lanes, returns, sources, self._single, check)

    def check_extras(self, extras: Mapping[str, Any]) -> None:
        """Raise EntryError if an extra is missing or is not a column."""
        if extras.keys() != self.extras:
            _explain_extras(self._schema, self.extras, extras)


def _roots(schema: Schema) -> tuple[str, frozenset[str]]:
    """Return the state's root, and the roots that `step` takes as extras."""
    states = dict.fromkeys(name.partition(".")[0] for name in schema.states)
    if len(states) > 1:
        raise SchemaError(
            f"a writer stores one observation, but the schema has the states {', '.join(states)}. Nest them: one "
            f"column that is a dict of these."
        )
    (state,) = states
    arguments = {state, schema.reward, schema.qvest, "action", "terminated", "truncated"}
    extras = frozenset(root for root in schema.roots if root not in arguments)
    parameters = {state: "obs", schema.reward: "reward"}
    taken = extras & _PARAMETERS | {name for name in parameters if name in _PARAMETERS and name != parameters[name]}
    if taken:
        raise SchemaError(
            f"column {min(map(str, taken))!r}: Writer.step() has a parameter of this name. Choose another name."
        )
    return state, extras


def _explain_extras(schema: Schema, expected: frozenset[str], extras: Mapping[str, Any]) -> NoReturn:
    for name in sorted(expected - extras.keys()):
        columns = ", ".join(f"{schema[leaf]}" for leaf in schema.leaves(name))
        guess = [each for each in similar_names(name, extras) if each not in expected]
        wrong = f" ({guess[0]!r} is not a column)" if guess else ""
        raise EntryError.with_text(f"step() needs {name}=..., a value of {columns}{wrong}. The entry was not added.")
    name = min(extras.keys() - expected)
    raise EntryError.with_text(
        f"step() got {name}=..., but {name!r} is not a column; the extra columns are "
        f"{', '.join(sorted(expected)) or 'none'}. The entry was not added. Leave it out, or declare it: "
        f"Schema({{..., {name!r}: dtype}})."
    )


def _convert(name: str, column: Column, value: Any, shape: tuple[Any, ...], lead: tuple[int, ...]) -> Any:
    """Return `value` as an exact array of `shape` = lead + column.shape, after adding or removing axes of length 1.
    Several values of a ragged column become `Ragged`.

    `exact_array` rejects shapes that differ otherwise, and values that do not fit.
    """
    if isinstance(value, list | tuple) and not column.is_ragged and (listed := _shape(value)) is not None:
        actual = listed
    else:
        actual = getattr(value, "shape", shape)
    if actual != shape and [axis for axis in actual if axis != 1] == [axis for axis in shape if axis != 1]:
        value = np.asarray(value).reshape(shape)
    return exact_array(name, column, value, lead)


def _per_environment(lead: tuple[int, ...]) -> str:
    return f" for each of {prod(lead)} environments" if lead else ""


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a value; None if it is not an array."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return None
    return array.shape if array.dtype != object else None
