"""Rows by key: values by name, in partitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from memoire.errors import ParameterError
from memoire.kinds import Kind, PoolPlace, TableSettings

if TYPE_CHECKING:
    from memoire import Schema


class KeyedKind(Kind):
    """Rows by partition and key, with the fields that their writers name: what `memoire.tq` keeps."""

    name, holds = "keyed", "rows"
    weighed = "Bytes of rows."
    pool = "memoire.keyed.pool:KeyedPool"
    saved = "memoire.keyed.pool:PartitionRecord KeyedRecord"
    answers = "memoire.keyed.handlers:answers"
    offers = ("HasCalls", "KeyedPool")
    instead = "memoire.tq"
    no_pushes = "this table stores rows by key, which are written by CHANGE_ROWS: use memoire.tq"
    is_once, has_columns = True, False
    why_whole = "clients of memoire.tq look for a key at one address alone. Save with tq.save_checkpoint, and load that"

    def schema_class(self) -> type[Schema]:
        """Rows have no columns."""
        from memoire.building import NoColumns

        return NoColumns

    def schema_from(self, columns: Schema | Mapping[str, Any] | None) -> Schema:
        """None is to be given, or a mapping without columns."""
        if columns is not None and len(columns):
            raise ParameterError(
                "schema", columns, "left out with storage='keyed': rows have the fields that writers name"
            )
        return self.schema_class()({})

    def check(self, settings: TableSettings, *, is_full_said: bool) -> None:
        """Refuse room for entries, too: bytes alone limit them."""
        super().check(settings, is_full_said=is_full_said)
        for name in ("capacity", "client_capacity"):
            if value := getattr(settings, name):
                raise ParameterError(name, value, "0 with storage='keyed': byte_limit says how much is held")

    def _pool_options(self, settings: TableSettings, place: PoolPlace) -> dict[str, Any]:
        return {}


KIND: Final = KeyedKind()
