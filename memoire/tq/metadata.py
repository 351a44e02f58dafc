"""What TransferQueue's calls return and take about a batch: `KVBatchMeta` by keys, `BatchMeta` by row numbers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch


def _merged_extra(infos: Sequence[Mapping[str, Any] | None], who: str) -> dict[str, Any]:
    """One mapping of several. Raises ValueError if two of them say something else of one name."""
    made: dict[str, Any] = {}
    for info in infos:
        for name, value in (info or {}).items():
            if name in made and not _is_same(made[name], value):
                raise ValueError(f"{who}.concat: extra_info key {name!r} has conflicting values across chunks.")
            made.setdefault(name, value)
    return made


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    return bool(np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other)


def _bounds(size: int, chunks: int) -> Iterator[slice]:
    """Slices of nearly equal lengths; the first ones are longer by one."""
    least, more = divmod(size, chunks)
    ends = list(itertools.accumulate(least + (place < more) for place in range(chunks)))
    return itertools.starmap(slice, zip([0, *ends], ends, strict=False))


def _checked_order(size: int, indexes: Sequence[int]) -> None:
    if len(indexes) != size:
        raise ValueError(
            f"Attempted to reorder with indexes length {len(indexes)} that does not match the batch size {size}."
        )
    if len(set(indexes)) != len(indexes):
        raise ValueError("Contain duplicate indexes.")


@dataclass
class KVBatchMeta:
    """Keys of a batch with their tags.

    Raises:
        ValueError: keys are repeated, fields are repeated, or there are not as many tags as keys.
    """

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    """Of each key."""
    partition_id: str | None = None
    fields: list[str] | None = None
    """Those that all keys have."""
    extra_info: dict[str, Any] | None = field(default_factory=dict)
    """Facts about the whole batch."""

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise ValueError(f"keys and tags must have same length, but got {len(self.keys)} and {len(self.tags)}")
        if len(self.keys) != len(set(self.keys)):
            raise ValueError("Got duplicated keys.")
        if self.fields is not None and len(self.fields) != len(set(self.fields)):
            raise ValueError("Got duplicated fields.")
        self.tags, self.extra_info = copy.deepcopy(self.tags), copy.deepcopy(self.extra_info)

    @property
    def size(self) -> int:
        """How many keys."""
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        return f"KVBatchMeta(size={self.size}, field_names={self.fields}, extra_info={self.extra_info})"

    def select_keys(self, keys_to_select: list[str]) -> KVBatchMeta:
        """These keys with their tags, in this order.

        Raises:
            ValueError: a key is repeated.
            RuntimeError: a key is not in this batch.
        """
        if len(set(keys_to_select)) != len(keys_to_select):
            raise ValueError("Contain duplicate keys.")
        missing = set(keys_to_select) - set(self.keys)
        if missing:
            raise RuntimeError(f"Keys {missing} not found in current batch.")
        tags = dict(zip(self.keys, self.tags, strict=True))
        return self._like(keys_to_select, [tags[key] for key in keys_to_select])

    def _like(self, keys: list[str], tags: list[dict[str, Any]]) -> KVBatchMeta:
        return KVBatchMeta(keys, tags, self.partition_id, self.fields, self.extra_info)

    def reorder(self, indexes: list[int]) -> None:
        """Put keys and tags into this order, in place. Raises ValueError if it is no permutation."""
        _checked_order(self.size, indexes)
        self.keys, self.tags = [self.keys[i] for i in indexes], [self.tags[i] for i in indexes]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Parts of nearly equal size, some of them empty if there are fewer keys."""
        return [self._like(self.keys[part], self.tags[part]) for part in _bounds(self.size, chunks)]

    @classmethod
    def concat(cls, data: list[KVBatchMeta]) -> KVBatchMeta:
        """One batch of several; empty ones are left out.

        Raises:
            ValueError: partitions, fields or extra_info differ, or a key is in two of them.
        """
        some = [part for part in data if part]
        if not some:
            return KVBatchMeta()
        first = some[0]
        if any(part.fields is not None and set(part.fields) != set(first.fields or ()) for part in some):
            raise ValueError("Field names do not match for concatenation.")
        if any(part.partition_id != first.partition_id for part in some):
            raise ValueError("Partition do not match for concatenation.")
        return KVBatchMeta(
            keys=[key for part in some for key in part.keys],
            tags=[tags for part in some for tags in part.tags],
            partition_id=first.partition_id,
            fields=first.fields,
            extra_info=_merged_extra([part.extra_info for part in some], "KVBatchMeta") or None,
        )


class BatchMeta:
    """Numbers of rows with what is known about their fields.

    Args:
        global_indexes, partition_ids: Of each row.
        field_schema: What is known of each field, by name: "dtype", "shape", "is_nested", "is_non_tensor",
            "per_sample_shapes".
        production_status: int8 [rows], 1 for a row that has all fields; None is 0 for all.
        extra_info: Facts about the whole batch.
        custom_meta: Tags of each row.

    Raises:
        ValueError: lengths differ.
    """

    def __init__(
        self,
        global_indexes: list[int],
        partition_ids: list[str],
        field_schema: dict[str, dict[str, Any]] | None = None,
        production_status: Any = None,
        extra_info: dict[str, Any] | None = None,
        custom_meta: list[dict[str, Any]] | None = None,
    ) -> None:
        rows = len(global_indexes)
        if len(partition_ids) != rows:
            raise ValueError(f"Length mismatch: global_indexes has {rows}, partition_ids has {len(partition_ids)}")
        self.global_indexes, self.partition_ids = list(global_indexes), list(partition_ids)
        self.field_schema = {name: dict(known) for name, known in (field_schema or {}).items()}
        self.extra_info = dict(extra_info or {})
        status = np.zeros(rows, np.int8) if production_status is None else np.array(production_status, np.int8)
        if len(status) != rows:
            raise ValueError(f"production_status length {len(status)} != batch_size {rows}")
        self.production_status = status
        self.custom_meta = [dict(tags) for tags in custom_meta or [{} for _ in range(rows)]]
        if len(self.custom_meta) != rows:
            raise ValueError(f"custom_meta length {len(self.custom_meta)} != batch_size {rows}")
        for name, known in self.field_schema.items():
            shapes = known.get("per_sample_shapes")
            if shapes is not None and len(shapes) != rows:
                raise ValueError(f"Field '{name}' per_sample_shapes length {len(shapes)} != batch_size {rows}")

    @property
    def size(self) -> int:
        """How many rows."""
        return len(self.global_indexes)

    def __len__(self) -> int:
        return self.size

    @property
    def field_names(self) -> list[str]:
        """Names of the fields, sorted."""
        return sorted(self.field_schema)

    @property
    def is_ready(self) -> bool:
        """Whether there are rows and all of them have all fields."""
        return self.size > 0 and bool((self.production_status == 1).all())

    def __str__(self) -> str:
        return (
            f"BatchMeta(size={self.size}, field_names={self.field_names}, is_ready={self.is_ready}, "
            f"global_indexes={self.global_indexes}, extra_info={self.extra_info})"
        )

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        """A fact about the whole batch."""
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        """Set a fact about the whole batch."""
        self.extra_info[key] = value

    def update_custom_meta(self, custom_meta: list[dict[str, Any]]) -> None:
        """Add tags to each row; those of the same name are replaced. Raises ValueError if there are not as many."""
        if len(custom_meta) != self.size:
            raise ValueError(f"The length of custom_meta list {len(custom_meta)} must match the batch size {self.size}")
        for held, brought in zip(self.custom_meta, custom_meta, strict=True):
            held.update(brought)

    def select_samples(self, sample_indices: list[int]) -> BatchMeta:
        """Rows at these places. Raises ValueError if there is no such place."""
        if any(place < 0 or place >= self.size for place in sample_indices):
            raise ValueError(f"Sample indices must be in range [0, {self.size})")
        return self._rows(sample_indices, self.field_schema)

    def select_fields(self, field_names: list[str]) -> BatchMeta:
        """These fields, as far as they are known."""
        chosen = {name: self.field_schema[name] for name in field_names if name in self.field_schema}
        return self._rows(range(self.size), chosen)

    def _rows(self, places: Iterable[int], fields: Mapping[str, dict[str, Any]]) -> BatchMeta:
        chosen = list(places)
        return BatchMeta(
            [self.global_indexes[i] for i in chosen],
            [self.partition_ids[i] for i in chosen],
            {name: _some_shapes(known, chosen) for name, known in fields.items()},
            self.production_status[chosen],
            self.extra_info,
            [self.custom_meta[i] for i in chosen],
        )

    def reorder(self, indices: list[int]) -> None:
        """Put rows into this order, in place. Raises ValueError if it is no permutation."""
        _checked_order(self.size, indices)
        made = self.select_samples(indices)
        self.__dict__.update(made.__dict__)

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """Parts of nearly equal size, some of them empty if there are fewer rows."""
        places = range(self.size)
        return [self._rows(places[part], self.field_schema) for part in _bounds(self.size, chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """The rows of each partition, in the order in which partitions come first."""
        names = dict.fromkeys(self.partition_ids)
        places = [[place for place, each in enumerate(self.partition_ids) if each == name] for name in names]
        return [self._rows(each, self.field_schema) for each in places]

    @classmethod
    def concat(cls, data: list[Self], validate: bool = True) -> BatchMeta:
        """One batch of several; empty ones are left out.

        Raises:
            ValueError: fields, their dtypes or extra_info differ.
        """
        some = [part for part in data if part.size]
        if not some:
            return BatchMeta.empty()
        first = some[0]
        for place, part in enumerate(some if validate else ()):
            if part.field_names != first.field_names:
                raise ValueError(
                    f"BatchMeta.concat: field_names mismatch at chunk[{place}]. Expected {first.field_names}, got "
                    f"{part.field_names}."
                )
            for name, known in part.field_schema.items():
                if known.get("dtype") != first.field_schema[name].get("dtype"):
                    raise ValueError(f"Field '{name}' dtype mismatch in concat: chunk[0] and chunk[{place}]")
        return BatchMeta(
            [number for part in some for number in part.global_indexes],
            [name for part in some for name in part.partition_ids],
            {name: _joined_shapes([part.field_schema[name] for part in some], some) for name in first.field_schema},
            np.concatenate([part.production_status for part in some]),
            _merged_extra([part.extra_info for part in some], "BatchMeta"),
            [tags for part in some for tags in part.custom_meta],
        )

    @classmethod
    def empty(cls, extra_info: dict[str, Any] | None = None) -> BatchMeta:
        """No rows."""
        return cls([], [], extra_info=extra_info)


def _some_shapes(known: Mapping[str, Any], places: Sequence[int]) -> dict[str, Any]:
    shapes = known.get("per_sample_shapes")
    return dict(known) if shapes is None else {**known, "per_sample_shapes": [shapes[i] for i in places]}


def _joined_shapes(known: Sequence[Mapping[str, Any]], parts: Sequence[BatchMeta]) -> dict[str, Any]:
    if not any(each.get("is_nested") or each.get("per_sample_shapes") for each in known):
        return dict(known[0])
    shapes = [
        each.get("per_sample_shapes") or [each.get("shape")] * part.size
        for each, part in zip(known, parts, strict=True)
    ]
    return {**known[0], "shape": None, "is_nested": True, "per_sample_shapes": list(itertools.chain(*shapes))}
