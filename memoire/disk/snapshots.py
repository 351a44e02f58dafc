"""Snapshots on their way back: into the same server, another one, or several that share them out.

    pool.put_record   those whose client (or episode) belongs to this server's part of the whole

What belongs to which part follows from the client's id (an episode's from the memory and number it had), so that
servers that restore the same files share them out without a word between them, each client whole.

A server's memory as records of a file, and what such a file says of itself.

    pool.records()  client 7, its caches, client 9, its caches ...          episode, episode, ...
    file            about, accounts, client 7, cache, cache, client 9, cache ..., end

`restore` puts the records back.
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
from memoire.replay.parameters import Parameters, differing
from memoire.tables import registry
from memoire.tables.base import Heir, KeepsLayout, PutBack, RecordBody, SavedRecord, SavesRows, TakesPriorities
from memoire.tables.table import OpenTable
from memoire.wire import _bytes
from memoire.wire.rows import unpack_accounts

from . import snapshot_file
from .snapshot_file import (
    AccountsRecord,
    FileDamage,
    LimiterState,
    Record,
    SnapshotFile,
    SnapshotHeader,
    TableAbout,
    TableEndRecord,
    TableRecord,
)


def about(
    tables: Iterable[OpenTable],
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
    tables: Iterable[OpenTable],
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


MAX_REFUSALS: Final = 20
"""Refusals that are named one by one."""


@dataclass(frozen=True, slots=True)
class RestoreCounts:
    """What became of the caches and episodes of some files: each is counted once."""

    files: int = 0
    caches: int = 0
    samples: int = 0
    """Of these caches."""
    unused: int = 0
    """Of these samples, those that were never drawn."""
    episodes: int = 0
    entries: int = 0
    """Of these episodes."""
    clients: int = 0
    """Clients with a cache among them."""
    rows: int = 0
    """Of other kinds: prompts, or rows by key."""
    known: int = 0
    """Caches and episodes that were here already."""
    elsewhere: int = 0
    """Those that belong to other parts."""
    refused: dict[str, int] = field(default_factory=dict)
    """Those that fit this server no more, by code."""
    refusals: tuple[str, ...] = ()
    """Which these are, and why, a sentence each: the first `MAX_REFUSALS`, and one for each table that is left out."""
    damaged: int = 0
    """Those that could not be read; more where the end of a file is gone, too."""
    overwritten: int = 0
    """Caches and episodes that made room for others, of what was restored or was here before."""
    accounts: int = 0
    """Clients whose totals came back."""

    def __str__(self) -> str:
        words = [f"{self.caches} caches with {self.unused} of {self.samples} samples left"] if self.caches else []
        words += [f"{self.episodes} episodes with {self.entries} entries"] if self.episodes else []
        words = words or ([] if self.rows else ["nothing"])
        for name in ("rows", "known", "elsewhere", "damaged", "overwritten"):
            words += [f"{getattr(self, name)} {name}"] if getattr(self, name) else []
        words += [f"{count} refused ({code})" for code, count in self.refused.items()]
        text = "; ".join(self.refusals)
        more = "; and others" if text and len(self.refusals) < sum(self.refused.values()) else ""
        return f"{', '.join(words)}{': ' if text else ''}{text}{more}"


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
    """Put what some files hold into these tables, by their names; one record at a time is in memory.

    Args:
        paths: Of files, each of one server of the cluster that was saved.
        part: (rank, of): only what belongs to this one of so many servers that share the files out.
        skip_damaged: Take what is whole; else a file with damage is refused before anything is taken.
        now: Seconds since 1970: caches have grown older since their file was written.
        stays: Whether clients stay until they are heard of; see `Pool.put_back`.
        is_same: Whether these are the tables that were saved, in the next life of their server: their generators and
            limiters go on, too. So do those of a table in which nothing ever was, if there is one file and one part.
        keeps_generators: Whether tables draw by their own generators also then.
        configure: Have tables take the files' parameters first, by `take_parameters`, called with name and parameters.
        discard_mismatched: Leave out the tables of a file whose samples were made with other values than hold here, and
            count what they hold as refused (code "parameters"); else such a file is refused.
        inherit: Takes what clients had done in a run: its name, whether it was over, rows of `rows.ACCOUNT`.

    Raises:
        DataError: a file cannot be read, is damaged, or no snapshot.
        SnapshotMismatch: a file has a table that is not here, or of another schema, storage or settings that its
            samples were made with.
        ParameterError: a part that is none, or parameters that a table cannot take.
        Closed: the server was closed meanwhile.
    """
    rank, of = _checked(part)
    with ExitStack() as opened:
        files = [opened.enter_context(SnapshotFile(path)) for path in paths]
        known = {table.name: table for table in tables}
        for told in (table for file in files for table in file.about.tables if of > 1):
            if (kind := registry.find(told.storage)) is not None and (why := kind.why_whole):
                raise ParameterError("part", part, f"(0, 1): table {told.name!r} is not shared out, since {why}")
        wanted = _newest_parameters(files) if configure else {}
        left_out: set[tuple[Path, str]] = set()
        for file in files:
            for place, told in enumerate(file.about.tables):
                try:
                    _match(file, told, known, wanted.get(told.name))
                except SnapshotMismatch:
                    if not (discard_mismatched or (is_same and file.is_empty(place))):
                        raise
                    left_out.add((file.path, told.name))
            if not skip_damaged and (damage := file.verify()):
                raise DataError(str(file.path), f"has {damage}; skip_damaged=True (--skip-damaged) takes what is whole")
        for name, parameters in wanted.items():
            known[name].check_parameters(parameters)
        restoring = _Restoring(files, known, left_out, rank, of, stays, is_same, keeps_generators, limits, now, inherit)
        restoring.read_layouts(wanted)
        for name, parameters in wanted.items():
            take_parameters(name, parameters)
        return restoring.run()


def _newest_parameters(files: Iterable[SnapshotFile]) -> dict[str, Parameters]:
    """Parameters of the files' tables, by name; of several files those that were configured last."""
    newest: dict[str, tuple[int, Parameters]] = {}
    for file in files:
        for told in file.about.tables:
            if told.name not in newest or told.parameters_version > newest[told.name][0]:
                newest[told.name] = told.parameters_version, _parameters_of(file.path, told)
    return {name: parameters for name, (_, parameters) in newest.items()}


def _checked(part: Any) -> tuple[int, int]:
    if not isinstance(part, tuple) or len(part) != 2:
        raise ParameterError("part", part, "(rank, of)")
    of = whole("part[1]", part[1], 1)
    return whole("part[0]", part[0], 0, of - 1), of


def _match(
    file: SnapshotFile, told: TableAbout, tables: dict[str, OpenTable], parameters: Parameters | None = None
) -> None:
    """Refuse a table of a file that does not fit these tables. `parameters` hold when it is restored; None: the
    table's.
    """
    table = tables.get(told.name)
    if table is None:
        names = ", ".join(map(repr, tables))
        problem = f"holds table {told.name!r}, and this server has {names}"
        raise SnapshotMismatch(str(file.path), problem, f"Give this server a table {told.name!r}.")
    if told.storage != table.storage:
        problem = f"holds {told.storage} in table {told.name!r}, where this server keeps {table.storage}"
        raise SnapshotMismatch(str(file.path), problem, f"Give the table storage={told.storage!r}.")
    if (schema := told.read_schema()) != table.schema:
        problem = f"holds {schema} in table {told.name!r}, where this server stores {table.schema}"
        raise SnapshotMismatch(str(file.path), problem, "Start the server with the schema of the file.")
    theirs = _parameters_of(file.path, told)
    if found := differing_settings(table, told, parameters or table.parameters, theirs):
        made = ", ".join(f"{name}={theirs!r}" for name, (_, theirs) in found.items())
        mine = ", ".join(f"{name}={mine!r}" for name, (mine, _) in found.items())
        problem = f"holds samples of table {told.name!r} that were made with {made}, where this server has {mine}"
        raise SnapshotMismatch(
            str(file.path),
            problem,
            "Start the server with the settings of the file; restore(..., configure=True) takes its parameters.",
        )


def _parameters_of(path: Path, told: TableAbout) -> Parameters:
    try:
        return Parameters.from_wire(told.parameters)
    except ParameterError as error:
        problem = f"has settings of table {told.name!r} that this version of memoire cannot take: {error}"
        raise SnapshotMismatch(str(path), problem, "Restore it with the version that wrote it.") from error


def differing_settings(
    table: OpenTable, told: TableAbout, parameters: Parameters, theirs: Parameters
) -> dict[str, tuple[Any, Any]]:
    """What a file's table was made with otherwise than this table would: name -> (value here, value in the file).

    Caches hold finished samples, and groups of prompts finished scores. Entries of episodes and rollouts are as they
    were recorded: what follows from them is computed here.
    """
    made = registry.named(table.storage).differing_parameters(table.schema, parameters, theirs)
    mine = table.making
    names = sorted(mine.keys() | told.making.keys())
    values = {name: (mine.get(name), told.making.get(name)) for name in names}
    return made | {name: pair for name, pair in values.items() if pair[0] != pair[1]}


_OF_PRIORITIES: Final = ("discount", "mix_lambda", "reward_coeff")
"""Parameters that priorities follow from which no learner has reported."""


@dataclass
class _Restoring:
    """Files on their way into tables, once; see `restore`."""

    _files: Sequence[SnapshotFile]
    _tables: dict[str, OpenTable]
    _left_out: set[tuple[Path, str]]
    """Tables of files that do not fit these."""
    _rank: int
    _of: int
    _stays: bool
    _is_same: bool
    _keeps_generators: bool
    _limits: Limits
    _now: float
    _inherit: Callable[[str, bool, Rows], Any]
    _taken: dict[str, Heir] = field(default_factory=dict)
    """Memories that are ready to take the place of tables' own: entries lie in them as they did."""
    _over: set[str] = field(default_factory=set)
    """Tables of which such a memory has taken the place."""
    _limiters: dict[str, LimiterState] = field(default_factory=dict)
    _remade: set[str] = field(default_factory=set)
    """Tables of episodes whose priorities are computed again, but for those that learners reported."""
    _done: Counter[str] = field(default_factory=Counter)
    _refused: Counter[str] = field(default_factory=Counter)
    _refusals: list[str] = field(default_factory=list)
    _clients: set[tuple[str, bytes]] = field(default_factory=set)
    _seen: set[int] = field(default_factory=set)
    """Accounts' clients."""

    def _is_remade(self, told: TableAbout) -> bool:
        table = self._tables[told.name]
        found = differing(table.schema, table.parameters, Parameters.from_wire(told.parameters))
        has_priorities = isinstance(table.pool, TakesPriorities) and table.schema.value is not None
        return has_priorities and not found.keys().isdisjoint(_OF_PRIORITIES)

    def _goes_on(self, table: OpenTable) -> bool:
        """Whether a table is what was saved, in its next life."""
        is_whole = len(self._files) == 1 and self._of == 1
        return self._is_same or (is_whole and table.pool.is_untouched)

    def read_layouts(self, wanted: dict[str, Parameters]) -> None:
        """Make the memories of episodes that lie as they were saved; nothing of this server is changed. What cannot be
        read whole comes episode by episode instead.

        Args:
            wanted: Parameters that tables take before they are restored, by name.

        Raises:
            DataError: a file says of its entries what cannot be.
        """
        if len(self._files) != 1 or self._of != 1:
            return
        (file,), damage = self._files, FileDamage()
        found: dict[int, Heir | None] = {}
        ends = [] if file.end is None else file.end.tables
        for place, (told, end) in enumerate(zip(file.about.tables, ends, strict=False)):
            table, is_out = self._tables[told.name], (file.path, told.name) in self._left_out
            parameters = wanted.get(told.name, table.parameters)
            is_equal = not is_out and Parameters.from_wire(told.parameters) == parameters
            if end.is_still and is_equal and self._goes_on(table):
                found[place] = None
        for record in file.records(damage) if found else ():
            if record.table in found:
                told = file.about.tables[record.table]
                table = self._tables[told.name]
                found[record.table] = self._lay(file, table, found[record.table], record, wanted.get(told.name))
        self._taken = {
            file.about.tables[place].name: taken
            for place, taken in found.items()
            if taken is not None and not damage and taken.finish()
        }

    def _lay(
        self, file: SnapshotFile, table: OpenTable, taken: Heir | None, record: Record, wanted: Parameters | None
    ) -> Heir | None:
        """Put a record of a table into the memory that is made of it."""

        def wrong(problem: str) -> DataError:
            return DataError(str(file.path), f"{problem} (table {table.name!r})")

        body, payload = record.body, record.payload
        if not isinstance(payload, bytes) or not isinstance(table.pool, KeepsLayout):
            return taken
        if isinstance(body, TableRecord):
            generator, parameters = self._keeps_generators and not self._is_same, wanted or table.parameters
            return table.pool.heir(body, payload, parameters, keeps_generator=generator, wrong=wrong)
        if taken is not None:
            taken.put(body, payload)
        return taken

    def run(self) -> RestoreCounts:
        self._remade = {
            told.name
            for file in self._files
            for told in file.about.tables
            if (file.path, told.name) not in self._left_out and self._is_remade(told)
        }
        streams = [self._of_file(file) for file in self._files]
        # Episodes of several files in the order in which they were closed: that is how they leave again.
        for _, table, client, record in heapq.merge(*streams, key=lambda item: item[0]):
            self._take(table, client, record)
        for name, state in self._limiters.items():  # putting back has counted, too
            self._tables[name].limiter.go_on_from(msgspec.structs.asdict(state))
        return RestoreCounts(
            files=len(self._files), clients=len(self._clients), accounts=len(self._seen),
            refused=dict(self._refused), refusals=tuple(self._refusals), **self._done,
        )  # fmt: skip

    def _of_file(self, file: SnapshotFile) -> Iterator[tuple[tuple[int, float], OpenTable, RecordBody | None, Record]]:
        """The file's records, each with its place among those of all files, its table, and the heading before it."""
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
                    self._refuse("parameters", f"what {file.path} has of table {name!r} does not fit the table here")
                continue
            record = record._replace(body=body.older(since))
            yield (places[name], body.time), self._tables[name], heading, record
        self._done["damaged"] += damage.unread or 0

    def _take(self, table: OpenTable, heading: RecordBody | None, record: Record) -> None:
        body, payload = record.body, record.payload
        if isinstance(body, AccountsRecord):
            self._take_accounts(body, payload)
        elif isinstance(body, TableRecord):
            self._take_state(table, body)
        elif table.name in self._over:
            pass  # it came with its memory
        elif payload is None:
            self._done["damaged"] += 1
        elif (name := body.belongs_to(heading)) is not None and part_of(name, self._of) != self._rank:
            self._done["elsewhere"] += not body.is_heading
        else:
            is_remade = table.name in self._remade
            saved = SavedRecord(body, bytes(payload), heading, self._stays, is_remade, self._limits)
            try:
                self._count(table, table.pool.put_record(saved))
            except (ProtocolError, ParameterError, EntryError, EpisodeTooLong) as error:
                code, why = (error.code, error.detail) if isinstance(error, ProtocolError) else ("container", error)
                self._refuse(code, f"{body.called(heading)} of table {table.name!r}: {why}")

    def _count(self, table: OpenTable, put: PutBack) -> None:
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
            return  # state.db has it, as it was last
        goes_on, taken = self._goes_on(table), self._taken.get(table.name)
        if goes_on and body.limiter is not None and (self._is_same or table.limiter.is_untouched):
            self._limiters[table.name] = body.limiter
        if taken is None or taken.memory is None or not isinstance(table.pool, KeepsLayout):
            pass
        elif table.pool.take_over(taken.memory, taken.names):
            self._over.add(table.name)
            self._done.update(episodes=len(taken.names), entries=taken.entries)
        if self._keeps_generators and not self._is_same:
            body = msgspec.structs.replace(body, random=b"")
        table.pool.go_on_from(body, is_same=goes_on)

    def _take_accounts(self, body: AccountsRecord, payload: Any) -> None:
        if payload is None:
            return
        try:
            rows = unpack_accounts(payload)
        except ValueError as error:
            self._refuse("value", f"the totals of run {body.run!r}: {error}")
            return
        mine = [part_of(row["client"].tobytes(), self._of) == self._rank for row in rows]
        if any(mine):
            self._inherit(body.run, body.finished, rows[mine])
            self._seen.update(hash(row["client"].tobytes()) for row in rows[mine])


def part_of(name: bytes, of: int) -> int:
    """Which of `of` parts what is called so belongs to; the same everywhere and for ever."""
    return _bytes.checksum(name) % of
