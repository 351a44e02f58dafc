"""A server's memory as records of a file, and what such a file says of itself.

    pool.records()  client 7, its caches, client 9, its caches ...          episode, episode, ...
    file            about, accounts, client 7, cache, cache, client 9, cache ..., end

`restore` puts the records back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from memoire.accounting.merge import Rows
from memoire.errors import (
    DataError,
    ParameterError,
    SchemaError,
)
from memoire.pool.interface import KeepsLayout, TablePool
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema

from . import snapshot_file
from .snapshot_file import Record, SnapshotFile, SnapshotHeader, TableAbout


class HasMemory(Protocol):
    """What a snapshot reads of a server's table."""

    name: str
    storage: Any
    schema: Schema
    parameters: Parameters
    parameters_version: int

    @property
    def making(self) -> dict[str, Any]:
        """Settings beside the parameters that what it holds is made with: plain values, by name."""

    @property
    def limiter(self) -> Any:
        """The limiter of its draws."""

    def state(self) -> dict[str, Any]:
        """What draws go on from beside what it holds: fields of a `TableRecord`."""

    def check_parameters(self, parameters: Parameters) -> None:
        """Raise ParameterError if it cannot take these."""

    @property
    def pool(self) -> TablePool:
        """What it holds."""


def about(
    tables: Iterable[HasMemory],
    *,
    server: str,
    run: str,
    finished: bool = False,
    taken: float = 0.0,
    models: dict[str, int] | None = None,
) -> SnapshotHeader:
    """The first record of a file: whose tables these are, and under which parameters."""
    told = [
        TableAbout(
            name=table.name,
            storage=table.storage,
            schema=table.schema.to_json(),
            parameters=table.parameters.to_wire(),
            parameters_version=table.parameters_version,
            making=table.making,
        )
        for table in tables
    ]
    return SnapshotHeader(server=server, run=run, finished=finished, taken=taken, models=models or {}, tables=told)


def records(
    tables: Iterable[HasMemory],
    run: str,
    finished: bool,
    accounts: Iterable[Rows],
    go_on: Callable[[], bool] = lambda: True,
) -> Iterator[Record]:
    """All that these tables hold, and what was counted for it, until `go_on` says no."""
    for rows in accounts:
        if len(rows):
            yield Record(snapshot_file.AccountsRecord(run=run, finished=finished), 0, rows.tobytes())
    for place, table in enumerate(tables):
        keeps = table.pool if isinstance(table.pool, KeepsLayout) else None
        facts, payload, changes = ({}, b"", 0) if keeps is None else keeps.saved_layout()
        yield Record(msgspec.convert(table.state() | facts, snapshot_file.TableRecord), place, payload)
        for body, held in table.pool.records():
            if not go_on():
                return
            yield Record(body, place, held)
        if keeps is not None and keeps.saved_layout() == (facts, payload, changes):
            yield Record(snapshot_file.TableEndRecord(), place)


class SavedHead(NamedTuple):
    """The id of a snapshot file, and its header."""

    id: bytes
    about: SnapshotHeader


def heads(paths: Sequence[str | Path]) -> dict[Path, SavedHead]:
    """The beginning of each file. Raises ParameterError, DataError."""
    try:
        listed = [] if isinstance(paths, (str, bytes, Path)) else list(map(Path, paths))
    except TypeError:
        listed = []
    if not listed:
        raise ParameterError("paths", paths, "a list of at least one file")
    found = {}
    for path in listed:
        with SnapshotFile(path) as file:
            found[path] = SavedHead(file.id, file.about)
    return found


def facts(path: str | Path, *, check: bool = False) -> dict[str, Any]:
    """What a file holds, in plain words and numbers; with `check` every checksum is compared.

    Raises:
        DataError: it cannot be read, or is no snapshot.
    """
    with SnapshotFile(path) as file:
        told, end = file.about, file.end
        damage = file.verify() if check else None
        counts = end.tables if end is not None else [None] * len(told.tables)
        return {
            "path": str(path),
            "server": told.server,
            "run": told.run,
            "taken": told.taken,
            "bytes": file.size,
            "models": told.models,
            "complete": end is not None and end.complete,
            "damage": str(damage) if damage else ("" if check or end is not None else "its end is damaged or cut off"),
            "tables": [_table_facts(path, table, count) for table, count in zip(told.tables, counts, strict=True)],
        }


def _table_facts(path: str | Path, table: TableAbout, counts: snapshot_file.Counts | None) -> dict[str, Any]:
    names = snapshot_file.Counts.__struct_fields__
    try:
        schema = json.loads(table.read_schema().to_json())
    except SchemaError as error:
        raise DataError(str(path), f"holds table {table.name!r} of no schema: {error}") from error
    return {
        "name": table.name,
        "storage": table.storage,
        "schema": schema,
        "parameters": table.parameters,
        **({name: getattr(counts, name) for name in names} if counts is not None else {}),
    }
