"""The seven fields of the page: templates as a schema, switches as parameters, and batches as it unpacks them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire import Parameters, Schema
from memoire.building import GatheredSamples
from memoire.errors import ParameterError, SchemaError

FIELDS = ("state", "action", "reward", "prob", "value", "qvest", "info")
"""The seven fields of an entry in the page's order: a column each, or one per leaf where a template is nested."""

OWN_NAMES = {"discount": "discount_factor"}
"""Parameters that the page calls otherwise: the name of `Parameters`, and the page's."""
FLAGS = tuple(f"{side}_{field}" for side in ("prev", "next") for field in FIELDS)
"""What the 14 switches of `cache_flags` are called, in their order."""


class BatchSide(NamedTuple):
    """One side of a batch of transitions, unpacked as s, a, r, p, v, q, i.

    Shapes: B batch_size, L frame_stack, F a field's own shape. state is [B, L, *F], oldest frame first; the others are
    [B, *F]; a field that `cache_flags` leaves out has B = 0. Nested templates give dicts or tuples of such arrays.
    """

    state: Any
    action: Any
    reward: Any
    prob: Any
    value: Any
    qvest: Any
    info: Any


class ReplayBatch(tuple[BatchSide, BatchSide, NDArray[np.float32]]):
    """What `get_batch` returns: unpacks as (prev, next, weight), and carries what a learner needs beside them.

    prev and next are `BatchSide`; weight, float32 [B], is what sampling was proportional to. For a loss take
    `importance`. All arrays belong to the caller.
    """

    importance: NDArray[np.float32]
    """[B] in (0, 1]: (population * probability) ** -importance_exponent over its maximum, what a loss is multiplied
    by.
    """
    ids: NDArray[Any]
    """[B]: which entry each sample is, for ever; hand back to `update_priorities`."""
    reward: NDArray[np.float32]
    """[B, *F]: sum of the discounted rewards from the newest prev state up to the next state."""
    discount: NDArray[np.float32]
    """[B, *F]: discount_factor ** steps, 0 where the episode terminated."""
    steps: NDArray[np.int32]
    """[B]: entries between prev and next; less than multi_step where the episode's final state stands in."""
    model_version: NDArray[np.int64]
    """[B]: version of the model that acted, 0 where nobody said."""
    age: NDArray[np.float32]
    """[B]: seconds since each entry was recorded."""

    @property
    def prev(self) -> BatchSide:
        """The window that ends at the sampled entry."""
        return self[0]

    @property
    def next(self) -> BatchSide:
        """`steps` entries later."""
        return self[1]

    @property
    def weight(self) -> NDArray[np.float32]:
        """[B] what sampling was proportional to."""
        return self[2]


def seven_fields(buffers: Sequence[Any]) -> Schema:
    """The schema of seven templates in the page's order. Raises SchemaError: names the buffer and what it was."""
    named = {f"{field}_buf": buffer for field, buffer in zip(FIELDS, buffers, strict=True)}
    found = Schema({"state": named.pop("state_buf"), **named})  # roles go by name: none of these but state has one
    if found.ragged:
        raise SchemaError(
            f"{found.ragged[0]} must be of fixed shape in this class. Use memoire.Buffer for ragged columns."
        )
    reward_shape = _array(found, "reward_buf").shape
    for name, shape in (("reward_buf", reward_shape), ("value_buf", reward_shape), ("qvest_buf", reward_shape)):
        column = _array(found, name)
        if column.dtype != np.float32:
            raise SchemaError(f"{name} must have dtype float32, got {column.dtype}. Make the template np.float32.")
        if column.shape != shape:
            raise SchemaError(f"{name} must have the shape of reward_buf, {shape}, got {column.shape}.")
    if _array(found, "prob_buf").shape != ():
        raise SchemaError(f"prob_buf must have shape (), got {found['prob_buf'].shape}. It is one probability.")
    return Schema(dict(zip(FIELDS, buffers, strict=True)))


def seven_roots(schema: Schema, endpoint: str) -> None:
    """Raise SchemaError unless the columns of a schema are `FIELDS`. `endpoint` is its server's, for the error."""
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
    """The page's parameters: those of memoire, with all 14 switches on."""
    return Parameters().replace(**sides_of([True] * len(FLAGS), schema))


def sides_of(flags: Iterable[Any], schema: Schema) -> dict[str, tuple[str, ...]]:
    """`cache_flags` as the parameters prev and next: columns by name. Raises ParameterError."""
    expected = f"{len(FLAGS)} booleans, or different names out of {', '.join(FLAGS)}"
    given = flags.tolist() if isinstance(flags, np.ndarray) else flags
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise ParameterError("cache_flags", flags, expected)
    listed = list(given)
    if listed and all(isinstance(each, str) for each in listed):
        on = set(listed)
        if len(on) != len(listed) or not on <= set(FLAGS):
            raise ParameterError("cache_flags", flags, expected)
    elif len(listed) == len(FLAGS) and all(
        isinstance(each, bool | int | np.bool_) and each in (0, 1) for each in listed
    ):
        on = {name for name, each in zip(FLAGS, listed, strict=True) if each}
    else:
        raise ParameterError("cache_flags", flags, expected)
    return {
        side: tuple(leaf for field in FIELDS if f"{side}_{field}" in on for leaf in schema.leaves(field))
        for side in ("prev", "next")
    }


def flags_of(parameters: Parameters, schema: Schema) -> tuple[bool, ...]:
    """The 14 switches that parameters stand for; a nested field is on when any part of it is."""
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
    """A batch of the page out of what the engine gathered; `factor`, float32 [B], is the importance of its B samples.

    It is copied into `out` where that is given: arrays of the batch's own shapes and dtypes.
    """
    stack = parameters.frame_stack
    batch = ReplayBatch((_side(schema, gathered.prev, stack), _side(schema, gathered.next, stack), gathered.weight))
    batch.importance, batch.ids = factor, gathered.ids
    batch.reward, batch.discount, batch.steps = gathered.reward, gathered.discount, gathered.steps
    batch.model_version, batch.age = gathered.model_version, gathered.age
    return batch if out is None else _fill(out, batch)


def _side(schema: Schema, columns: dict[str, NDArray[Any]], stack: int) -> BatchSide:
    """One side's seven fields, nested as declared; what was switched off is there with batch dimension 0."""
    arrays = dict(columns)
    for name in schema.keys() - columns.keys():
        column = schema[name]
        window = (stack,) if column.role == "state" else ()
        arrays[name] = np.empty((0, *window, *column.shape), column.dtype)
    return BatchSide(*(schema.nest(field, arrays) for field in FIELDS))


def _fill(out: ReplayBatch | Sequence[Any], batch: ReplayBatch) -> ReplayBatch:
    """Copy a batch into the caller's (prev, next, weight); every array is compared before one is written."""
    places, arrays = dict(_walk("out", tuple(out))), dict(_walk("out", tuple(batch)))
    if isinstance(out, ReplayBatch):
        places |= vars(out)
        arrays |= vars(batch)
    for name, array in arrays.items():
        place = places.get(name)
        if place is None or place.shape != array.shape or place.dtype != array.dtype:
            found = None if place is None else f"{place.dtype}{list(place.shape)}"
            raise ParameterError(name, found, f"an array {array.dtype}{list(array.shape)}")
    for name, array in arrays.items():
        np.copyto(places[name], array)
    if isinstance(out, ReplayBatch):
        return out
    filled = ReplayBatch((BatchSide(*out[0]), BatchSide(*out[1]), out[2]))
    vars(filled).update(vars(batch))
    return filled


def _walk(name: str, value: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every array of a nest under a name that leads there."""
    if isinstance(value, np.ndarray):
        yield name, value
        return
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, part in parts:
        yield from _walk(f"{name}[{key!r}]", part)
