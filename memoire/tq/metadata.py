"""Metadata of batches in TransferQueue's calls: `KVBatchMeta` by keys, `BatchMeta` by row numbers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch


def _merge_extra_info(infos: Sequence[Mapping[str, Any] | None], class_name: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for info in infos:
        for name, value in (info or {}).items():
            if name in merged and not _is_same(merged[name], value):
                raise ValueError(f"{class_name}.concat: extra_info key {name!r} has conflicting values across chunks.")
            merged.setdefault(name, value)
    return merged


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    return bool(np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other)


def _bounds(size: int, chunks: int) -> Iterator[slice]:
    length, remainder = divmod(size, chunks)
    ends = list(itertools.accumulate(length + (place < remainder) for place in range(chunks)))
    return itertools.starmap(slice, zip([0, *ends], ends, strict=False))


def _check_order(size: int, indexes: Sequence[int]) -> None:
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
        ValueError: keys are repeated, fields are repeated, or keys and tags differ in number.
    """

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    """Tags of each key, by name."""
    partition_id: str | None = None
    fields: list[str] | None = None
    """Names of the fields that all keys have."""
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
        """Number of keys in the batch."""
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        return f"KVBatchMeta(size={self.size}, field_names={self.fields}, extra_info={self.extra_info})"

    def select_keys(self, keys_to_select: list[str]) -> KVBatchMeta:
        """Return these keys with their tags, in this order.

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
        """Reorder keys and tags in place. Raises ValueError if `indexes` has another length or repeats an index."""
        _check_order(self.size, indexes)
        self.keys, self.tags = [self.keys[i] for i in indexes], [self.tags[i] for i in indexes]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Split the batch into parts of nearly equal size, some of them empty if there are fewer keys than parts."""
        return [self._like(self.keys[part], self.tags[part]) for part in _bounds(self.size, chunks)]

    @classmethod
    def concat(cls, data: list[KVBatchMeta]) -> KVBatchMeta:
        """Concatenate batches; empty ones are left out.

        Raises:
            ValueError: partitions, fields or extra_info differ, or two batches have the same key.
        """
        parts = [part for part in data if part]
        if not parts:
            return KVBatchMeta()
        first = parts[0]
        if any(part.fields is not None and set(part.fields) != set(first.fields or ()) for part in parts):
            raise ValueError("Field names do not match for concatenation.")
        if any(part.partition_id != first.partition_id for part in parts):
            raise ValueError("Partition do not match for concatenation.")
        return KVBatchMeta(
            keys=[key for part in parts for key in part.keys],
            tags=[tags for part in parts for tags in part.tags],
            partition_id=first.partition_id,
            fields=first.fields,
            extra_info=_merge_extra_info([part.extra_info for part in parts], "KVBatchMeta") or None,
        )


class BatchMeta:
    """Numbers of rows with facts about their fields.

    Args:
        global_indexes: Number of each row.
        partition_ids: Partition of each row.
        field_schema: Facts of each field, by name: "dtype", "shape", "is_nested", "is_non_tensor",
            "per_sample_shapes".
        production_status: int8 [rows], 1 for a row that has all fields; None means 0 for all rows.
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
        self.field_schema = {name: dict(facts) for name, facts in (field_schema or {}).items()}
        self.extra_info = dict(extra_info or {})
        status = np.zeros(rows, np.int8) if production_status is None else np.array(production_status, np.int8)
        if len(status) != rows:
            raise ValueError(f"production_status length {len(status)} != batch_size {rows}")
        self.production_status = status
        self.custom_meta = [dict(tags) for tags in custom_meta or [{} for _ in range(rows)]]
        if len(self.custom_meta) != rows:
            raise ValueError(f"custom_meta length {len(self.custom_meta)} != batch_size {rows}")
        for name, facts in self.field_schema.items():
            shapes = facts.get("per_sample_shapes")
            if shapes is not None and len(shapes) != rows:
                raise ValueError(f"Field '{name}' per_sample_shapes length {len(shapes)} != batch_size {rows}")

    @property
    def size(self) -> int:
        """Number of rows in the batch."""
        return len(self.global_indexes)

    def __len__(self) -> int:
        return self.size

    @property
    def field_names(self) -> list[str]:
        """Sorted names of the fields."""
        return sorted(self.field_schema)

    @property
    def is_ready(self) -> bool:
        """True if the batch has rows, and each row has all fields."""
        return self.size > 0 and bool((self.production_status == 1).all())

    def __str__(self) -> str:
        return (
            f"BatchMeta(size={self.size}, field_names={self.field_names}, is_ready={self.is_ready}, "
            f"global_indexes={self.global_indexes}, extra_info={self.extra_info})"
        )

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        """Return a fact about the whole batch, or `default`."""
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        """Set a fact about the whole batch."""
        self.extra_info[key] = value

    def update_custom_meta(self, custom_meta: list[dict[str, Any]]) -> None:
        """Add tags to each row, replacing those of the same name. Raises ValueError for another number of rows."""
        if len(custom_meta) != self.size:
            raise ValueError(f"The length of custom_meta list {len(custom_meta)} must match the batch size {self.size}")
        for tags, new_tags in zip(self.custom_meta, custom_meta, strict=True):
            tags.update(new_tags)

    def select_samples(self, sample_indices: list[int]) -> BatchMeta:
        """Return the rows at these indices. Raises ValueError if an index is out of range."""
        if any(place < 0 or place >= self.size for place in sample_indices):
            raise ValueError(f"Sample indices must be in range [0, {self.size})")
        return self._rows(sample_indices, self.field_schema)

    def select_fields(self, field_names: list[str]) -> BatchMeta:
        """Return the batch with only these fields; unknown names are ignored."""
        selected = {name: self.field_schema[name] for name in field_names if name in self.field_schema}
        return self._rows(range(self.size), selected)

    def _rows(self, places: Iterable[int], fields: Mapping[str, dict[str, Any]]) -> BatchMeta:
        indices = list(places)
        return BatchMeta(
            [self.global_indexes[i] for i in indices],
            [self.partition_ids[i] for i in indices],
            {name: _select_shapes(facts, indices) for name, facts in fields.items()},
            self.production_status[indices],
            self.extra_info,
            [self.custom_meta[i] for i in indices],
        )

    def reorder(self, indices: list[int]) -> None:
        """Reorder rows in place. Raises ValueError if `indices` is not a permutation."""
        _check_order(self.size, indices)
        reordered = self.select_samples(indices)
        self.__dict__.update(reordered.__dict__)

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """Split the batch into parts of nearly equal size, some of them empty if there are fewer rows than parts."""
        places = range(self.size)
        return [self._rows(places[part], self.field_schema) for part in _bounds(self.size, chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """Return the rows of each partition, in the order of the partitions' first rows."""
        names = dict.fromkeys(self.partition_ids)
        places = [[place for place, each in enumerate(self.partition_ids) if each == name] for name in names]
        return [self._rows(each, self.field_schema) for each in places]

    @classmethod
    def concat(cls, data: list[Self], validate: bool = True) -> BatchMeta:
        """Concatenate batches; empty ones are left out.

        Raises:
            ValueError: fields or their dtypes differ (unless `validate` is False), or extra_info differs.
        """
        parts = [part for part in data if part.size]
        if not parts:
            return BatchMeta.empty()
        first = parts[0]
        for place, part in enumerate(parts if validate else ()):
            if part.field_names != first.field_names:
                raise ValueError(
                    f"BatchMeta.concat: field_names mismatch at chunk[{place}]. Expected {first.field_names}, got "
                    f"{part.field_names}."
                )
            for name, facts in part.field_schema.items():
                if facts.get("dtype") != first.field_schema[name].get("dtype"):
                    raise ValueError(f"Field '{name}' dtype mismatch in concat: chunk[0] and chunk[{place}]")
        return BatchMeta(
            [number for part in parts for number in part.global_indexes],
            [name for part in parts for name in part.partition_ids],
            {name: _join_shapes([part.field_schema[name] for part in parts], parts) for name in first.field_schema},
            np.concatenate([part.production_status for part in parts]),
            _merge_extra_info([part.extra_info for part in parts], "BatchMeta"),
            [tags for part in parts for tags in part.custom_meta],
        )

    @classmethod
    def empty(cls, extra_info: dict[str, Any] | None = None) -> BatchMeta:
        """Return a batch without rows."""
        return cls([], [], extra_info=extra_info)


def _select_shapes(facts: Mapping[str, Any], places: Sequence[int]) -> dict[str, Any]:
    shapes = facts.get("per_sample_shapes")
    return dict(facts) if shapes is None else {**facts, "per_sample_shapes": [shapes[i] for i in places]}


def _join_shapes(facts: Sequence[Mapping[str, Any]], parts: Sequence[BatchMeta]) -> dict[str, Any]:
    if not any(each.get("is_nested") or each.get("per_sample_shapes") for each in facts):
        return dict(facts[0])
    shapes = [
        each.get("per_sample_shapes") or [each.get("shape")] * part.size
        for each, part in zip(facts, parts, strict=True)
    ]
    return {**facts[0], "shape": None, "is_nested": True, "per_sample_shapes": list(itertools.chain(*shapes))}
