"""A server's memory as records of a file, and back: into the same server, another one, or several that share it out.

    pool.walk()     client 7, its caches, client 9, its caches ...          episode, episode, ...
    file            about, accounts, client 7, cache, cache, client 9, cache ..., end
    pool.put_back   those whose client (or episode) belongs to this server's part of the whole

What belongs to which part follows from the client's id (an episode's from the memory and number it had), so that
servers that restore the same files share them out without a word between them, each client whole.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

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
from memoire.pool.snapshot import KeptCache, KeptClient
from memoire.replay import dataset
from memoire.replay.dataset import KeptEpisode
from memoire.replay.parameters import Parameters
from memoire.replay.ragged import Ragged
from memoire.replay.schema import Column, Schema
from memoire.wire import _bytes
from memoire.wire.layout import layout_of
from memoire.wire.rows import unpack_accounts
from memoire.wire.unpack import check as check_container

from . import snapshot_file
from .snapshot_file import About, Body, Damage, Record, SnapshotFile, TableAbout


class HasMemory(Protocol):
    """What a snapshot reads of a server's table."""

    name: str
    storage: Any
    schema: Schema
    parameters: Parameters
    parameters_version: int

    @property
    def pool(self) -> Any:
        """What it holds: a pool with `walk` and `put_back`."""


@dataclass(frozen=True, slots=True)
class Restored:
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
    known: int = 0
    """Caches and episodes that were here already."""
    elsewhere: int = 0
    """Those that belong to other parts."""
    refused: dict[str, int] = field(default_factory=dict)
    """Those that fit this server no more, by code."""
    damaged: int = 0
    """Those that could not be read; more where the end of a file is gone, too."""
    overwritten: int = 0
    """Caches and episodes that made room for others, of what was restored or was here before."""
    accounts: int = 0
    """Clients whose totals came back."""

    def __str__(self) -> str:
        words = [f"{self.caches} caches with {self.unused} of {self.samples} samples left"] if self.caches else []
        words += [f"{self.episodes} episodes with {self.entries} entries"] if self.episodes else []
        words = words or ["nothing"]
        for name in ("known", "elsewhere", "damaged", "overwritten"):
            words += [f"{getattr(self, name)} {name}"] if getattr(self, name) else []
        words += [f"{count} refused ({code})" for code, count in self.refused.items()]
        return ", ".join(words)


# ---------------------------------------------------------------------------------------------------------- saving


def about(
    tables: Iterable[HasMemory],
    *,
    server: str,
    run: str,
    finished: bool = False,
    taken: float = 0.0,
    models: dict[str, int] | None = None,
) -> About:
    """The first record of a file: whose tables these are, and under which parameters."""
    told = [
        TableAbout(
            name=table.name,
            storage=table.storage,
            schema=table.schema.to_json(),
            parameters=table.parameters.to_wire(),
            parameters_version=table.parameters_version,
        )
        for table in tables
    ]
    return About(server=server, run=run, finished=finished, taken=taken, models=models or {}, tables=told)


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
            yield Record(snapshot_file.Accounts(run=run, finished=finished), 0, rows.tobytes())
    for place, table in enumerate(tables):
        for kept in table.pool.walk():
            if not go_on():
                return
            yield _record(kept, place, table.schema)


def _record(kept: KeptClient | KeptCache | KeptEpisode, place: int, schema: Schema) -> Record:
    if isinstance(kept, KeptClient):
        return Record(snapshot_file.Client(**kept._asdict()), place)
    if isinstance(kept, KeptCache):
        return Record(snapshot_file.Cache(samples=kept.samples, used=kept.used, age=kept.age), place, kept.payload)
    return pack(kept, place, schema)


def pack(kept: KeptEpisode, place: int, schema: Schema) -> Record:
    """An episode: facts of its entries, columns, final state and bootstrap value, one after the other. Of a ragged
    column its lengths come before its elements.
    """
    episode = kept.episode
    assert episode.born is not None, "known of every entry that a memory holds"
    parts = [getattr(episode, name) for name in dataset.FACTS]
    parts += [episode.columns[name] for name in schema.names]
    for name in schema.states if episode.final_state is not None else ():
        state = (episode.final_state or {})[name]
        parts.append(Ragged(state, [len(state)]) if schema[name].is_ragged else state)
    if episode.bootstrap_value is not None:
        parts.append(episode.bootstrap_value)
    body = snapshot_file.Episode(
        owner=kept.owner,
        number=kept.number,
        length=len(episode),
        closed=float(episode.born[-1]),
        multiplier=episode.multiplier,
        terminated=episode.terminated,
        has_final=episode.final_state is not None,
        has_bootstrap=episode.bootstrap_value is not None,
        update_value=episode.update_value,
        update_weight=episode.update_weight,
    )
    return Record(body, place, b"".join(map(_bytes_of, parts)))


def _bytes_of(part: NDArray[Any] | Ragged) -> bytes:
    if isinstance(part, Ragged):
        return part.lengths.astype("<i8").tobytes() + np.ascontiguousarray(part.values).tobytes()
    return np.ascontiguousarray(part).tobytes()


def unpack(body: snapshot_file.Episode, payload: bytes, schema: Schema) -> KeptEpisode:
    """The episode of a record. Arrays are views of the payload where they lie as their types want it.

    Raises:
        ProtocolError: (code "container") it cannot be one of this schema.
    """
    if not 1 <= body.length <= len(payload) or not 0.0 <= body.multiplier < math.inf:
        raise ProtocolError("container", f"an episode of {body.length} entries in {len(payload)} bytes")
    parts = _Parts(payload)
    facts = {name: parts.take(dtype, body.length) for name, dtype in dataset.FACTS.items()}
    columns = {name: parts.column(column, body.length) for name, column in schema.items()}
    states = {name: parts.column(schema[name], 1)[0] for name in schema.states} if body.has_final else None
    reward = schema[schema.reward].shape if schema.reward is not None else ()
    bootstrap = parts.take("<f4", *reward) if body.has_bootstrap else None
    parts.end()
    if not all(np.isfinite(facts[name]).all() for name in ("init_w", "priority", "born")):
        raise ProtocolError("container", "an episode with a weight, priority or time that cannot be")
    episode = dataset.Episode(
        columns=columns,
        **facts | {"learned": facts["learned"] != 0},
        multiplier=body.multiplier,
        terminated=body.terminated,
        final_state=states,
        bootstrap_value=None if body.terminated else bootstrap,
        update_value=body.update_value,
        update_weight=body.update_weight,
    )
    return KeptEpisode(body.owner, body.number, episode)


class _Parts:
    """Arrays that lie one after the other in a payload."""

    def __init__(self, payload: bytes) -> None:
        self._payload, self._place = payload, 0

    def take(self, dtype: Any, *shape: int) -> NDArray[Any]:
        """The next one."""
        size = np.dtype(dtype).itemsize * math.prod(shape)
        if self._place + size > len(self._payload):
            raise ProtocolError("container", f"an episode needs {self._place + size} of {len(self._payload)} bytes")
        array = np.frombuffer(self._payload, dtype, math.prod(shape), self._place).reshape(shape)
        self._place += size
        return array if array.flags.aligned else array.copy()

    def column(self, column: Column, rows: int) -> Any:
        """The next `rows` values of a column."""
        if not column.is_ragged:
            return self.take(column.dtype, rows, *column.shape)
        lengths = self.take("<i8", rows)
        if (lengths < 0).any() or (lengths > len(self._payload)).any():
            raise ProtocolError("container", f"a ragged value of {lengths.max()} elements")
        return Ragged(self.take(column.dtype, int(lengths.sum()), *column.element), lengths)

    def end(self) -> None:
        if self._place != len(self._payload):
            raise ProtocolError("container", f"an episode has {self._place} of {len(self._payload)} bytes")


# --------------------------------------------------------------------------------------------------------- restoring


def restore(
    paths: Sequence[str | Path],
    tables: Iterable[HasMemory],
    *,
    part: tuple[int, int] = (0, 1),
    skip_damaged: bool = False,
    stays: bool = True,
    limits: Limits,
    now: float = 0.0,
    inherit: Callable[[str, bool, Rows], Any] = lambda run, finished, rows: None,
) -> Restored:
    """Put what some files hold into these tables, by their names; one record at a time is in memory.

    Args:
        paths: Of files, each of one server of the cluster that was saved.
        part: (rank, of): only what belongs to this one of so many servers that share the files out.
        skip_damaged: Take what is whole; else a file with damage is refused before anything is taken.
        now: Seconds since 1970: caches have grown older since their file was written.
        stays: Whether clients stay until they are heard of; see `Pool.put_back`.
        inherit: Takes what clients had done in a run: its name, whether it was over, rows of `rows.ACCOUNT`.

    Raises:
        DataError: a file cannot be read, is damaged, or no snapshot.
        SnapshotMismatch: a file has a table that is not here, or of another schema, storage or form of samples.
        ParameterError: a part that is none.
        Closed: the server was closed meanwhile.
    """
    rank, of = _checked(part)
    with ExitStack() as opened:
        files = [opened.enter_context(SnapshotFile(path)) for path in paths]
        known = {table.name: table for table in tables}
        for file in files:
            _match(file, known)
            if not skip_damaged and (damage := file.verify()):
                raise DataError(str(file.path), f"has {damage}; skip_damaged=True (--skip-damaged) takes what is whole")
        return _Restoring(files, list(known.values()), rank, of, stays, limits, now, inherit).run()


class SavedHead(NamedTuple):
    """What names a file, and what it says of itself."""

    id: bytes
    about: About


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


def _checked(part: Any) -> tuple[int, int]:
    if not isinstance(part, tuple) or len(part) != 2:
        raise ParameterError("part", part, "(rank, of)")
    of = whole("part[1]", part[1], 1)
    return whole("part[0]", part[0], 0, of - 1), of


def _match(file: SnapshotFile, tables: dict[str, HasMemory]) -> None:
    """Refuse a file that does not fit these tables."""
    for told in file.about.tables:
        table = tables.get(told.name)
        if table is None:
            names = ", ".join(map(repr, tables))
            problem = f"holds table {told.name!r}, and this server has {names}"
            raise SnapshotMismatch(str(file.path), problem, f"Give this server a table {told.name!r}.")
        if told.storage != table.storage:
            problem = f"holds {told.storage} in table {told.name!r}, where this server keeps {table.storage}"
            raise SnapshotMismatch(str(file.path), problem, f"Give the table storage={told.storage!r}.")
        if (schema := Schema.from_json(told.schema)) != table.schema:
            problem = f"holds {schema} in table {told.name!r}, where this server stores {table.schema}"
            raise SnapshotMismatch(str(file.path), problem, "Start the server with the schema of the file.")
        _match_parameters(file, told, table)


def _match_parameters(file: SnapshotFile, told: TableAbout, table: HasMemory) -> None:
    """Caches hold finished samples: of another form, they fit no batch with new ones."""
    theirs = Parameters.from_wire(told.parameters)
    if table.storage != "caches" or layout_of(table.schema, theirs) is layout_of(table.schema, table.parameters):
        return
    mine = table.parameters.to_wire()
    differing = [f"{name}={value!r}" for name, value in theirs.to_wire().items() if mine[name] != value]
    raise SnapshotMismatch(
        str(file.path),
        f"holds samples of table {told.name!r} that were made under other parameters ({', '.join(differing)})",
        "Configure the server so first; restore(..., configure=True) does it.",
    )


class _Restoring:
    """Files on their way into tables, once."""

    def __init__(
        self,
        files: Sequence[SnapshotFile],
        tables: Sequence[HasMemory],
        rank: int,
        of: int,
        stays: bool,
        limits: Limits,
        now: float,
        inherit: Callable[[str, bool, Rows], Any],
    ) -> None:
        self._files, self._rank, self._of, self._stays = files, rank, of, stays
        self._limits, self._now, self._inherit = limits, now, inherit
        self._tables = {table.name: table for table in tables}
        self._rank_of = {table.name: place for place, table in enumerate(tables)}
        self._done: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._clients: set[tuple[str, bytes]] = set()
        self._seen: set[int] = set()  # accounts' clients

    def run(self) -> Restored:
        streams = [self._of_file(file) for file in self._files]
        # Episodes of several files in the order in which they were closed: that is how they leave again.
        for _, table, client, record in heapq.merge(*streams, key=lambda item: item[0]):
            self._take(table, client, record)
        return Restored(
            files=len(self._files), clients=len(self._clients), accounts=len(self._seen),
            refused=dict(self._refused), **self._done,
        )  # fmt: skip

    def _of_file(
        self, file: SnapshotFile
    ) -> Iterator[tuple[tuple[int, float], HasMemory, snapshot_file.Client | None, Record]]:
        """The file's records, each with its place among those of all files, its table, and the client before it."""
        client, damage, since = None, Damage(), max(0.0, self._now - file.about.taken)
        for record in file.records(damage):
            name = file.about.tables[record.table].name
            if isinstance(record.body, snapshot_file.Client):
                client = record.body
                continue
            if isinstance(record.body, snapshot_file.Cache):
                record = record._replace(body=msgspec.structs.replace(record.body, age=record.body.age + since))
            time = record.body.closed if isinstance(record.body, snapshot_file.Episode) else 0.0
            yield (self._rank_of[name], time), self._tables[name], client, record
        self._done["damaged"] += damage.unread or 0

    def _take(self, table: HasMemory, client: snapshot_file.Client | None, record: Record) -> None:
        body = record.body
        if isinstance(body, snapshot_file.Accounts):
            self._take_accounts(body, record.payload)
        elif record.payload is None:
            self._done["damaged"] += 1
        elif not self._is_mine(client, body):
            self._done["elsewhere"] += 1
        else:
            try:
                self._put(table, client, record)
            except (ProtocolError, ParameterError, EntryError, EpisodeTooLong) as error:
                self._refused[error.code if isinstance(error, ProtocolError) else "container"] += 1

    def _is_mine(self, client: snapshot_file.Client | None, body: Body) -> bool:
        if isinstance(body, snapshot_file.Episode):
            return part_of(body.owner + body.number.to_bytes(8, "little", signed=True), self._of) == self._rank
        return client is None or part_of(client.id, self._of) == self._rank

    def _put(self, table: HasMemory, client: snapshot_file.Client | None, record: Record) -> None:
        body, payload = record.body, record.payload
        assert isinstance(payload, bytes)
        if isinstance(body, snapshot_file.Episode):
            is_new, overwritten = table.pool.put_back(unpack(body, payload, table.schema))
            self._done["overwritten"] += overwritten
            done = {"episodes": 1, "entries": body.length}
        elif isinstance(body, snapshot_file.Cache) and client is not None:
            is_new, samples = self._put_cache(table, client, body, payload)
            done = {"caches": 1, "samples": samples, "unused": samples - body.used}
        else:
            raise ProtocolError("container", "a record that belongs to no client, or of a kind that is not known")
        self._done.update(done if is_new else {"known": 1})

    def _put_cache(
        self, table: HasMemory, client: snapshot_file.Client, body: snapshot_file.Cache, payload: bytes
    ) -> tuple[bool, int]:
        """Whether it is new here, and its samples."""
        held = check_container(payload, table.pool.layout, self._limits)
        if not 0 <= body.used <= held.samples or len(client.id) != 16 or not 0.0 <= body.age < math.inf:
            raise ProtocolError("container", f"{body.used} of {held.samples} samples drawn, {body.age:g} s old")
        held.go_on_at(body.used)
        names = KeptClient._fields
        is_new, overwritten = table.pool.put_back(
            KeptClient(*(getattr(client, name) for name in names)), held, age=body.age, stays=self._stays
        )
        self._done["overwritten"] += overwritten
        if is_new:
            self._clients.add((table.name, client.id))
        return is_new, held.samples

    def _take_accounts(self, body: snapshot_file.Accounts, payload: Any) -> None:
        if payload is None:
            return
        try:
            rows = unpack_accounts(payload)
        except ValueError:
            self._refused["value"] += 1
            return
        mine = [part_of(row["client"].tobytes(), self._of) == self._rank for row in rows]
        if any(mine):
            self._inherit(body.run, body.finished, rows[mine])
            self._seen.update(hash(row["client"].tobytes()) for row in rows[mine])


def part_of(name: bytes, of: int) -> int:
    """Which of `of` parts what is called so belongs to; the same everywhere and for ever."""
    return _bytes.checksum(name) % of


# ----------------------------------------------------------------------------------------------------------- looking


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
        schema = json.loads(Schema.from_json(table.schema).to_json())
    except SchemaError as error:
        raise DataError(str(path), f"holds table {table.name!r} of no schema: {error}") from error
    return {
        "name": table.name,
        "storage": table.storage,
        "schema": schema,
        "parameters": table.parameters,
        **({name: getattr(counts, name) for name in names} if counts is not None else {}),
    }
