"""What `Writer.step` is given, as the values of columns: converted, picked out of a batch, or refused with advice."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.errors import EntryError, SchemaError
from memoire.suggestions import meant

from .autoreset import final_observation
from .columns import Column
from .reset_check import State
from .schema import Schema
from .value_conversion import exact, finite, form

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
