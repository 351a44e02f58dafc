"""Snapshots of a server's tables: records to save, descriptions of files, and restoration into one or more servers.

    pool.records()  client 7, its caches, client 9, its caches ...          episode, episode, ...
    file            about, accounts, client 7, cache, cache, client 9, cache ..., end

`restore` puts records back, into the same server or other servers. Several servers that restore the same files divide
the records by client id (episodes by the memory and number that they had). The servers need not communicate, and each
client stays whole.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from memoire.accounting.merge import Rows
from memoire.arguments import whole
from memoire.errors import (
    DataError,
    EntryError,
    EpisodeTooLong,
    ParameterError,
    ProtocolError,
    SchemaError,
    SnapshotMismatch,
)
from memoire.limits import Limits
from memoire.replay.parameters import Parameters, differing_fields
from memoire.tables import registry
from memoire.tables.base import (
    KeepsLayout,
    RecordBody,
    RestoredMemory,
    RestoreOutcome,
    SavedRecord,
    SavesRows,
    TakesPriorities,
)
from memoire.tables.table import OpenTable
from memoire.wire import _bytes
from memoire.wire.rows import unpack_accounts

from . import snapshot_file
from .snapshot_file import (
    AccountsRecord,
    FileDamage,
    LimiterState,
    SnapshotFile,
    SnapshotHeader,
    SnapshotRecord,
    TableAbout,
    TableEndRecord,
    TableRecord,
)


def read_header(
    tables: Iterable[OpenTable],
    *,
    server: str,
    run: str,
    finished: bool = False,
    taken: float = 0.0,
    models: dict[str, int] | None = None,
) -> SnapshotHeader:
    """Return the header of a snapshot of these tables."""
    saved = [
        TableAbout(
            name=table.name,
            storage=table.storage,
            schema=table.schema.to_json(),
            parameters=table.parameters.to_wire(),
            parameters_version=table.parameters_version,
            making=table.content_settings,
        )
        for table in tables
    ]
    return SnapshotHeader(server=server, run=run, finished=finished, taken=taken, models=models or {}, tables=saved)


def records(
    tables: Iterable[OpenTable],
    run: str,
    finished: bool,
    accounts: Iterable[Rows],
    go_on: Callable[[], bool] = lambda: True,
) -> Iterator[SnapshotRecord]:
    """Yield records of all contents of these tables, and of clients' accounts, until `go_on` returns False."""
    for rows in accounts:
        if len(rows):
            yield SnapshotRecord(snapshot_file.AccountsRecord(run=run, finished=finished), 0, rows.tobytes())
    for place, table in enumerate(tables):
        keeps = table.pool if isinstance(table.pool, KeepsLayout) else None
        facts, payload, changes = ({}, b"", 0) if keeps is None else keeps.saved_layout()
        yield SnapshotRecord(msgspec.convert(table.state() | facts, snapshot_file.TableRecord), place, payload)
        for body, content in table.pool.records():
            if not go_on():
                return
            yield SnapshotRecord(body, place, content)
        if keeps is not None and keeps.saved_layout() == (facts, payload, changes):
            yield SnapshotRecord(snapshot_file.TableEndRecord(), place)


class SavedHead(NamedTuple):
    """The id of a snapshot file, and its header."""

    id: bytes
    about: SnapshotHeader


def read_headers(paths: Sequence[str | Path]) -> dict[Path, SavedHead]:
    """Return id and header of each file. Raises ParameterError for a bad list, DataError for an unreadable file."""
    try:
        listed = [] if isinstance(paths, (str, bytes, Path)) else list(map(Path, paths))
    except TypeError:
        listed = []
    if not listed:
        raise ParameterError("paths", paths, "a list of at least one file")
    heads = {}
    for path in listed:
        with SnapshotFile(path) as file:
            heads[path] = SavedHead(file.id, file.about)
    return heads


def describe_file(path: str | Path, *, check: bool = False) -> dict[str, Any]:
    """Return a description of a file's contents; with `check` every checksum is compared.

    Raises:
        DataError: the file cannot be read, or is not a snapshot.
    """
    with SnapshotFile(path) as file:
        header, end = file.about, file.end
        damage = file.verify() if check else None
        counts = end.tables if end is not None else [None] * len(header.tables)
        return {
            "path": str(path),
            "server": header.server,
            "run": header.run,
            "taken": header.taken,
            "bytes": file.size,
            "models": header.models,
            "complete": end is not None and end.complete,
            "damage": str(damage) if damage else ("" if check or end is not None else "its end is damaged or cut off"),
            "tables": [_table_facts(path, table, count) for table, count in zip(header.tables, counts, strict=True)],
        }


def _table_facts(path: str | Path, table: TableAbout, counts: snapshot_file.ContentCounts | None) -> dict[str, Any]:
    names = snapshot_file.ContentCounts.__struct_fields__
    try:
        schema = json.loads(table.read_schema().to_json())
    except SchemaError as error:
        raise DataError(str(path), f"holds table {table.name!r} with an invalid schema: {error}") from error
    return {
        "name": table.name,
        "storage": table.storage,
        "schema": schema,
        "parameters": table.parameters,
        **({name: getattr(counts, name) for name in names} if counts is not None else {}),
    }


MAX_REFUSALS: Final = 20
"""Most refusals that are described one by one."""


@dataclass(frozen=True, slots=True)
class RestoreCounts:
    """Outcome of a restoration: each cache and episode of the files is counted once."""

    files: int = 0
    caches: int = 0
    samples: int = 0
    """Number of samples in the restored caches."""
    unused: int = 0
    """Number of restored samples that were never drawn."""
    episodes: int = 0
    entries: int = 0
    """Number of entries in the restored episodes."""
    clients: int = 0
    """Number of clients with a restored cache."""
    rows: int = 0
    """Number of restored rows of other kinds of tables: prompts, or rows by key."""
    known: int = 0
    """Number of caches and episodes that the server had already."""
    elsewhere: int = 0
    """Number of caches and episodes that belong to other parts."""
    refused: dict[str, int] = field(default_factory=dict)
    """Number of caches and episodes that no longer fit this server, by code."""
    refusals: tuple[str, ...] = ()
    """Refused records and reasons, a sentence each: the first `MAX_REFUSALS`, and one for each table left out."""
    damaged: int = 0
    """Number of caches and episodes that could not be read; at least so many if the end of a file is missing, too."""
    overwritten: int = 0
    """Number of caches and episodes, restored or held before, that were dropped to make room."""
    accounts: int = 0
    """Number of clients whose totals were restored."""

    def __str__(self) -> str:
        words = [f"{self.caches} caches with {self.unused} of {self.samples} samples left"] if self.caches else []
        words += [f"{self.episodes} episodes with {self.entries} entries"] if self.episodes else []
        words = words or ([] if self.rows else ["nothing"])
        for name in ("rows", "known", "elsewhere", "damaged", "overwritten"):
            words += [f"{getattr(self, name)} {name}"] if getattr(self, name) else []
        words += [f"{count} refused ({code})" for code, count in self.refused.items()]
        text = "; ".join(self.refusals)
        suffix = "; and others" if text and len(self.refusals) < sum(self.refused.values()) else ""
        return f"{', '.join(words)}{': ' if text else ''}{text}{suffix}"


def restore(
    paths: Sequence[str | Path],
    tables: Iterable[OpenTable],
    *,
    part: tuple[int, int] = (0, 1),
    skip_damaged: bool = False,
    stays: bool = True,
    is_same: bool = False,
    keeps_generators: bool = False,
    configure: bool = False,
    discard_mismatched: bool = False,
    limits: Limits,
    now: float = 0.0,
    inherit: Callable[[str, bool, Rows], Any] = lambda run, finished, rows: None,
    take_parameters: Callable[[str, Parameters], Any] = lambda table, parameters: None,
) -> RestoreCounts:
    """Restore the contents of snapshot files into tables, by name; one record at a time is in memory.

    Args:
        paths: Paths of the files, each of one server of the saved cluster.
        part: (rank, of): restore only the records of server `rank` among `of` servers that divide the files.
        skip_damaged: Restore the readable records; else a damaged file is refused before anything is restored.
        now: Present time in seconds since 1970, since caches have grown older after their file was written.
        stays: True if clients stay until they are heard of; see `Pool.put_back`.
        is_same: True if the tables are the saved ones, after a restart of their server: their generators and limiters
            go on, too. A table that never held anything goes on alike, if there is one file and one part.
        keeps_generators: True if tables keep their own random generators also if `is_same`.
        configure: Let tables take the files' parameters first, by `take_parameters`, called with name and parameters.
        discard_mismatched: Leave out tables of a file whose samples were made with other settings than the present
            ones, and count their contents as refused (code "parameters"); otherwise refuse the file.
        inherit: Takes the accounts of clients in a run: its name, True if it is over, rows of `rows.ACCOUNT`.

    Raises:
        DataError: a file cannot be read, is damaged, or not a snapshot.
        SnapshotMismatch: a file has a table that this server lacks, or one of another schema, storage or settings that
            its samples were made with.
        ParameterError: `part` is invalid, or a table cannot take the files' parameters.
        Closed: the server was closed meanwhile.
    """
    rank, of = _checked(part)
    with ExitStack() as opened:
        files = [opened.enter_context(SnapshotFile(path)) for path in paths]
        known = {table.name: table for table in tables}
        for saved in (table for file in files for table in file.about.tables if of > 1):
            if (kind := registry.find(saved.storage)) is not None and (why := kind.why_whole):
                raise ParameterError("part", part, f"(0, 1): table {saved.name!r} cannot be divided, since {why}")
        wanted = _newest_parameters(files) if configure else {}
        left_out: set[tuple[Path, str]] = set()
        for file in files:
            for place, saved in enumerate(file.about.tables):
                try:
                    _match(file, saved, known, wanted.get(saved.name))
                except SnapshotMismatch:
                    if not (discard_mismatched or (is_same and file.is_empty(place))):
                        raise
                    left_out.add((file.path, saved.name))
            if not skip_damaged and (damage := file.verify()):
                advice = "skip_damaged=True (--skip-damaged) restores the readable records"
                raise DataError(str(file.path), f"has {damage}; {advice}")
        for name, parameters in wanted.items():
            known[name].check_parameters(parameters)
        restoring = _Restoring(files, known, left_out, rank, of, stays, is_same, keeps_generators, limits, now, inherit)
        restoring.read_layouts(wanted)
        for name, parameters in wanted.items():
            take_parameters(name, parameters)
        return restoring.run()


def _newest_parameters(files: Iterable[SnapshotFile]) -> dict[str, Parameters]:
    """Return the parameters of the files' tables, by name; from several files, those with the highest version."""
    newest: dict[str, tuple[int, Parameters]] = {}
    for file in files:
        for saved in file.about.tables:
            if saved.name not in newest or saved.parameters_version > newest[saved.name][0]:
                newest[saved.name] = saved.parameters_version, _parameters_of(file.path, saved)
    return {name: parameters for name, (_, parameters) in newest.items()}


def _checked(part: Any) -> tuple[int, int]:
    if not isinstance(part, tuple) or len(part) != 2:
        raise ParameterError("part", part, "(rank, of)")
    of = whole("part[1]", part[1], 1)
    return whole("part[0]", part[0], 0, of - 1), of


def _match(
    file: SnapshotFile, saved: TableAbout, tables: dict[str, OpenTable], parameters: Parameters | None = None
) -> None:
    """Raise SnapshotMismatch if a file's table does not fit the server's, under `parameters` or else its own."""
    table = tables.get(saved.name)
    if table is None:
        names = ", ".join(map(repr, tables))
        problem = f"holds table {saved.name!r}, but this server has {names}"
        raise SnapshotMismatch(str(file.path), problem, f"Give this server a table {saved.name!r}.")
    if saved.storage != table.storage:
        problem = f"holds {saved.storage} in table {saved.name!r}, but this server stores {table.storage}"
        raise SnapshotMismatch(str(file.path), problem, f"Give the table storage={saved.storage!r}.")
    if (schema := saved.read_schema()) != table.schema:
        problem = f"holds {schema} in table {saved.name!r}, but this server stores {table.schema}"
        raise SnapshotMismatch(str(file.path), problem, "Start the server with the schema of the file.")
    file_parameters = _parameters_of(file.path, saved)
    if differences := differing_settings(table, saved, parameters or table.parameters, file_parameters):
        settings = ", ".join(f"{name}={value!r}" for name, (_, value) in differences.items())
        own = ", ".join(f"{name}={value!r}" for name, (value, _) in differences.items())
        problem = f"holds samples of table {saved.name!r} that were made with {settings}, but this server has {own}"
        raise SnapshotMismatch(
            str(file.path),
            problem,
            "Start the server with the settings of the file; restore(..., configure=True) takes its parameters.",
        )


def _parameters_of(path: Path, saved: TableAbout) -> Parameters:
    try:
        return Parameters.from_wire(saved.parameters)
    except ParameterError as error:
        problem = f"has settings of table {saved.name!r} that this version of memoire cannot take: {error}"
        raise SnapshotMismatch(str(path), problem, "Restore it with the version that wrote it.") from error


def differing_settings(
    table: OpenTable, saved: TableAbout, parameters: Parameters, file_parameters: Parameters
) -> dict[str, tuple[Any, Any]]:
    """Return the settings that a file's table was made with and that differ here: name -> (value here, in the file).

    Caches hold finished samples, and groups of prompts finished scores. Entries of episodes and rollouts are raw: other
    values are computed from them here.
    """
    differences = registry.require_kind(table.storage).differing_parameters(table.schema, parameters, file_parameters)
    making = table.content_settings
    names = sorted(making.keys() | saved.making.keys())
    values = {name: (making.get(name), saved.making.get(name)) for name in names}
    return differences | {name: pair for name, pair in values.items() if pair[0] != pair[1]}


_OF_PRIORITIES: Final = ("discount", "mix_lambda", "reward_coeff")
"""Parameters that the priorities of entries depend on which no learner has reported priorities for."""


@dataclass
class _Restoring:
    """One restoration of files into tables; see `restore`."""

    _files: Sequence[SnapshotFile]
    _tables: dict[str, OpenTable]
    _left_out: set[tuple[Path, str]]
    """Tables of files, by path and name, that do not fit the server's."""
    _rank: int
    _of: int
    _stays: bool
    _is_same: bool
    _keeps_generators: bool
    _limits: Limits
    _now: float
    _inherit: Callable[[str, bool, Rows], Any]
    _heirs: dict[str, RestoredMemory] = field(default_factory=dict)
    """Memories with the saved layout, ready to replace tables' own, by table."""
    _replaced: set[str] = field(default_factory=set)
    """Names of tables whose memory was replaced by one of `_heirs`."""
    _limiters: dict[str, LimiterState] = field(default_factory=dict)
    _remade: set[str] = field(default_factory=set)
    """Names of tables of episodes whose priorities are computed again, except those that learners reported."""
    _done: Counter[str] = field(default_factory=Counter)
    _refused: Counter[str] = field(default_factory=Counter)
    _refusals: list[str] = field(default_factory=list)
    _clients: set[tuple[str, bytes]] = field(default_factory=set)
    _seen: set[int] = field(default_factory=set)
    """Hashes of the ids of clients whose accounts were restored."""

    def _is_remade(self, saved: TableAbout) -> bool:
        table = self._tables[saved.name]
        differences = differing_fields(table.schema, table.parameters, Parameters.from_wire(saved.parameters))
        has_priorities = isinstance(table.pool, TakesPriorities) and table.schema.value is not None
        return has_priorities and not differences.keys().isdisjoint(_OF_PRIORITIES)

    def _goes_on(self, table: OpenTable) -> bool:
        """Return True if a table continues the saved one, with its generator and limiter."""
        is_whole = len(self._files) == 1 and self._of == 1
        return self._is_same or (is_whole and table.pool.is_untouched)

    def read_layouts(self, wanted: dict[str, Parameters]) -> None:
        """Make memories with the saved layout of episodes; the server's tables do not change yet. Tables that cannot be
        read whole are restored episode by episode instead.

        Args:
            wanted: Parameters that tables take before they are restored, by name.

        Raises:
            DataError: the layout in a file is impossible.
        """
        if len(self._files) != 1 or self._of != 1:
            return
        (file,), damage = self._files, FileDamage()
        heirs: dict[int, RestoredMemory | None] = {}
        ends = [] if file.end is None else file.end.tables
        for place, (saved, end) in enumerate(zip(file.about.tables, ends, strict=False)):
            if (file.path, saved.name) in self._left_out:
                continue  # this server may lack the table
            table = self._tables[saved.name]
            is_equal = Parameters.from_wire(saved.parameters) == wanted.get(saved.name, table.parameters)
            if end.is_still and is_equal and self._goes_on(table):
                heirs[place] = None
        for record in file.records(damage) if heirs else ():
            if record.table in heirs:
                saved = file.about.tables[record.table]
                table = self._tables[saved.name]
                heirs[record.table] = self._lay(file, table, heirs[record.table], record, wanted.get(saved.name))
        self._heirs = {
            file.about.tables[place].name: heir
            for place, heir in heirs.items()
            if heir is not None and not damage and heir.finish()
        }

    def _lay(
        self,
        file: SnapshotFile,
        table: OpenTable,
        heir: RestoredMemory | None,
        record: SnapshotRecord,
        wanted: Parameters | None,
    ) -> RestoredMemory | None:
        """Add a record of a table to the memory that is made with its layout; returns that memory, if any."""

        def layout_error(problem: str) -> DataError:
            return DataError(str(file.path), f"{problem} (table {table.name!r})")

        body, payload = record.body, record.payload
        if not isinstance(payload, bytes) or not isinstance(table.pool, KeepsLayout):
            return heir
        if isinstance(body, TableRecord):
            generator, parameters = self._keeps_generators and not self._is_same, wanted or table.parameters
            return table.pool.empty_copy(body, payload, parameters, keeps_generator=generator, wrong=layout_error)
        if heir is not None:
            heir.put(body, payload)
        return heir

    def run(self) -> RestoreCounts:
        self._remade = {
            saved.name
            for file in self._files
            for saved in file.about.tables
            if (file.path, saved.name) not in self._left_out and self._is_remade(saved)
        }
        streams = [self._of_file(file) for file in self._files]
        # Episodes of several files come in the order of their ends, because eviction follows that order.
        for _, table, client, record in heapq.merge(*streams, key=lambda item: item[0]):
            self._take(table, client, record)
        for name, state in self._limiters.items():  # limiters last, since `put_record` counts in the limiter
            self._tables[name].limiter.restore_state(msgspec.structs.asdict(state))
        return RestoreCounts(
            files=len(self._files), clients=len(self._clients), accounts=len(self._seen),
            refused=dict(self._refused), refusals=tuple(self._refusals), **self._done,
        )  # fmt: skip

    def _of_file(
        self, file: SnapshotFile
    ) -> Iterator[tuple[tuple[int, float], OpenTable, RecordBody | None, SnapshotRecord]]:
        """Yield the file's records, each with its sort key among all files, its table, and the heading before it."""
        heading, damage, since = None, FileDamage(), max(0.0, self._now - file.about.taken)
        places = {name: place for place, name in enumerate(self._tables)}
        for record in file.records(damage):
            name, body = file.about.tables[record.table].name, record.body
            if body.is_heading:
                heading = body
            if isinstance(body, TableEndRecord) or not body.is_alone:
                continue
            if (file.path, name) in self._left_out and not isinstance(body, AccountsRecord):
                if not (isinstance(body, TableRecord) or body.is_heading):
                    self._refuse("parameters", f"table {name!r} in {file.path} does not fit the table here")
                continue
            record = record._replace(body=body.older(since))
            table = self._tables.get(name, next(iter(self._tables.values())))  # accounts belong to no table
            yield (places.get(name, 0), body.time), table, heading, record
        self._done["damaged"] += damage.unread or 0

    def _take(self, table: OpenTable, heading: RecordBody | None, record: SnapshotRecord) -> None:
        body, payload = record.body, record.payload
        if isinstance(body, AccountsRecord):
            self._take_accounts(body, payload)
        elif isinstance(body, TableRecord):
            self._take_state(table, body)
        elif table.name in self._replaced:
            pass  # the record was restored
        elif payload is None:
            self._done["damaged"] += 1
        elif (name := body.routing_key(heading)) is not None and part_of(name, self._of) != self._rank:
            self._done["elsewhere"] += not body.is_heading
        else:
            is_remade = table.name in self._remade
            saved = SavedRecord(body, bytes(payload), heading, self._stays, is_remade, self._limits)
            try:
                self._count(table, table.pool.put_record(saved))
            except (ProtocolError, ParameterError, EntryError, EpisodeTooLong) as error:
                code, why = (error.code, error.detail) if isinstance(error, ProtocolError) else ("container", error)
                self._refuse(code, f"{body.description(heading)} of table {table.name!r}: {why}")

    def _count(self, table: OpenTable, put: RestoreOutcome) -> None:
        self._done["overwritten"] += put.overwritten
        self._done.update(put.counts if put.is_new else {"known": 1})
        if put.is_new and put.client:
            self._clients.add((table.name, put.client))

    def _refuse(self, code: str, sentence: str) -> None:
        self._refused[code] += 1
        if len(self._refusals) < MAX_REFUSALS and sentence not in self._refusals:
            self._refusals.append(sentence)

    def _take_state(self, table: OpenTable, body: TableRecord) -> None:
        if self._is_same and isinstance(table.pool, SavesRows):
            return  # state.db is up to date
        goes_on, heir = self._goes_on(table), self._heirs.get(table.name)
        if goes_on and body.limiter is not None and (self._is_same or table.limiter.is_untouched):
            self._limiters[table.name] = body.limiter
        if heir is None or heir.memory is None or not isinstance(table.pool, KeepsLayout):
            pass
        elif table.pool.replace_memory(heir.memory, heir.names):
            self._replaced.add(table.name)
            self._done.update(episodes=len(heir.names), entries=heir.entries)
        if self._keeps_generators and not self._is_same:
            body = msgspec.structs.replace(body, random=b"")
        table.pool.restore_state(body, is_same=goes_on)

    def _take_accounts(self, body: AccountsRecord, payload: Any) -> None:
        if payload is None:
            return
        try:
            rows = unpack_accounts(payload)
        except ValueError as error:
            self._refuse("value", f"the totals of run {body.run!r}: {error}")
            return
        is_own = [part_of(row["client"].tobytes(), self._of) == self._rank for row in rows]
        if any(is_own):
            self._inherit(body.run, body.finished, rows[is_own])
            self._seen.update(hash(row["client"].tobytes()) for row in rows[is_own])


def part_of(name: bytes, of: int) -> int:
    """Return the number of the part, among `of` parts, that a name belongs to; the same in all versions."""
    return _bytes.checksum(name) % of
