"""What `Writer.step` is given, as the values of columns: converted, picked out of a batch, or refused with advice.

How vector environments reset their members, and in which observations episodes ended then.

A vector environment that resets its members by itself shows, at the end of an episode, either the true final
observation followed by a step that is no step (next_step), or the first observation of the next episode and the true
one in `info` (same_step). Stored as it comes, either gives transitions that cross a reset. The rules are those of
https://farama.org/Vector-Autoreset-Mode.

Whether an environment was reset where its episode ended, or is being stepped on.

If `env.reset()` is forgotten, the next episode begins in the observation in which the last one ended. But so do the
episodes of a bandit and of an environment that always shows the same, and by chance those of a small environment that
begins anywhere. One such start proves nothing; a row of them in places where no episode began before does.

At a termination next_obs is never used, and some programs pass the first observation of the next episode. There only
episodes that all end at their first step say something, until one is longer: such a program, or one that is stepped on.
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
from memoire.arguments import meant, one_of
from memoire.errors import EntryError, EpisodeOver, FinalObservationMissing, ParameterError, SchemaError

from .columns import Column
from .conversion import exact, finite, form
from .schema import Schema
from .writing import Changes, putting

AUTORESET = ("next_step", "same_step", "disabled")


def autoreset_mode(mode: Any) -> str:
    """One of `AUTORESET`, for its name in any spelling or for a member of gymnasium.vector.AutoresetMode."""
    text = str(getattr(mode, "value", mode))
    found = {name.replace("_", ""): name for name in AUTORESET}.get(text.lower().replace("_", "").replace("-", ""))
    if found is None:
        raise ParameterError("autoreset", mode, one_of(mode, AUTORESET))
    return found


def layout(envs: Any = None, num_envs: int | None = None, autoreset: Any = None) -> tuple[int | None, str]:
    """(num_envs, autoreset) for `Writer`, read from an environment as far as they are not given.

    Args:
        envs: A Gymnasium environment or vector environment, or None; nothing is called on it.
        num_envs: Members of a vector environment; None without `envs` is a single environment.
        autoreset: A mode; None reads `envs.metadata["autoreset_mode"]`. A single environment without it is "disabled".

    Raises:
        ParameterError: a vector environment that does not say its mode, or not what was given.
    """
    found = getattr(envs, "num_envs", None)
    if num_envs is None:
        num_envs = found
    elif envs is not None and found is not None and found != num_envs:
        raise ParameterError("num_envs", num_envs, f"{found}, as the environment says")
    said = (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
    if autoreset is None:
        autoreset = said
    elif said is not None and autoreset_mode(autoreset) != autoreset_mode(said):
        raise ParameterError("autoreset", autoreset, f"{autoreset_mode(said)!r}, as the environment says")
    if autoreset is None and num_envs is not None:
        raise ParameterError("autoreset", None, f"given for vector environments: one of {', '.join(AUTORESET)}")
    return num_envs, autoreset_mode("disabled" if autoreset is None else autoreset)


def final_observation(info: Mapping[str, Any] | None, environment: int, is_single: bool) -> tuple[Any, int | None]:
    """The observation in which an environment's episode ended, out of the `info` of a step in mode same_step; and
    the environment's place in it, None if it is of this one alone.

    Raises:
        FinalObservationMissing: `info` lacks it.
    """
    # Gymnasium 1: an array of objects, one observation each, None where there is none, and a mask. Others give
    # one batched observation, and Gymnasium 0 had the longer name.
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
"""First observations that are remembered."""
PROOF: Final = 3
"""Suspicious starts in a row that are no chance any more."""
PROOF_AT_ONCE: Final = 2
"""The same where the episode is over after its first step, as it is where an environment repeats its end."""
PROOF_AT_TERMINATION: Final = 16
"""The same where the episode before terminated. Each of them is over after its first step."""
WORTH_A_WORD: Final = 2
"""Starts in a row where an episode has just ended, suspicious or not, of which somebody is told."""


State = tuple[NDArray[Any], ...]
"""A state: the state columns of one entry, in the schema's order, in their own dtypes and shapes."""


def digest(state: State) -> int:
    """Sixty-four bits that differ if states differ, the same in every process."""
    made = hashlib.blake2b(digest_size=8)
    for array in state:
        made.update(b"%d " % array.nbytes)
        made.update(np.ascontiguousarray(array).tobytes())
    return int.from_bytes(made.digest(), "little")


class End(NamedTuple):
    """The end of one environment's episode."""

    environment: int
    is_terminal: bool
    final: State
    bootstrap: Any


class _LastEnd(NamedTuple):
    """How an environment's last episode ended."""

    final: int
    """Digest of the observation in which it ended."""
    length: int
    is_terminal: bool = False


class ResetCheck:
    """The first observations of a writer's environments, as digests, and where their last episodes ended."""

    def __init__(self) -> None:
        self.is_warned = False
        """Whether somebody was told of a doubtful start."""
        self._ended: dict[int, _LastEnd] = {}  # by environment, until its next episode begins
        self._rows: dict[int, int] = {}  # by environment: suspicious starts in a row
        self._doubts: dict[int, int] = {}  # by environment: the same, suspicious or not
        self._firsts: set[int] = set()
        self._new: list[int] = []  # firsts that are no part of that set yet
        self._goes_on = False  # whether an episode that began where one terminated was longer than a step

    def state(self) -> dict[str, Any]:
        """All of it, as JSON carries it, for `go_on_from`."""
        tables = {name: list(getattr(self, name).items()) for name in ("_ended", "_rows", "_doubts")}
        return tables | {"firsts": sorted(self._firsts), "flags": [self.is_warned, self._goes_on]}

    def go_on_from(self, state: Mapping[str, Any] | None, members: int) -> None:
        """Know what another one of so many members knew. Raises KeyError, TypeError or ValueError if that cannot be."""
        if state is None:
            return
        self._ended = {int(each): _LastEnd(int(end[0]), int(end[1]), bool(end[2])) for each, end in state["_ended"]}
        self._rows, self._doubts = ({int(each): int(row) for each, row in state[name]} for name in ("_rows", "_doubts"))
        self._firsts = set(map(int, state["firsts"]))
        self.is_warned, self._goes_on = map(bool, state["flags"])
        if any(not 0 <= member < members for member in self._ended):
            raise ValueError("the end of a member that is not there")

    @property
    def awaited(self) -> tuple[int, ...]:
        """Environments whose episode has ended, so that their next step begins another one."""
        return tuple(self._ended)

    def ended(self, environment: int, final: int, length: int, *, terminated: bool = False) -> Changes:
        """The changes by which an episode of `length` steps ended in the observation `final`."""
        return putting(_LastEnd(final, length, terminated), environment, self._ended)

    def reset(self, environment: int) -> Changes:
        """The changes that follow if this environment was reset, as somebody says: its next start is not looked at."""
        return [(each.pop, (environment, None)) for each in (self._ended, self._rows, self._doubts)]

    def check(
        self, environments: Collection[int], state_of: Callable[[int], State], ending: Collection[int]
    ) -> dict[int, int]:
        """The digests of the states in which these environments begin an episode.

        Args:
            state_of: Gives the state of an environment.
            ending: Environments in which the step that begins the episode also ends it.

        Raises:
            EpisodeOver: one of them was surely not reset.
        """
        begins = {environment: digest(state_of(environment)) for environment in environments}
        for environment, first in begins.items():
            if self.is_forgotten(environment, first, environment in ending):
                raise EpisodeOver(environment, self._ended[environment].length)
        return begins

    def noted(self, begins: dict[int, int], ending: Collection[int] = ()) -> tuple[ResetCheck, Changes]:
        """Return the check that replaces this one after episodes begin, and the changes that complete it. Warns once.

        Args:
            begins: Digest of the first observation, by environment.
            ending: Environments whose episode ends with the same step.
        """
        made = copy(self)
        made._ended, made._rows, made._doubts, made._new = dict(self._ended), dict(self._rows), dict(self._doubts), []
        for environment, first in begins.items():
            if made.began(environment, first, environment in ending) >= WORTH_A_WORD and not self.is_warned:
                self.is_warned = made.is_warned = True
                _log.warning(
                    "episodes of environment %d begin in the observations in which the ones before ended. If "
                    "env.reset() was forgotten, call it after each end (terminated or truncated). If episodes do begin "
                    "there, all is well. This is said once for each writer.",
                    environment,
                )
        return made, [(self._firsts.update, (made._new,))]

    def is_forgotten(self, environment: int, first: int, ends: bool) -> bool:
        """Whether a start is the last of so many suspicious ones that the environment was surely not reset.

        Args:
            first: Digest of the observation in which the episode begins.
            ends: Whether the step that begins it also ends it.
        """
        if not self._is_repeated(environment, first):
            return False
        row = self._row(environment, first, ends)
        if self._ended[environment].is_terminal:
            return row >= PROOF_AT_TERMINATION
        return row >= (PROOF_AT_ONCE if ends else PROOF)

    def began(self, environment: int, first: int, ends: bool = False) -> int:
        """Note that an episode has begun in this environment; `first` is the hash of its first observation.

        Returns how many episodes of this environment in a row, this one included, began with the observation that
        ended the episode before.
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
        """Suspicious starts in a row with this one: no episode was seen to begin here, and the row follows an episode
        of several steps, which bandits do not have.
        """
        row = self._rows.get(environment, 0)
        if self._ended[environment].is_terminal and (self._goes_on or not ends):
            return 0
        is_known = first in self._firsts or first in self._new
        is_suspicious = not is_known and (row > 0 or self._ended[environment].length > 1)
        return row + 1 if is_suspicious else 0


ORDER = "The order is step(obs, action, reward, terminated, truncated, next_obs, info)."
# Parameters of `step`: no column can be called like one, but the column that it gives.
_PARAMETERS = frozenset({"self", "obs", "action", "reward", "terminated", "truncated", "next_obs", "info"}) | {
    "bootstrap_value", "init_w", "model_version", "members",
}  # fmt: skip


class StepConverter:
    """Converts the arguments of steps for one schema, of one environment or of a number of them. Unchangeable.

    Shapes: N environments, of which a single one has no axis; F a column's own shape, R the reward's.
    """

    def __init__(self, schema: Schema, num_envs: int | None) -> None:
        self._schema, self._single, self._count = schema, num_envs is None, 1 if num_envs is None else num_envs
        self.root, self.extras = _roots(schema)
        """The name that the observation was declared with, and the names that `step` takes as extras."""
        self.nested = tuple(root for root in schema.roots if schema.leaves(root) != (root,))
        """The names that are nested."""
        self._lead = () if self._single else (self._count,)
        self._columns = [(name, schema[name], self._lead + schema[name].shape) for name in schema.entry_names]

    def values(self, given: dict[str, Any], reward: Any) -> list[Any]:
        """A value for each column; of a vector environment in the column's dtype and shape, [N, *F]."""
        if self._schema.reward is not None:
            given[self._schema.reward] = reward
        for root in self.nested:
            given.update(zip(self._schema.leaves(root), self._flat(root, given[root]), strict=True))
        if self._single:  # the memory converts what it has to
            return [given[name] for name, _, _ in self._columns]
        return [
            value
            if type(value := given[name]) is np.ndarray and value.dtype == column.dtype and value.shape == shape
            else _convert(name, column, value, shape, self._lead)
            for name, column, shape in self._columns
        ]

    def rewards(self, reward: Any, shape: tuple[int, ...]) -> Any:
        """What is added to returns of this shape: float64 [N, *R], not rounded to the column's float32."""
        if type(reward) is float and shape == (1,):
            return reward
        try:
            return np.asarray(reward, np.float64).reshape(shape)
        except (TypeError, ValueError) as error:
            name = self._schema.reward
            column = "a number" if name is None else str(self._schema[name])
            raise EntryError(name or "reward", column + _each(self._lead), form(reward)) from error

    def flags(self, name: str, value: Any) -> NDArray[np.bool_]:
        """[N] whether each environment's `terminated` or `truncated` is set."""
        try:
            given = np.asarray(value)
        except (TypeError, ValueError):
            given = np.empty(0)
        flags = given.astype(np.bool_)
        if flags.size != self._count or given.dtype.kind not in "biuf" or (flags != given).any():
            raise EntryError(name, f"True or False{_each(self._lead)}", form(value), ORDER)
        return flags.reshape(self._count)

    def ends(
        self,
        terminated: Any,
        truncated: Any,
        bootstrap_value: Any,
        resetting: NDArray[np.bool_] | None,
        final_state: Callable[[int], State],
    ) -> list[End]:
        """What ended with a step, found out before anything is stored; not of those [N] that are being reset."""
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

    def members(self, given: Any, *, always_all: bool) -> NDArray[np.int64] | None:
        """The members [B] that make a step, int64; None for all in order, as long as they always were."""
        everyone = np.arange(self._count)
        if given is None:
            return everyone
        members = np.asarray(given)
        is_fit = not self._single and members.dtype.kind in "iu" and members.ndim == 1 and members.size > 0
        if not is_fit or members.min() < 0 or members.max() >= self._count or len(np.unique(members)) != len(members):
            different = f"[n] different whole numbers from 0 to {self._count - 1}"
            expected = "None for a single environment" if self._single else different
            raise ParameterError("members", given, expected)
        if always_all and np.array_equal(members, everyone):
            return None
        return members.astype(np.int64)

    def checked_id(self, ids: Any, former: Any) -> Any:
        """The id that a single environment has, as `former` ones of it; None of several.

        Refuses a step of some members, or in an order of their own, by the ids that it came with.
        """
        given = np.asarray(ids).reshape(-1)
        if self._single:
            if given.size != 1:  # more are not of this environment alone
                return former
            if former is None or given[0] == former:
                return given[0]
            expected = f"{former}, as before: this writer records one environment"
        elif np.array_equal(given, np.arange(self._count)):
            return None
        else:
            expected = f"all {self._count} members in order (0 to {self._count - 1})"
        told = f'{expected}, or be given to step() as members=info["env_id"] (num_envs= counts all members)'
        raise ParameterError("info['env_id']", given.tolist(), told)

    def bootstrap(self, value: Any) -> Any:
        """[N, *R], or N times None."""
        name = self._schema.value
        if value is None or name is None:
            return [None] * self._count
        column = self._schema[name]
        values = _convert("bootstrap_value", column, value, self._lead + column.shape, self._lead)
        return values.reshape(self._count, *column.shape)

    def state(self, obs: Any, environment: int | None) -> State:
        """The state columns of one observation, in the schema's order; `environment` picks it out of a batch."""
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
            raise EntryError(root, ", ".join(self._schema.leaves(root)), f"{form(value)}: {error}") from error

    def first(self, obs: Any) -> Any:
        """The first leaf of an observation."""
        return self._flat(self.root, obs)[0] if self.root in self.nested else obs

    def advice(self, obs: Any, reward: Any, terminated: Any, truncated: Any, next_obs: Any) -> str:
        """What somebody probably mistook whose step was refused; "" where nobody can tell."""
        try:
            shape, after = _shape(self.first(obs)), _shape(self.first(next_obs))
        except EntryError:
            return ""
        column = self._schema[self._schema.leaves(self.root)[0]]
        whole = self._lead + column.shape
        if whole != self._lead and whole in map(_shape, (reward, terminated, truncated)) and after != whole:
            return f"It looks like an observation at another argument's place. {ORDER}"
        if column.is_ragged or shape is None or shape == whole:
            return ""
        if self._single and shape[1:] == column.shape and len(shape) == len(whole) + 1:
            return (
                f"This writer records one environment, and obs is of {shape[0]}: make it with writer(envs), or with "
                f"num_envs={shape[0]} and autoreset=."
            )
        if not self._single and shape == column.shape:
            return (
                f"This writer records {self._count} environments, and obs is of one: give all of them at once, or "
                f"make a writer without num_envs."
            )
        return ""

    def differ(self, obs: Any, other: Any) -> NDArray[np.bool_]:
        """[N] whether two observations differ in what would be stored of them."""
        found = np.zeros(self._count, np.bool_)
        leaves = self._schema.leaves(self.root)
        for name, one, two in zip(leaves, self._flat(self.root, obs), self._flat(self.root, other), strict=True):
            column = self._schema[name]
            shape = self._lead + column.shape
            a, b = (_convert(name, column, value, shape, self._lead) for value in (one, two))
            if column.is_ragged:
                pairs = zip(a, b, strict=True) if self._lead else ((a, b),)
                found |= [not np.array_equal(*pair, equal_nan=column.dtype.kind == "f") for pair in pairs]
                continue
            unequal = (a != b) & ((a == a) | (b == b))  # two NaN are no difference
            found |= unequal.reshape(self._count, -1).any(axis=1)
        return found

    def parts(self, obs: Any) -> list[Any]:
        """N observations, nested as the schema is: copies of each environment's part of one."""
        leaves = self._schema.leaves(self.root)
        arrays = [
            _convert(name, self._schema[name], value, self._lead + self._schema[name].shape, self._lead)
            for name, value in zip(leaves, self._flat(self.root, obs), strict=True)
        ]
        rows = [arrays] if self._single else [[array[i] for array in arrays] for i in range(self._count)]
        return [self._schema.nest(self.root, dict(zip(leaves, map(np.array, row), strict=True))) for row in rows]

    def together(self, parts: list[Any]) -> Any:
        """One observation [N, ...] of what `parts` took apart."""
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
        """The values of one entry in the form of their columns, such as a reward [1] for a scalar column."""
        return tuple(
            value
            if type(value) is np.ndarray and value.dtype == column.dtype and value.shape == shape and shape
            else _convert(name, column, value, shape, ())
            for value, (name, column, shape) in zip(values, self._columns, strict=True)
        )

    def member_state(self, obs: Any, environment: int) -> State:
        """The state columns of an environment's part of an observation."""
        return self.state(obs, None if self._single else environment)

    def final_state(self, next_obs: Any, info: Mapping[str, Any] | None, autoreset: str, environment: int) -> State:
        """The state in which an environment's episode ended, out of what a step returned in a mode of autoreset."""
        if autoreset != "same_step":
            return self.member_state(next_obs, environment)
        return self.state(*final_observation(info, environment, self._single))

    def usual_steps(
        self, memory: object, lanes: NDArray[np.int64], returns: NDArray[np.float64], check: bool
    ) -> _core.UsualSteps | None:
        """What takes the usual step in one call; None for other memories, and for nested or ragged columns.

        Args:
            lanes: [N] of the memory.
            returns: [N, *R] where rewards are added up.
            check: Compare each observation with where the step before ended.
        """
        schema = self._schema
        if self.nested or schema.ragged or not isinstance(memory, _core.EntryStore):
            return None
        arguments = {self.root: "obs", schema.reward: "reward"}
        sources = tuple([arguments.get(name, name) for name in schema.entry_names])
        return _core.UsualSteps(memory, lanes, returns, sources, self._single, check)

    def check_extras(self, extras: Mapping[str, Any]) -> None:
        """Say which extra is missing or is no column, if there is one. Raises EntryError."""
        if extras.keys() != self.extras:
            _explain_extras(self._schema, self.extras, extras)


def _roots(schema: Schema) -> tuple[str, frozenset[str]]:
    """The state's root, and the roots that `step` takes as extras."""
    states = dict.fromkeys(name.partition(".")[0] for name in schema.states)
    if len(states) > 1:
        raise SchemaError(
            f"a writer stores one observation, but the schema has the states {', '.join(states)}. Nest them: one "
            f"column that is a dict of these."
        )
    (state,) = states
    given = {state, schema.reward, schema.qvest, "action", "terminated", "truncated"}
    extras = frozenset(root for root in schema.roots if root not in given)
    own = {state: "obs", schema.reward: "reward"}
    taken = extras & _PARAMETERS | {name for name in own if name in _PARAMETERS and name != own[name]}
    if taken:
        raise SchemaError(f"column {min(map(str, taken))!r}: Writer.step has a parameter of this name. Choose another.")
    return state, extras


def _explain_extras(schema: Schema, expected: frozenset[str], extras: Mapping[str, Any]) -> NoReturn:
    for name in sorted(expected - extras.keys()):
        columns = ", ".join(f"{schema[leaf]}" for leaf in schema.leaves(name))
        guess = [each for each in meant(name, extras) if each not in expected]
        wrong = f", and {guess[0]!r} is no column" if guess else ""
        raise EntryError(name, columns, f"nothing{wrong}", f"Give it to step() as {name}=...")
    name = min(extras.keys() - expected)
    columns = f"nothing: the extra columns are {', '.join(sorted(expected)) or 'none'}"
    raise EntryError(name, columns, f"{name}=...", f"Leave it out, or declare it: Schema({{..., {name!r}: dtype}}).")


def _convert(name: str, column: Column, value: Any, shape: tuple[Any, ...], lead: tuple[int, ...]) -> Any:
    """`value` as an exact array of `shape` = lead + column.shape, which it may have up to axes of length 1; several
    values of a ragged column become `Ragged`.

    Shapes that differ in more than that, and values that do not fit, are refused by `exact`.
    """
    if isinstance(value, list | tuple) and not column.is_ragged and (listed := _shape(value)) is not None:
        found = listed
    else:
        found = getattr(value, "shape", shape)
    if found != shape and [axis for axis in found if axis != 1] == [axis for axis in shape if axis != 1]:
        value = np.asarray(value).reshape(shape)
    return exact(name, column, value, lead)


def _each(lead: tuple[int, ...]) -> str:
    return f" for each of {prod(lead)} environments" if lead else ""


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of a value; None of what is no array."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return None
    return array.shape if array.dtype != object else None
