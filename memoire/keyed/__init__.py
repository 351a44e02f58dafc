"""Tables of rows by key: the storage of `memoire.tq`, with named values in partitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from memoire.errors import ParameterError
from memoire.kinds import Kind, PoolPlace, TableSettings

if TYPE_CHECKING:
    from memoire import Schema


class KeyedKind(Kind):
    """Kind of tables that hold rows by partition and key, with the fields that writers name, for `memoire.tq`."""

    name, holds = "keyed", "rows"
    weighed = "Bytes of rows."
    pool = "memoire.keyed.pool:KeyedPool"
    saved = "memoire.keyed.pool:PartitionRecord KeyedRecord"
    answers = "memoire.keyed.handlers:request_handlers"
    offers = ("HasCalls", "KeyedPool")
    instead = "memoire.tq"
    no_pushes = "this table stores rows by key, which CHANGE_ROWS writes; use memoire.tq"
    is_once, has_columns = True, False
    why_whole = "clients of memoire.tq expect a key at one address. Save with tq.save_checkpoint, and load that file"

    def schema_class(self) -> type[Schema]:
        """Return the class of schemas without columns."""
        from memoire.building import NoColumns

        return NoColumns

    def schema_from(self, columns: Schema | Mapping[str, Any] | None) -> Schema:
        """Return a schema without columns. Raise ParameterError if columns are passed."""
        if columns is not None and len(columns):
            raise ParameterError(
                "schema", columns, "omitted with storage='keyed', because rows have the fields that writers name"
            )
        return self.schema_class()({})

    def check(self, settings: TableSettings, *, is_full_said: bool) -> None:
        """Raise ParameterError also for limits of entries, because bytes are the only limit."""
        super().check(settings, is_full_said=is_full_said)
        for name in ("capacity", "client_capacity"):
            if value := getattr(settings, name):
                raise ParameterError(name, value, "0 with storage='keyed', because byte_limit is the only limit")

    def _pool_options(self, settings: TableSettings, place: PoolPlace) -> dict[str, Any]:
        return {}


KIND: Final = KeyedKind()
