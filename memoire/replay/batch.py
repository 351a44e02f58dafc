"""What a draw returns: the rows as the engine gathered them, and the batch that a learner trains on.

`GatheredSamples` is the engine's side: both ends of each window, column by column, with the stack axis always there.
`Batch` is the modern door's side: a mapping from names to arrays whose targets need no further thought.
`TorchBatch` is one of tensors; torch is imported when the first is made. `memoire.torch` is its public path.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from memoire import _core
from memoire._core import newest_of_each as newest_of_each
from memoire.arguments import no_field
from memoire.errors import NotInstalled, ParameterError

from .conversion import ID as ID
from .conversion import real_errors
from .schema import Schema

if TYPE_CHECKING:
    import torch

V = TypeVar("V", covariant=True)
RowForm: TypeAlias = tuple[str, tuple[int, ...], np.dtype[Any]]


class PriorityUpdate(NamedTuple):
    """What became of TD errors: what every `update_priorities` returns, in one process and in a cluster."""

    applied: int = 0
    """Entries that have their new priority."""
    stale: int = 0
    """Entries that have made room for others since."""
    sent: int = 0
    """On their way to the clients or servers that own the entries: `stats` says later how many were applied."""
    lost: int = 0
    """Those whose owner nobody knows here, and older ones that waited too long for theirs."""

    def plus(self, other: Self) -> Self:
        """Both together."""
        return type(self)(*map(sum, zip(self, other, strict=True)))


@dataclass
class GatheredSamples:
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
    mask: NDArray[np.bool_] | None = None
    """[B, T] for sequences of T entries, else None: which are there and not only for warming up. With sequences prev
    has states [B, T + 1, K, *F] and the others [B, T, *F] (or [B, *F], of the first entry alone), reward and discount
    are [B, T, *R] of each entry, next is empty, and ids, weight, age and model_version are those of the first entry."""
    max_share: float = 1.0
    """How a sequence's errors make its priority: this share of their maximum, the rest of their mean."""
    prev_lengths: dict[str, NDArray[np.int32]] = field(default_factory=dict)
    """How many elements the values of each ragged column of prev have: [B, K] for a state [B, K, L, *F], [B] for others
    [B, L, *F]. F is the shape of an element, L the longest value of both sides and at least 1; zeros behind."""
    next_lengths: dict[str, NDArray[np.int32]] = field(default_factory=dict)
    """The same for next."""

    @classmethod
    def empty(
        cls,
        size: int,
        sides: Sequence[Iterable[RowForm]],
        reward_shape: tuple[int, ...],
        ids: DTypeLike = np.int64,
        *,
        length: int = 0,
    ) -> GatheredSamples:
        """Arrays for B = `size` samples, to be filled; rewards are 0. Ragged columns are added when they are gathered.

        Args:
            sides: Prev and next: of each column its name, and the shape and dtype of what one sample has of it.
            length: T of sequences; 0: transitions.
        """
        per_reward = (size, length, *reward_shape) if length else (size, *reward_shape)
        return cls(
            prev={name: _core.empty((size, *shape), dtype) for name, shape, dtype in sides[0]},
            next={name: _core.empty((size, *shape), dtype) for name, shape, dtype in sides[1]},
            reward=np.zeros(per_reward, np.float32),
            discount=np.empty(per_reward, np.float32),
            steps=np.empty(size, np.int32),
            weight=np.empty(size, np.float32),
            ids=np.empty(size, ids),
            age=np.empty(size, np.float32),
            model_version=np.empty(size, np.int64),
            mask=np.empty((size, length), np.bool_) if length else None,
        )

    def rows(self, rows: slice) -> GatheredSamples:
        """Some of the samples, in the same arrays."""

        def part(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: array[rows] for name, array in value.items()}
            return value[rows] if isinstance(value, np.ndarray) else value

        found = GatheredSamples(**{name: part(value) for name, value in vars(self).items()})
        for name in found.prev_lengths.keys() | found.next_lengths.keys():
            found._crop(name)
        return found

    def _crop(self, name: str) -> None:
        """Make a ragged column as wide as its longest value here."""
        sides = [
            (side, lengths[name])
            for side, lengths in ((self.prev, self.prev_lengths), (self.next, self.next_lengths))
            if name in lengths
        ]
        longest = max(1, *(int(lengths.max(initial=0)) for _, lengths in sides))
        for side, lengths in sides:
            side[name] = np.ascontiguousarray(side[name][(*[slice(None)] * lengths.ndim, slice(longest))])

    def unstacked(self, array: NDArray[Any]) -> NDArray[Any]:
        """A state column [B, K, *F], or [B, T + 1, K, *F] of sequences, without its axis K where that is 1."""
        if self.mask is not None:
            return array[:, :, 0] if array.shape[2] == 1 else array
        return array[:, 0] if array.shape[1] == 1 else array


def grouped_by_client(ids: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows [B] of `ID`s sorted by client, those of one as they came, and where in there each client begins [C]."""
    if (grouped := _core.by_owner(np.ascontiguousarray(ids))) is not None:
        return grouped
    first, second = ids["client"][:, 0], ids["client"][:, 1]
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return order, np.flatnonzero(is_first)


_FACTS = ("reward", "discount", "ids", "steps", "age", "model_version", "mask")


def place(schema: Schema, gathered: GatheredSamples, out: Mapping[str, NDArray[Any]]) -> None:
    """Put the caller's arrays into `gathered` under their names in a batch, so that rows are copied straight into them.

    One that is not C-contiguous is left to `Batch.copy_into`, which makes them the batch's in any case.

    Raises:
        ParameterError: an array of `out` is called like none of a batch, or has another shape or dtype; nothing was
            changed.
    """
    for name in out:
        if name.removeprefix("next_").removesuffix("_length") in schema.ragged:
            expected = "left out: a ragged column is as wide as its longest value in the batch, so it is made new"
            raise ParameterError(f"out[{name!r}]", _form(out[name]), expected)
    found = {name: _place_of(schema, gathered, name) for name in out}
    for name, (side, key) in found.items():
        array = gathered.weight if key == "importance" else side.get(key)
        if array is not None and key in schema.states:
            array = gathered.unstacked(array)
        _check_out(name, array, out[name])
    for name, (side, key) in found.items():
        if out[name].flags.carray and key in side:
            side[key] = out[name].reshape(side[key].shape)


def _place_of(schema: Schema, gathered: GatheredSamples, name: str) -> tuple[dict[str, Any], str]:
    """Where an array of a batch stands among the gathered ones, or would if there were one."""
    if name == "importance" or (name in _FACTS and (name != "reward" or schema.reward is not None)):
        return vars(gathered), name
    side, key = (gathered.next, name[5:]) if name.startswith("next_") else (gathered.prev, name)
    return ({}, name) if key == schema.reward else (side, key)


class Attributes(Mapping[str, V]):
    """A mapping from names to arrays, which are attributes too."""

    _arrays: dict[str, V]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(str(error)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        """How many arrays there are; the number of samples is `len(batch.ids)`."""
        return len(self._arrays)


class Batch(Attributes[NDArray[Any]]):
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

    A ragged column is [B, L, *F], L the longest value that the batch has of it on either side, with zeros behind the
    others; `obs_length` and `next_obs_length` int32 [B] say how many elements are real (with a frame stack or with
    sequences they have all axes that stand in front of L).

    With sequences (`sequence_length` T above 0) all columns have a time axis after B: obs [B, T + 1, *F], the last one
    being the state after the last entry, action and the like [B, T, *F], reward and discount [B, T, *R] of each entry
    (gamma, or 0 where the episode terminated), and there is no next_obs but

        mask            bool [B, T]: the entries to learn from; False while warming up and behind an episode's end
        steps           int32 [B]: how many entries are there; what is behind them is zeros

    There is no one-step reward and no raw weight among the keys: used in a loss, both are silently wrong.
    """

    # Made by whoever draws: `update` is its own update_priorities(ids, td_errors).

    gathered: GatheredSamples
    """The samples as the engine returned them, with the weights and the one-step rewards; the same arrays."""
    divisor: float
    """What importance was divided by; importance * divisor is undivided."""
    left_out: float
    """Share of all weight that belongs to clients without samples to serve; 0 in one process."""

    def __init__(
        self,
        schema: Schema,
        gathered: GatheredSamples,
        importance: NDArray[np.float32],
        update: Callable[[NDArray[Any], Any], PriorityUpdate],
        *,
        divisor: float = 1.0,
        left_out: float = 0.0,
    ) -> None:
        self._schema, self._update = schema, update
        self.gathered = gathered
        self.divisor = divisor
        self.left_out = left_out
        arrays = self._arrays = _side("", schema, gathered, gathered.prev, gathered.prev_lengths)
        if schema.reward is not None:
            arrays["reward"] = gathered.reward
        arrays["discount"] = gathered.discount
        arrays.update(_side("next_", schema, gathered, gathered.next, gathered.next_lengths))
        if gathered.mask is not None:
            arrays["mask"] = gathered.mask
        arrays["importance"] = importance
        arrays["ids"] = gathered.ids
        arrays["steps"] = gathered.steps
        arrays["age"] = gathered.age
        arrays["model_version"] = gathered.model_version

    @property
    def schema(self) -> Schema:
        """What an entry of it is."""
        return self._schema

    def update_priorities(self, td_errors: Any) -> PriorityUpdate:
        """Tell the memory how surprising these samples were: [B], or of sequences [B, T], of which those outside of
        `mask` do not count.
        """
        mask = self.gathered.mask
        if mask is not None and np.ndim(td_errors) == 2:
            td_errors = sequence_errors(td_errors, mask, self.gathered.max_share)
        return self._update(self._arrays["ids"], td_errors)

    def to(self, device: Any = None, *, pin_memory: bool = True, non_blocking: bool = True) -> Any:
        """These arrays as torch tensors on a device, a `memoire.torch.TorchBatch`: on the CPU without a copy.

            batch = buffer.sample(256).to("cuda")
            batch.update_priorities(td_errors)              # tensors on any device

        Args:
            device: Such as "cuda" or "cpu"; None is the CPU.
            pin_memory: Copy by way of memory that the GPU reads by itself, so that the copy goes on beside other work.
            non_blocking: Return before the copy is done; the GPU's own stream waits for it.

        Raises:
            NotInstalled: torch is not here: pip install 'memoire-rl[torch]'.
            ParameterError: torch has no dtype like an array's, or no such device.
        """
        return TorchBatch(self, device, pin_memory=pin_memory, non_blocking=non_blocking)

    @property
    def advantage(self) -> NDArray[np.float32]:
        """The return minus the value, as the actor computed both: the generalized advantage estimate of
        `discount` and `mix_lambda`. In the return column's shape.

        Schulman et al., ICLR 2016, equation 16, whose sum is the TD(lambda) return minus the value.

        Raises:
            AttributeError: the schema has no value column, or the parameters leave one of both out.
        """
        value, returned = self._schema.value, self._schema.qvest
        if value not in self._arrays or returned not in self._arrays:
            raise AttributeError("this batch has no advantage: that takes a value column and its return in `prev`")
        advantage: NDArray[np.float32] = self._arrays[str(returned)] - self._arrays[str(value)]
        return advantage

    def copy_into(self, out: Mapping[str, NDArray[Any]]) -> Batch:
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
        except (KeyError, TypeError):  # the latter: it is no name at all
            return self._nested(name)

    def __copy__(self) -> Self:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        made._arrays = dict(self._arrays)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """With arrays of its own; priorities go to the same memory."""
        made = object.__new__(type(self))
        shared = {name: value for name, value in vars(self).items() if name in ("_schema", "_update")}
        vars(made).update(
            shared | {name: copy.deepcopy(value, memo) for name, value in vars(self).items() if name not in shared}
        )
        return made

    def __getstate__(self) -> dict[str, Any]:
        """A pickle has the arrays, and not the memory that they are from."""
        return vars(self) | {"_update": _elsewhere}

    def __repr__(self) -> str:
        rows = (f"{name}: {_form(array)}" for name, array in self.items())
        return f"Batch({', '.join(rows)})"

    def _nested(self, name: Any) -> Any:
        """A nested column or its next side, as dicts and tuples. NoSuchField where there is none."""
        for prefix in ("", "next_") if isinstance(name, str) else ():
            root = name.removeprefix(prefix)
            if name.startswith(prefix) and root in self._schema.roots:
                leaves = self._schema.leaves(root)
                if all(prefix + leaf in self._arrays for leaf in leaves):
                    return self._schema.nest(root, {leaf: self._arrays[prefix + leaf] for leaf in leaves})
        raise no_field("this batch", name, self._arrays)


def _elsewhere(ids: NDArray[Any], td_errors: Any) -> PriorityUpdate:
    """What a batch does that was pickled and has come into another process."""
    expected = "handed to update_priorities of the memory that they are from: this batch was pickled, and has no memory"
    raise ParameterError("ids", f"{len(ids)} ids", expected)


def _side(
    prefix: str,
    schema: Schema,
    gathered: GatheredSamples,
    columns: Mapping[str, NDArray[Any]],
    lengths: Mapping[str, NDArray[np.int32]],
) -> dict[str, NDArray[Any]]:
    """One side of the windows under its names: without the one-step reward, and without a stack axis of 1."""
    arrays: dict[str, NDArray[Any]] = {}
    states, reward = schema.states, schema.reward
    for name in schema.names if lengths else columns:  # ragged ones were added last
        if name in columns and name != reward:
            is_stacked = name in states
            arrays[prefix + name] = gathered.unstacked(columns[name]) if is_stacked else columns[name]
            if name in lengths:
                arrays[f"{prefix}{name}_length"] = gathered.unstacked(lengths[name]) if is_stacked else lengths[name]
    return arrays


def sequence_errors(td_errors: Any, mask: NDArray[np.bool_], max_share: float) -> NDArray[np.float64]:
    """One error for each sequence, [B]: max_share * maximum + (1 - max_share) * mean of the absolute ones in its mask.

    Kapturowski et al., Recurrent Experience Replay in Distributed Reinforcement Learning, ICLR 2019, section 2.3.

    Args:
        td_errors: [B, T], of any sign; what is outside of the mask may be anything, NaN too.
        mask: [B, T].

    Raises:
        ParameterError: the shapes differ.
    """
    errors = np.asarray(real_errors(td_errors), np.float64)
    if errors.shape != mask.shape:
        raise ParameterError(
            "td_errors", f"shape {errors.shape}", f"shape {mask.shape}, as the mask has, or {mask.shape[:1]}"
        )
    counted = np.where(mask, np.abs(errors), 0.0)
    mean = counted.sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
    combined: NDArray[np.float64] = max_share * counted.max(axis=1) + (1.0 - max_share) * mean
    return combined


def sequence_mask(burn_in: NDArray[Any], steps: NDArray[Any], out: NDArray[np.bool_]) -> None:
    """Fill the mask [B, T] of sequences of `steps` [B] entries, the first `burn_in` [B] of which only warm up."""
    places = np.arange(out.shape[1])
    np.logical_and(places >= burn_in[:, None], places < steps[:, None], out=out)


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


def _torch() -> Any:
    """The module, which nothing else here needs. Raises NotInstalled."""
    with NotInstalled.explained("pip install 'memoire-rl[torch]'"):
        import torch
    return torch


class TorchBatch(Attributes["torch.Tensor"]):
    """A batch whose arrays are tensors, under the same names; also as attributes, nested as a `Batch` nests them.

    On the CPU tensors share their memory with the batch's arrays. ids stay as they are: `batch.ids`. `Batch.to` makes
    one.

    Args:
        device, pin_memory, non_blocking: See `Batch.to`.

    Raises:
        ParameterError: torch has no dtype like an array's, or no such device.
    """

    def __init__(
        self,
        batch: Batch,
        device: torch.device | str | None = None,
        *,
        pin_memory: bool = True,
        non_blocking: bool = True,
    ) -> None:
        self.source = batch
        """The batch as it was drawn."""
        self.device = device_of(device)
        move = functools.partial(_moved, device=self.device, pin_memory=pin_memory, non_blocking=non_blocking)
        self._arrays = {name: move(as_tensor(array)) for name, array in batch.items() if name != "ids"}

    def to(
        self, device: torch.device | str | None = None, *, pin_memory: bool = True, non_blocking: bool = True
    ) -> TorchBatch:
        """The same batch on another device; itself where it is there already."""
        if device_of(device) == self.device:
            return self
        made = copy.copy(self)
        made.device = device_of(device)
        move = functools.partial(_moved, device=made.device, pin_memory=pin_memory, non_blocking=non_blocking)
        made._arrays = {name: move(tensor) for name, tensor in self._arrays.items()}
        return made

    @property
    def ids(self) -> NDArray[Any]:
        """[B] which entries these are: an array, as the batch has it."""
        ids: NDArray[Any] = self.source.ids
        return ids

    def update_priorities(self, td_errors: torch.Tensor | NDArray[Any]) -> PriorityUpdate:
        """Tell the memory how surprising these samples were: [B], or [B, T] of sequences, on any device."""
        torch = _torch()
        if isinstance(td_errors, torch.Tensor):
            td_errors = td_errors.detach().to("cpu", torch.float32).numpy()
        return self.source.update_priorities(td_errors)

    def __getitem__(self, name: str) -> Any:
        try:
            return self._arrays[name]
        except KeyError:
            return _mapped(self.source[name], self._nested(name))

    def _nested(self, name: str) -> Callable[[NDArray[Any]], torch.Tensor]:
        if name == "ids":
            raise no_field("this batch of tensors", name, self._arrays)
        found = {id(array): self._arrays[key] for key, array in self.source.items() if key != "ids"}
        return lambda array: found[id(array)]

    def __repr__(self) -> str:
        rows = (f"{name}: {str(each.dtype)[6:]}{list(each.shape)}" for name, each in self.items())
        return f"TorchBatch({', '.join(rows)}, device={self.device})"


def device_of(device: torch.device | str | None) -> torch.device:
    """A device by its name, "cuda" being the current one; None is the CPU.

    Raises:
        ParameterError: torch knows no such device, or has it not here.
    """
    torch = _torch()
    try:
        found = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ParameterError("device", device, f"one that torch knows ({str(error).splitlines()[0]})") from error
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        raise ParameterError("device", str(device), "one that is here: this torch finds no GPU that it can use")
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found


def _moved(tensor: torch.Tensor, *, device: torch.device, pin_memory: bool, non_blocking: bool) -> torch.Tensor:
    if device == tensor.device:
        return tensor
    if device.type == "cuda" and pin_memory and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()  # from there the copy goes on beside everything else
    # Onto the CPU a copy that is not waited for could be read before it is there.
    return tensor.to(device, non_blocking=non_blocking and device.type != "cpu")


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """A tensor of the array's memory, shape and dtype: who writes to one writes to the other.

    Raises:
        ParameterError: torch has no such dtype.
    """
    torch = _torch()
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise ParameterError("dtype", str(array.dtype), f"one that torch has ({error})") from error


def _mapped(value: Any, change: Callable[[NDArray[Any]], torch.Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(part, change) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_mapped(part, change) for part in value)
    return change(value)


def pinned(batch: Batch) -> dict[str, NDArray[Any]]:
    """Arrays like a batch's in memory that a GPU reads by itself, for `sample(..., out=)` and `get_batch(..., out=)`.

    They have the shapes [B, ...] and dtypes of the batch's. Without a GPU they are ordinary ones. Ragged columns are
    left out: they are as wide as the longest value of a batch.
    """
    torch = _torch()
    is_there = torch.cuda.is_available()
    ragged = {*batch.gathered.prev_lengths, *batch.gathered.next_lengths}
    made = {}
    for name, array in batch.items():
        if name == "ids" or name.removeprefix("next_").removesuffix("_length") in ragged:
            continue
        room = torch.empty(max(1, array.nbytes), dtype=torch.uint8, pin_memory=is_there).numpy()
        made[name] = room[: array.nbytes].view(array.dtype).reshape(array.shape)
    return made
