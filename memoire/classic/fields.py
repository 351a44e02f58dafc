"""Seven fields of the classic API: schema from templates, switches as parameters, and batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire import Parameters, Schema
from memoire.building import GatheredSamples
from memoire.errors import ParameterError, SchemaError

FIELDS = ("state", "action", "reward", "prob", "value", "qvest", "info")
"""Names of an entry's fields in the classic order. Each is one column, or one per leaf of a nested template."""

OWN_NAMES = {"discount": "discount_factor"}
"""Parameters with another classic name: name in `Parameters`, classic name."""
FLAGS = tuple(f"{side}_{field}" for side in ("prev", "next") for field in FIELDS)
"""Names of the 14 switches of `cache_flags`, in order."""


class BatchSide(NamedTuple):
    """One side of a batch of transitions; unpacks as s, a, r, p, v, q, i.

    Shapes: B batch_size, L frame_stack, F a field's own shape. state is [B, L, *F], oldest frame first; other arrays
    are [B, *F]; a field that `cache_flags` leaves out has B = 0. Nested templates give dicts or tuples of arrays.
    """

    state: Any
    action: Any
    reward: Any
    prob: Any
    value: Any
    qvest: Any
    info: Any


class ReplayBatch(tuple[BatchSide, BatchSide, NDArray[np.float32]]):
    """Batch of `get_batch`: unpacks as (prev, next, weight); attributes hold other results for learners.

    prev and next are `BatchSide`. weight, float32 [B], is the weight by which samples were drawn; a loss needs
    `importance` instead. All arrays belong to the caller.
    """

    importance: NDArray[np.float32]
    """[B] in (0, 1], factor of the loss: (population * probability) ** -importance_exponent over its maximum."""
    ids: NDArray[Any]
    """[B] id of each sample's entry, never reused; pass ids to `update_priorities`."""
    reward: NDArray[np.float32]
    """[B, *F] sum of the discounted rewards from the newest prev state up to the next state."""
    discount: NDArray[np.float32]
    """[B, *F] discount_factor ** steps; 0 if the episode terminated."""
    steps: NDArray[np.int32]
    """[B] entries between prev and next; less than multi_step if next is the episode's final state."""
    model_version: NDArray[np.int64]
    """[B] version of the model that acted; 0 if unknown."""
    age: NDArray[np.float32]
    """[B] seconds since each entry was recorded."""

    @property
    def prev(self) -> BatchSide:
        """Side of the window that ends at the sampled entry."""
        return self[0]

    @property
    def next(self) -> BatchSide:
        """Side that lies `steps` entries after prev."""
        return self[1]

    @property
    def weight(self) -> NDArray[np.float32]:
        """[B] weights, to which the probabilities of the draws were proportional."""
        return self[2]


def seven_fields(buffers: Sequence[Any]) -> Schema:
    """Return the schema of seven templates in the classic order. Raises SchemaError, which names the wrong template."""
    named = {f"{field}_buf": buffer for field, buffer in zip(FIELDS, buffers, strict=True)}
    schema = Schema({"state": named.pop("state_buf"), **named})  # only state has a role
    if schema.ragged:
        raise SchemaError(
            f"{schema.ragged[0]} must be of fixed shape in this class. Use memoire.Buffer for ragged columns."
        )
    reward_shape = _array(schema, "reward_buf").shape
    for name, shape in (("reward_buf", reward_shape), ("value_buf", reward_shape), ("qvest_buf", reward_shape)):
        column = _array(schema, name)
        if column.dtype != np.float32:
            raise SchemaError(f"{name} must have dtype float32, got {column.dtype}. Make the template np.float32.")
        if column.shape != shape:
            raise SchemaError(f"{name} must have the shape of reward_buf, {shape}, got {column.shape}.")
    if _array(schema, "prob_buf").shape != ():
        raise SchemaError(f"prob_buf must have shape (), got {schema['prob_buf'].shape}. It is one probability.")
    return Schema(dict(zip(FIELDS, buffers, strict=True)))


def seven_roots(schema: Schema, endpoint: str) -> None:
    """Raise SchemaError unless a schema's columns are `FIELDS`. `endpoint` is the server's, for the error."""
    if schema.roots != FIELDS:
        raise SchemaError(
            f"the server at {endpoint} stores the columns {', '.join(schema.roots)}, not the seven fields of this "
            f"class. Use memoire.connect() with it."
        )


def _array(schema: Schema, name: str) -> Any:
    if name not in schema:
        raise SchemaError(f"{name} must be one array, got a nest of {', '.join(schema.leaves(name))}.")
    return schema[name]


def defaults(schema: Schema) -> Parameters:
    """Return the classic defaults: memoire's parameters, with all 14 switches on."""
    return Parameters().replace(**sides_of([True] * len(FLAGS), schema))


def sides_of(flags: Iterable[Any], schema: Schema) -> dict[str, tuple[str, ...]]:
    """Convert `cache_flags` to the parameters prev and next: columns by name. Raises ParameterError."""
    expected = f"{len(FLAGS)} booleans, or different names out of {', '.join(FLAGS)}"
    values = flags.tolist() if isinstance(flags, np.ndarray) else flags
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ParameterError("cache_flags", flags, expected)
    flags_or_names = list(values)
    if flags_or_names and all(isinstance(each, str) for each in flags_or_names):
        on = set(flags_or_names)
        if len(on) != len(flags_or_names) or not on <= set(FLAGS):
            raise ParameterError("cache_flags", flags, expected)
    elif len(flags_or_names) == len(FLAGS) and all(
        isinstance(each, bool | int | np.bool_) and each in (0, 1) for each in flags_or_names
    ):
        on = {name for name, each in zip(FLAGS, flags_or_names, strict=True) if each}
    else:
        raise ParameterError("cache_flags", flags, expected)
    return {
        side: tuple(leaf for field in FIELDS if f"{side}_{field}" in on for leaf in schema.leaves(field))
        for side in ("prev", "next")
    }


def flags_of(parameters: Parameters, schema: Schema) -> tuple[bool, ...]:
    """Return the 14 switches of parameters. A nested field is on if any part of it is on."""
    prev = schema.names if parameters.prev is None else parameters.prev
    following = schema.states if parameters.next is None else parameters.next
    return tuple(any(leaf in side for leaf in schema.leaves(field)) for side in (prev, following) for field in FIELDS)


def batch_of(
    schema: Schema,
    parameters: Parameters,
    gathered: GatheredSamples,
    factor: NDArray[np.float32],
    out: ReplayBatch | Sequence[Any] | None = None,
) -> ReplayBatch:
    """Return a classic batch of gathered samples; `factor`, float32 [B], holds their importance.

    With `out` the batch is copied into its arrays, which must have the batch's shapes and dtypes.
    """
    stack = parameters.frame_stack
    batch = ReplayBatch((_side(schema, gathered.prev, stack), _side(schema, gathered.next, stack), gathered.weight))
    batch.importance, batch.ids = factor, gathered.ids
    batch.reward, batch.discount, batch.steps = gathered.reward, gathered.discount, gathered.steps
    batch.model_version, batch.age = gathered.model_version, gathered.age
    return batch if out is None else _fill(out, batch)


def _side(schema: Schema, columns: dict[str, NDArray[Any]], stack: int) -> BatchSide:
    """Return the seven fields of a side, nested as declared; a field that is off has batch dimension 0."""
    arrays = dict(columns)
    for name in schema.keys() - columns.keys():
        column = schema[name]
        window = (stack,) if column.role == "state" else ()
        arrays[name] = np.empty((0, *window, *column.shape), column.dtype)
    return BatchSide(*(schema.nest(field, arrays) for field in FIELDS))


def _fill(out: ReplayBatch | Sequence[Any], batch: ReplayBatch) -> ReplayBatch:
    """Copy a batch into the caller's (prev, next, weight); all arrays are compared before one is written."""
    targets, arrays = dict(_walk("out", tuple(out))), dict(_walk("out", tuple(batch)))
    if isinstance(out, ReplayBatch):
        targets |= vars(out)
        arrays |= vars(batch)
    for name, array in arrays.items():
        target = targets.get(name)
        if target is None or target.shape != array.shape or target.dtype != array.dtype:
            received = None if target is None else f"{target.dtype}{list(target.shape)}"
            raise ParameterError(name, received, f"an array {array.dtype}{list(array.shape)}")
    for name, array in arrays.items():
        np.copyto(targets[name], array)
    if isinstance(out, ReplayBatch):
        return out
    filled = ReplayBatch((BatchSide(*out[0]), BatchSide(*out[1]), out[2]))
    vars(filled).update(vars(batch))
    return filled


def _walk(name: str, value: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield every array of a nest with its name, such as "out[0][1]"."""
    if isinstance(value, np.ndarray):
        yield name, value
        return
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, part in parts:
        yield from _walk(f"{name}[{key!r}]", part)
