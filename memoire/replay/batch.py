"""Batches of drawn samples: the engine's gathered rows, and the mapping that a learner trains on.

`GatheredSamples` holds both ends of each window, column by column, always with the stack axis.
`Batch` is the mapping from names to arrays that `Buffer.sample` returns, ready to compute targets.
`TorchBatch` holds tensors; torch is imported when the first one is made. `memoire.torch` is its public path.
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
from memoire.arguments import no_such_field_error
from memoire.errors import NotInstalled, ParameterError

from .conversion import ID as ID
from .conversion import real_errors
from .schema import Schema

if TYPE_CHECKING:
    import torch

V = TypeVar("V", covariant=True)
RowForm: TypeAlias = tuple[str, tuple[int, ...], np.dtype[Any]]


class PriorityUpdate(NamedTuple):
    """Counts of TD errors by result: returned by every `update_priorities`, in one process and in a cluster."""

    applied: int = 0
    """Entries whose priority was set."""
    stale: int = 0
    """Entries that were evicted since they were drawn."""
    sent: int = 0
    """Errors sent to the clients or servers that own the entries; `stats` reports later how many were applied."""
    lost: int = 0
    """Errors whose owner is unknown, and older errors that were dropped after waiting too long for their owner."""

    def plus(self, other: Self) -> Self:
        """Return the sum of two objects, count by count."""
        return type(self)(*map(sum, zip(self, other, strict=True)))


@dataclass
class GatheredSamples:
    """Samples as the engine returns them; every array belongs to the caller.

    Shapes: B samples, K frame_stack, F the column's own shape, R the reward's shape.
    """

    prev: dict[str, NDArray[Any]]
    """Start of each window: state columns [B, K, *F], oldest frame first; other columns [B, *F], newest entry."""
    next: dict[str, NDArray[Any]]
    """End of each window, `steps` later, in the same shapes; at an episode's end its final state is the last frame."""
    reward: NDArray[np.float32]
    """[B, *R] sum of the window's discounted rewards; zeros [B] in a schema without reward column."""
    discount: NDArray[np.float32]
    """[B, *R] gamma ** steps, or 0 where the episode terminated at the window's end."""
    steps: NDArray[np.int32]
    """[B] entries between both ends: multi_step, or fewer at an episode's end."""
    weight: NDArray[np.float32]
    """[B] sampling weights, proportional to the probabilities. Never multiply a loss by them: use `importance`."""
    ids: NDArray[Any]
    """[B] ids of the entries: int64 numbers in one process, `ID` in a cluster."""
    age: NDArray[np.float32]
    """[B] seconds since the entry was added."""
    model_version: NDArray[np.int64]
    """[B] version of the model that acted, as passed to the writer; 0 if unknown."""
    mask: NDArray[np.bool_] | None = None
    """[B, T] for sequences of T entries, else None: True for real entries past the burn-in. With sequences prev has
    states [B, T + 1, K, *F] and other columns [B, T, *F] (or [B, *F], of the first entry alone), reward and discount
    are [B, T, *R] of each entry, next is empty, and ids, weight, age and model_version are those of the first entry."""
    max_share: float = 1.0
    """Share of the maximum in a sequence's priority; the remaining share is that of the mean error."""
    prev_lengths: dict[str, NDArray[np.int32]] = field(default_factory=dict)
    """Element counts of each ragged column of prev: [B, K] for a state [B, K, L, *F], [B] for other columns [B, L, *F].
    F is the shape of an element, L the longest value at both ends and at least 1, padded with zeros."""
    next_lengths: dict[str, NDArray[np.int32]] = field(default_factory=dict)
    """Element counts of each ragged column of next, in the same shapes."""

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
        """Allocate arrays for B = `size` samples; rewards are 0. Ragged columns are added when they are gathered.

        Args:
            sides: Columns of prev and of next: name, and shape and dtype per sample.
            length: T of sequences; 0 for transitions.
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
        """Return these samples as views of the same arrays; ragged columns are cropped copies."""

        def part(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: array[rows] for name, array in value.items()}
            return value[rows] if isinstance(value, np.ndarray) else value

        samples = GatheredSamples(**{name: part(value) for name, value in vars(self).items()})
        for name in samples.prev_lengths.keys() | samples.next_lengths.keys():
            samples._crop(name)
        return samples

    def _crop(self, name: str) -> None:
        """Crop a ragged column to its longest value in this batch."""
        sides = [
            (side, lengths[name])
            for side, lengths in ((self.prev, self.prev_lengths), (self.next, self.next_lengths))
            if name in lengths
        ]
        longest = max(1, *(int(lengths.max(initial=0)) for _, lengths in sides))
        for side, lengths in sides:
            side[name] = np.ascontiguousarray(side[name][(*[slice(None)] * lengths.ndim, slice(longest))])

    def unstacked(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return a state column [B, K, *F], or [B, T + 1, K, *F] of sequences, without axis K if K is 1."""
        if self.mask is not None:
            return array[:, :, 0] if array.shape[2] == 1 else array
        return array[:, 0] if array.shape[1] == 1 else array


def grouped_by_client(ids: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (order, starts): the rows [B] of `ID`s sorted stably by client, and each client's first position [C]."""
    if (grouped := _core.by_owner(np.ascontiguousarray(ids))) is not None:
        return grouped
    first, second = ids["client"][:, 0], ids["client"][:, 1]
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return order, np.flatnonzero(is_first)


_FACTS = ("reward", "discount", "ids", "steps", "age", "model_version", "mask")


def use_output_arrays(schema: Schema, gathered: GatheredSamples, out: Mapping[str, NDArray[Any]]) -> None:
    """Put the caller's arrays into `gathered` by their names in a batch, so that rows are copied straight into them.

    Arrays that are not C-contiguous are filled later, by `Batch.copy_into`.

    Raises:
        ParameterError: `out` has a name that the batch lacks, or an array of another shape or dtype. Nothing was
            changed.
    """
    for name in out:
        if name.removeprefix("next_").removesuffix("_length") in schema.ragged:
            why = "each batch has a new array of a ragged column, as wide as its longest value"
            raise ParameterError.with_text(f"out[{name!r}] cannot be given: {why}. Nothing was changed.")
    places = {name: _place_of(schema, gathered, name) for name in out}
    for name, (side, key) in places.items():
        array = gathered.weight if key == "importance" else side.get(key)
        if array is not None and key in schema.states:
            array = gathered.unstacked(array)
        _check_out(name, array, out[name])
    for name, (side, key) in places.items():
        if out[name].flags.carray and key in side:
            side[key] = out[name].reshape(side[key].shape)


def _place_of(schema: Schema, gathered: GatheredSamples, name: str) -> tuple[dict[str, Any], str]:
    """Return (dict, key) of a batch's array among the gathered ones; the key is missing if the batch lacks it."""
    if name == "importance" or (name in _FACTS and (name != "reward" or schema.reward is not None)):
        return vars(gathered), name
    side, key = (gathered.next, name[5:]) if name.startswith("next_") else (gathered.prev, name)
    return ({}, name) if key == schema.reward else (side, key)


class Attributes(Mapping[str, V]):
    """A read-only mapping from names to arrays that are attributes as well."""

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
        """Return the number of arrays; the number of samples is `len(batch.ids)`."""
        return len(self._arrays)


class Batch(Attributes[NDArray[Any]]):
    """Samples to learn from: a mapping from names to arrays, also as attributes. The caller owns the arrays.

    Shapes: B samples, F the column's own shape, R the reward's shape. State columns are [B, *F], or
    [B, frame_stack, *F] if frame_stack is above 1.

        obs, next_obs   the state columns under their names, and the states after `reward` was earned. A nested
                        observation has one key for each leaf ("obs.image", "next_obs.image"); batch["obs"] and
                        batch.obs nest them again
        action, ...     the other columns, of the entry that was drawn; next_action, ... where the
                        parameters ask for them
        reward          float32 [B, *R]: sum over s < steps of gamma**s * r
        discount        float32 [B, *R]: gamma**steps, or 0 where the episode terminated. The target of a value
                        function V is `reward + discount * V(next_obs)`, also where an episode was truncated
        importance      float32 [B]: factor of each sample's loss. Schaul et al., ICLR 2016, section 3.4
        ids             [B]: ids to pass to `update_priorities`
        steps           int32 [B]: entries between obs and next_obs
        age             float32 [B]: seconds since the entry was added
        model_version   int64 [B]: the model that acted

    A ragged column is [B, L, *F], padded with zeros to L, its longest value in the batch at both ends of the windows.
    `obs_length` and `next_obs_length` int32 [B] count the real elements. With a frame stack or with sequences they have
    all axes before L.

    With sequences (`sequence_length` T above 0) all columns have a time axis after B. obs is [B, T + 1, *F]: its last
    state follows the last entry. action and the like are [B, T, *F]. reward and discount are [B, T, *R] of each entry
    (gamma, or 0 where the episode terminated). next_obs is absent, and there are

        mask            bool [B, T]: the entries to learn from; False while warming up and behind an episode's end
        steps           int32 [B]: number of entries; the rows behind them are zeros

    The keys leave out the one-step reward and the raw weight: used in a loss, both are silently wrong.

    Example:
        batch = buffer.sample(64)
        target = batch.reward + batch.discount * np.zeros(64)  # the network's values of batch.next_obs
    """

    # `update` is update_priorities(ids, td_errors) of the buffer, server or reader that draws the batch.

    gathered: GatheredSamples
    """The samples as the engine returned them, with weights and one-step rewards; they share the batch's arrays."""
    divisor: float
    """Divisor of the importance; importance * divisor is not normalized."""
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
        self.gathered, self.divisor, self.left_out = gathered, divisor, left_out
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
        """The columns of an entry."""
        return self._schema

    def update_priorities(self, td_errors: Any) -> PriorityUpdate:
        """Set the priorities from the TD errors: [B], or [B, T] of sequences, without those outside of `mask`."""
        mask = self.gathered.mask
        if mask is not None and np.ndim(td_errors) == 2:
            td_errors = sequence_errors(td_errors, mask, self.gathered.max_share)
        return self._update(self._arrays["ids"], td_errors)

    def to(self, device: Any = None, *, pin_memory: bool = True, non_blocking: bool = True) -> Any:
        """Return these arrays as torch tensors on a device, a `memoire.torch.TorchBatch`; on the CPU without a copy.

            batch = buffer.sample(256).to("cuda")
            batch.update_priorities(td_errors)              # tensors on any device

        Args:
            device: Name of a device, such as "cuda" or "cpu"; None is the CPU.
            pin_memory: True to copy through pinned memory, so that the copy overlaps with other work.
            non_blocking: True to return before the copy is done; the GPU's own stream waits for the copy.

        Raises:
            NotInstalled: torch is not installed: pip install 'memoire-rl[torch]'.
            ParameterError: torch has no equal dtype for an array, or the device is unknown.
        """
        return TorchBatch(self, device, pin_memory=pin_memory, non_blocking=non_blocking)

    @property
    def advantage(self) -> NDArray[np.float32]:
        """Generalized advantage estimate, the return minus the value that the actor computed, by `discount` and
        `mix_lambda`; in the shape of the return column.

        Schulman et al., ICLR 2016, equation 16, whose sum is the TD(lambda) return minus the value.

        Raises:
            AttributeError: the schema has no value column, or the parameters exclude the value or the return.
        """
        value, returned = self._schema.value, self._schema.qvest
        if value not in self._arrays or returned not in self._arrays:
            raise AttributeError("this batch has no advantage: `prev` must have a value column and a return column")
        advantage: NDArray[np.float32] = self._arrays[str(returned)] - self._arrays[str(value)]
        return advantage

    def copy_into(self, out: Mapping[str, NDArray[Any]]) -> Batch:
        """Copy the batch's arrays into those of `out` (a mapping, or an earlier batch) with the same names.

        Returns this batch, which holds the caller's arrays under those names.

        Raises:
            ParameterError: `out` has a name that the batch lacks, or an array of another shape or dtype. Nothing was
                copied.
        """
        for name in out:
            _check_out(name, self._arrays.get(name), out[name])
        for name in out:
            if not np.may_share_memory(out[name], self._arrays[name]):  # not put into the batch by `use_output_arrays`
                np.copyto(out[name], self._arrays[name])
            self._arrays[name] = out[name]
        return self

    def __getitem__(self, name: str) -> Any:
        try:
            return self._arrays[name]
        except (KeyError, TypeError):  # TypeError: the name is not hashable
            return self._nested(name)

    def __copy__(self) -> Self:
        batch = object.__new__(type(self))
        vars(batch).update(vars(self))
        batch._arrays = dict(self._arrays)
        return batch

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the arrays; priorities go to the same memory."""
        batch = object.__new__(type(self))
        shared = {name: value for name, value in vars(self).items() if name in ("_schema", "_update")}
        vars(batch).update(
            shared | {name: copy.deepcopy(value, memo) for name, value in vars(self).items() if name not in shared}
        )
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """Return the arrays without the memory that they come from."""
        return vars(self) | {"_update": _elsewhere}

    def __repr__(self) -> str:
        rows = (f"{name}: {_form(array)}" for name, array in self.items())
        return f"Batch({', '.join(rows)})"

    def _nested(self, name: Any) -> Any:
        """Return a nested column, or its next state, as dicts and tuples. Raises NoSuchField if the batch lacks it."""
        for prefix in ("", "next_") if isinstance(name, str) else ():
            root = name.removeprefix(prefix)
            if name.startswith(prefix) and root in self._schema.roots:
                leaves = self._schema.leaves(root)
                if all(prefix + leaf in self._arrays for leaf in leaves):
                    return self._schema.nest(root, {leaf: self._arrays[prefix + leaf] for leaf in leaves})
        raise no_such_field_error("this batch", name, self._arrays)


def _elsewhere(ids: NDArray[Any], td_errors: Any) -> PriorityUpdate:
    """Raise ParameterError: a pickled batch has no memory whose priorities it could set."""
    advice = "pass its ids to update_priorities of the memory that they come from"
    raise ParameterError.with_text(f"This batch was pickled, so it has no memory: {advice}.")


def _side(
    prefix: str,
    schema: Schema,
    gathered: GatheredSamples,
    columns: Mapping[str, NDArray[Any]],
    lengths: Mapping[str, NDArray[np.int32]],
) -> dict[str, NDArray[Any]]:
    """Return one end of the windows by the batch's names, without the one-step reward and a stack axis of 1."""
    arrays: dict[str, NDArray[Any]] = {}
    states, reward = schema.states, schema.reward
    for name in schema.names if lengths else columns:  # ragged columns were added last
        if name in columns and name != reward:
            is_stacked = name in states
            arrays[prefix + name] = gathered.unstacked(columns[name]) if is_stacked else columns[name]
            if name in lengths:
                arrays[f"{prefix}{name}_length"] = gathered.unstacked(lengths[name]) if is_stacked else lengths[name]
    return arrays


def sequence_errors(td_errors: Any, mask: NDArray[np.bool_], max_share: float) -> NDArray[np.float64]:
    """Return max_share * maximum + (1 - max_share) * mean of each sequence's absolute errors in its mask, [B].

    Kapturowski et al., Recurrent Experience Replay in Distributed Reinforcement Learning, ICLR 2019, section 2.3.

    Args:
        td_errors: [B, T], of any sign; errors outside of the mask are ignored, also NaN.
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


def _check_out(name: str, array: NDArray[Any] | None, value: Any) -> None:
    is_array = isinstance(value, np.ndarray)
    if array is not None and is_array and value.shape == array.shape and value.dtype == array.dtype:
        return
    received = _form(value) if is_array else type(value).__name__
    if array is None:
        raise ParameterError.with_text(
            f"out[{name!r}] cannot be given: the batch has no array of this name. Nothing was changed."
        )
    raise ParameterError(f"out[{name!r}]", received, f"an array {_form(array)}")


def _form(array: NDArray[Any]) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _torch() -> Any:
    """Import torch. Raises NotInstalled."""
    with NotInstalled.explained("pip install 'memoire-rl[torch]'"):
        import torch
    return torch


class TorchBatch(Attributes["torch.Tensor"]):
    """Tensors of a batch under the same names, also as attributes; nested as in `Batch`. `Batch.to` makes one.

    On the CPU the tensors share memory with the batch's arrays. ids stay an array: `batch.ids`.

    Args:
        device, pin_memory, non_blocking: See `Batch.to`.

    Raises:
        ParameterError: torch has no equal dtype for an array, or the device is unknown.
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
        """The batch that was drawn."""
        self.device = device_of(device)
        move = functools.partial(_move, device=self.device, pin_memory=pin_memory, non_blocking=non_blocking)
        self._arrays = {name: move(as_tensor(array)) for name, array in batch.items() if name != "ids"}

    def to(
        self, device: torch.device | str | None = None, *, pin_memory: bool = True, non_blocking: bool = True
    ) -> TorchBatch:
        """Return the batch on another device, or itself if the device is the same."""
        if device_of(device) == self.device:
            return self
        batch = copy.copy(self)
        batch.device = device_of(device)
        move = functools.partial(_move, device=batch.device, pin_memory=pin_memory, non_blocking=non_blocking)
        batch._arrays = {name: move(tensor) for name, tensor in self._arrays.items()}
        return batch

    @property
    def ids(self) -> NDArray[Any]:
        """[B] ids of the entries, as an array."""
        ids: NDArray[Any] = self.source.ids
        return ids

    def update_priorities(self, td_errors: torch.Tensor | NDArray[Any]) -> PriorityUpdate:
        """Set the priorities of these samples from their TD errors: [B], or [B, T] of sequences, on any device."""
        torch = _torch()
        if isinstance(td_errors, torch.Tensor):
            td_errors = td_errors.detach().cpu().float().numpy()
        return self.source.update_priorities(td_errors)

    def __getitem__(self, name: str) -> Any:
        try:
            return self._arrays[name]
        except KeyError:
            return _map_arrays(self.source[name], self._nested(name))

    def _nested(self, name: str) -> Callable[[NDArray[Any]], torch.Tensor]:
        if name == "ids":
            raise no_such_field_error("this batch of tensors", name, self._arrays)
        tensors = {id(array): self._arrays[key] for key, array in self.source.items() if key != "ids"}
        return lambda array: tensors[id(array)]

    def __repr__(self) -> str:
        rows = (f"{name}: {str(each.dtype)[6:]}{list(each.shape)}" for name, each in self.items())
        return f"TorchBatch({', '.join(rows)}, device={self.device})"


def device_of(device: torch.device | str | None) -> torch.device:
    """Return a torch device by name; None is the CPU and "cuda" the current GPU.

    Raises:
        ParameterError: torch does not know the device, or cannot use it on this machine.
    """
    torch = _torch()
    try:
        resolved = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ParameterError("device", device, f"one that torch knows ({str(error).splitlines()[0]})") from error
    if resolved.type != "cuda":
        return resolved
    if not torch.cuda.is_available():
        raise ParameterError("device", str(device), "a device of this machine: torch finds no GPU that it can use")
    return torch.device("cuda", torch.cuda.current_device()) if resolved.index is None else resolved


def _move(tensor: torch.Tensor, *, device: torch.device, pin_memory: bool, non_blocking: bool) -> torch.Tensor:
    if device == tensor.device:
        return tensor
    if device.type == "cuda" and pin_memory and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()  # a copy from pinned memory overlaps with other work
    # A non-blocking copy onto the CPU could be read before it is complete.
    return tensor.to(device, non_blocking=non_blocking and device.type != "cpu")


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor that shares the array's memory, shape and dtype.

    Raises:
        ParameterError: torch has no equal dtype.
    """
    torch = _torch()
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise ParameterError("dtype", str(array.dtype), f"one that torch has ({error})") from error


def _map_arrays(value: Any, change: Callable[[NDArray[Any]], torch.Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _map_arrays(part, change) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_map_arrays(part, change) for part in value)
    return change(value)


def pinned(batch: Batch) -> dict[str, NDArray[Any]]:
    """Return arrays like a batch's in pinned memory, for `sample(..., out=)` and `get_batch(..., out=)`.

    The arrays have the shapes [B, ...] and dtypes of the batch's arrays. Without a GPU the memory is ordinary. Ragged
    columns are left out: their width changes from batch to batch.
    """
    torch = _torch()
    is_there = torch.cuda.is_available()
    ragged = {*batch.gathered.prev_lengths, *batch.gathered.next_lengths}
    arrays = {}
    for name, array in batch.items():
        if name == "ids" or name.removeprefix("next_").removesuffix("_length") in ragged:
            continue
        room = torch.empty(max(1, array.nbytes), dtype=torch.uint8, pin_memory=is_there).numpy()
        arrays[name] = room[: array.nbytes].view(array.dtype).reshape(array.shape)
    return arrays
