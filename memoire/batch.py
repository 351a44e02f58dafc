"""What a draw returns: the rows as the engine gathered them, and the batch that a learner trains on.

`Gathered` is the engine's side: both ends of each window, column by column, with the stack axis always there. `Batch`
is the modern door's side: a mapping from names to arrays whose targets need no further thought.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ParameterError
from .schema import Schema

ID = np.dtype([("client", "<u8", (2,)), ("number", "<i8")])
"""How a cluster names an entry: the owner's client id as two little-endian words, and the entry's number there."""


@dataclass
class Gathered:
    """Samples as the engine returns them; every array belongs to the caller.

    Shapes: B samples, K frame_stack, F the column's own shape, R the reward's shape.
    """

    prev: dict[str, NDArray[Any]]
    """The window's side: state columns [B, K, *F], oldest frame first; the others [B, *F], of the newest entry."""
    next: dict[str, NDArray[Any]]
    """The side `steps` later, in the same shapes; where the episode ends there, states end with its final state."""
    reward: NDArray[np.float32]
    """[B, *R] sum of the window's discounted rewards; zeros [B] in a schema without reward column."""
    discount: NDArray[np.float32]
    """[B, *R] gamma ** steps, or 0 where the episode terminated at the window's end."""
    steps: NDArray[np.int32]
    """[B] entries between both sides: multi_step, or fewer where the episode ends before."""
    weight: NDArray[np.float32]
    """[B] what sampling was proportional to. Never multiply it into a loss: that is what `importance` is for."""
    ids: NDArray[Any]
    """[B] the entries' names: int64 numbers in one process, `ID` in a cluster."""
    age: NDArray[np.float32]
    """[B] seconds since the entry was added."""
    model_version: NDArray[np.int64]
    """[B] the version of the model that acted, as the writer was told; 0 where it was not."""


_FACTS = ("reward", "discount", "ids", "steps", "age", "model_version")


def place(schema: Schema, gathered: Gathered, out: Mapping[str, NDArray[Any]]) -> None:
    """Put the caller's arrays into `gathered` under their names in a batch, so that rows are copied straight into them.

    One that is not C-contiguous is left to `Batch.copy_into`, which makes them the batch's in any case.

    Raises:
        ParameterError: an array of `out` is called like none of a batch, or has another shape or dtype; nothing was
            changed.
    """
    found = {name: _place_of(schema, gathered, name) for name in out}
    for name, (side, key) in found.items():
        array = gathered.weight if key == "importance" else side.get(key)
        if array is not None and key in schema.states and array.shape[1] == 1:
            array = array[:, 0]
        _check_out(name, array, out[name])
    for name, (side, key) in found.items():
        if out[name].flags.carray and key in side:
            side[key] = out[name].reshape(side[key].shape)


def _place_of(schema: Schema, gathered: Gathered, name: str) -> tuple[dict[str, Any], str]:
    """Where an array of a batch stands among the gathered ones, or would if there were one."""
    if name == "importance" or (name in _FACTS and (name != "reward" or schema.reward is not None)):
        return vars(gathered), name
    side, key = (gathered.next, name[5:]) if name.startswith("next_") else (gathered.prev, name)
    return ({}, name) if key == schema.reward else (side, key)


class Batch(Mapping[str, NDArray[Any]]):
    """Samples to learn from: a mapping from names to arrays, also as attributes. The arrays belong to the caller.

    Shapes: B samples, F the column's own shape, R the reward's shape. State columns are [B, *F], or
    [B, frame_stack, *F] where frame_stack is above 1.

        obs, next_obs   the state columns under their names, and the states after `reward` was earned. A nested
                        observation has one key for each leaf ("obs.image", "next_obs.image"); batch["obs"] and
                        batch.obs nest them again
        action, ...     the other columns, of the entry that was drawn; next_action, ... where the
                        parameters ask for them
        reward          float32 [B, *R]: sum over s < steps of gamma**s * r
        discount        float32 [B, *R]: gamma**steps, or 0 where the episode terminated. The target of a value
                        function V is `reward + discount * V(next_obs)`, also where an episode was truncated
        importance      float32 [B]: what a loss is multiplied by. Schaul et al., ICLR 2016, section 3.4
        ids             [B]: hand them back to `update_priorities`
        steps           int32 [B]: entries between obs and next_obs
        age             float32 [B]: seconds since the entry was added
        model_version   int64 [B]: the model that acted

    There is no one-step reward and no raw weight among the keys: used in a loss, both are silently wrong.
    """

    # Made by whoever draws: `update` is its own update_priorities(ids, td_errors).

    gathered: Gathered
    """The samples as the engine returned them, with the weights and the one-step rewards; the same arrays."""
    divisor: float
    """What importance was divided by; importance * divisor is undivided."""
    left_out: float
    """Share of all weight that belongs to clients without samples to serve; 0 in one process."""

    def __init__(
        self,
        schema: Schema,
        gathered: Gathered,
        importance: NDArray[np.float32],
        update: Callable[[NDArray[Any], Any], Any],
        *,
        divisor: float = 1.0,
        left_out: float = 0.0,
    ) -> None:
        self._schema = schema
        self._update = update
        self.gathered = gathered
        self.divisor = divisor
        self.left_out = left_out
        states = frozenset(schema.states)
        arrays = self._arrays = _side("", schema, gathered.prev, states)
        if schema.reward is not None:
            arrays["reward"] = gathered.reward
        arrays["discount"] = gathered.discount
        arrays.update(_side("next_", schema, gathered.next, states))
        arrays["importance"] = importance
        arrays["ids"] = gathered.ids
        arrays["steps"] = gathered.steps
        arrays["age"] = gathered.age
        arrays["model_version"] = gathered.model_version

    def update_priorities(self, td_errors: Any) -> Any:
        """Tell the memory how surprising these samples were: [B]. Returns what its `update_priorities` does."""
        return self._update(self._arrays["ids"], td_errors)

    def copy_into(self, out: Mapping[str, NDArray[Any]]) -> "Batch":
        """Copy every array that `out` (a mapping, or an earlier batch) has a place for into it; the others stay as
        they are.

        Returns this batch, holding the caller's arrays in those places.

        Raises:
            ParameterError: an array of `out` is called like none here, or has another shape or dtype. Nothing was
                copied.
        """
        for name in out:
            _check_out(name, self._arrays.get(name), out[name])
        for name in out:
            if not np.may_share_memory(out[name], self._arrays[name]):  # not gathered there in the first place
                np.copyto(out[name], self._arrays[name])
            self._arrays[name] = out[name]
        return self

    def __getitem__(self, name: str) -> Any:
        try:
            return self._arrays[name]
        except KeyError:
            return self._nested(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this batch has no {name!r}, but {', '.join(self)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        """How many arrays there are; the number of samples is `len(batch.ids)`."""
        return len(self._arrays)

    def __repr__(self) -> str:
        rows = (f"{name}: {_form(array)}" for name, array in self.items())
        return f"Batch({', '.join(rows)})"

    def _nested(self, name: str) -> Any:
        """A nested column or its next side, as dicts and tuples. KeyError where there is none."""
        for prefix in ("", "next_"):
            root = name.removeprefix(prefix)
            if name.startswith(prefix) and root in self._schema.roots:
                leaves = self._schema.leaves(root)
                return self._schema.nest(root, {leaf: self._arrays[prefix + leaf] for leaf in leaves})
        raise KeyError(name)


def _side(
    prefix: str, schema: Schema, columns: Mapping[str, NDArray[Any]], states: frozenset[str]
) -> dict[str, NDArray[Any]]:
    """One side of the windows under its names: without the one-step reward, and without a stack axis of 1."""
    return {
        prefix + name: array[:, 0] if name in states and array.shape[1] == 1 else array
        for name, array in columns.items()
        if name != schema.reward
    }


def _check_out(name: str, array: NDArray[Any] | None, given: Any) -> None:
    is_array = isinstance(given, np.ndarray)
    if array is not None and is_array and given.shape == array.shape and given.dtype == array.dtype:
        return
    found = _form(given) if is_array else type(given).__name__
    if array is None:
        raise ParameterError(f"out[{name!r}]", found, "absent: the batch has no array of this name")
    raise ParameterError(f"out[{name!r}]", found, f"an array {_form(array)}")


def _form(array: NDArray[Any]) -> str:
    return f"{array.dtype}{list(array.shape)}"
