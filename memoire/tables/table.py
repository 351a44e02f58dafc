"""Tables: named memories with schema, sampling and limits of their own, side by side in one server.

    Server(..., tables={"online": Table(...), "demo": Table(...)})        the user's settings
    HELLO "demo" ──▶ Tables.named ──▶ OpenTable ──▶ WELCOME number 0x51c2...
    CACHE, UPDATE, DRAW ... with that number in the header ──▶ Tables.numbered ──▶ OpenTable

A table's number is computed from its name, so that all servers of a cluster agree whatever the order of their tables.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from memoire import arguments
from memoire.arguments import checked_names, declared, explain_assignment_error, hint, one_of, whole
from memoire.errors import ParameterError, ProtocolError, WrongType
from memoire.limits import Reservation, Room
from memoire.replay.parameters import NAMES, Parameters, Start, check_size
from memoire.replay.sampling import Sampler, resolve_parameters
from memoire.replay.schema import Schema
from memoire.wire.frames import DEFAULT_TABLE, ROUNDTRIP, table_number

from . import registry as kinds
from .base import (
    DEFAULTS,
    BelongsToRun,
    DeliversOnce,
    DrawsBatches,
    HasRoom,
    ReceivesSums,
    SavesRows,
    TablePool,
    TakesPriorities,
    TakesPushes,
)
from .registry import Kind, PoolPlace, PushLimits

Full = Literal["block", "drop_oldest"]

TABLE_NAMES = (*NAMES, *kinds.setting_names())
"""Keywords of a table beside its named arguments, for all built-in kinds."""
MAX_TABLES = 256
_ROUNDTRIP_BYTES = 1 << 20
_ROUNDTRIP_CACHES = 16
C = TypeVar("C")


def table_names(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return `TABLE_NAMES` for these options, including settings of the kind that the option `storage` names."""
    return (*NAMES, *kinds.setting_names(options.get("storage")))


@explain_assignment_error("Make another one: Table(..., NAME=...).")
@dataclass(frozen=True, slots=True, init=False)
class Table:
    """Settings of one table of a server.

    Args:
        schema: Columns of an entry; a mapping is converted to a `Schema`.
        sampler, parameters, multi_step, discount, frame_stack, start: As in `Buffer`.
        storage: "caches": samples that actors have drawn from their own memories. "episodes": whole episodes, from
            which the server draws. "rollouts": parts of episodes; each entry is handed out once, in order (`take`).
            "prompts": prompts for language models; the schema describes an answer (`memoire.Prompts`). "keyed": rows by
            key, with fields that writers name (`memoire.tq`), without a schema. Or another kind that is registered or
            installed (docs/development/extending.md).
        capacity: Maximum number of entries in episodes; 0: bytes, and a million entries, are the limit. For rollouts
            the entries recorded and not yet taken; 0 is 65,536. For prompts the unfinished prompts; 0: bytes alone are
            the limit.
        on_full: Behaviour of a full table of rollouts. "block": actors wait in `step`. "drop_oldest":
            the oldest entries are evicted; no call waits. None is "block". Prompts evict the oldest ready groups.
        cache_limit: Maximum number of held caches; with 0, only bytes limit them.
        byte_limit: Maximum number of held bytes. Tables with None share equally what the other tables leave.
        client_capacity: Maximum number of entries in each client's memory; 0: the client chooses.
        fields: Further fields of `Parameters`, such as min_size=1000, and settings that only this kind has, such as
            group=8 of prompts (`PromptSettings`).

    Raises:
        ParameterError: a setting is out of its range, or does not fit the schema.

    Example:
        memoire.Table({"state": np.float32, "reward": np.float32}, storage="episodes", capacity=100_000)
    """

    schema: Schema
    parameters: Parameters
    storage: str
    capacity: int
    cache_limit: int
    byte_limit: int | None
    client_capacity: int
    on_full: Full
    own: Any
    """Settings that only tables of this kind have, or None."""

    @checked_names(table_names)
    def __init__(
        self,
        schema: Schema | Mapping[str, Any] | None = None,
        *,
        sampler: Sampler | None = None,
        parameters: Parameters | None = None,
        multi_step: int | None = None,
        discount: float | Sequence[float] | None = None,
        frame_stack: int | None = None,
        start: Start | None = None,
        storage: str = kinds.DEFAULT,
        capacity: int = 0,
        cache_limit: int = 0,
        byte_limit: int | None = None,
        client_capacity: int = 0,
        on_full: Full | None = None,
        **fields: Any,
    ) -> None:
        put = object.__setattr__
        kind = kinds.require_kind(storage)
        put(self, "schema", kind.schema_from(schema))
        own_settings = kinds.own_settings(kind, fields)
        fields |= {"multi_step": multi_step, "frame_stack": frame_stack, "start": start}
        put(self, "parameters", resolve_parameters(parameters, sampler, discount, fields))
        self.parameters.check_for(self.schema)
        room = {
            "storage": storage, "capacity": capacity, "cache_limit": cache_limit, "byte_limit": byte_limit,
            "client_capacity": client_capacity, "on_full": on_full,
        }  # fmt: skip
        for each in declared(Room).values():
            each.check(room[each.name])
            put(self, each.name, room[each.name])
        put(self, "on_full", on_full or "block")
        put(self, "own", own_settings)
        kind.check(self, is_full_said=on_full is not None)

    @property
    def kind(self) -> Kind:
        """Registered kind that `storage` names."""
        return kinds.require_kind(self.storage)


_NAMED = frozenset(inspect.signature(Table).parameters) - {"schema", "fields"}


def table_settings(options: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of a table's settings beside its schema, for servers with one table and for files of tables."""
    return _NAMED | {*table_names(options)}


class OpenTable:
    """Table of a running server. Mutable attributes belong to the lock of the server's dispatcher.

    Args:
        name: 1 to 256 printable characters.
        settings: Settings by the server's owner.
        pool: Pool of this table's samples, used by this table alone.
        message_bytes: Maximum bytes of a cache or an episode, as in `Limits`.

    Raises:
        ParameterError: the parameters do not fit the pool, or make messages that are too large.
    """

    def __init__(
        self, name: str, settings: Table, pool: TablePool, message_bytes: int = DEFAULTS.message_bytes
    ) -> None:
        self.name, self.settings, self.pool = name, settings, pool
        self.push_bytes = self._message_bytes = int(message_bytes)
        """Maximum bytes of a push. A server sets a lower value for all of its tables if their caches are small, because
        then more pushes may queue (docs/development/wire.md).
        """
        self.kind = settings.kind
        self.pushes = _able(pool, TakesPushes)
        """The pool as `TakesPushes`, or None if the pool lacks the capability. The next attributes are alike."""
        self.room = _able(pool, HasRoom)
        self.sums = _able(pool, ReceivesSums)
        self.of_run = _able(pool, BelongsToRun)
        self.draws = _able(pool, DrawsBatches)
        self.priorities = _able(pool, TakesPriorities)
        self.once = _able(pool, DeliversOnce)
        self.rows = _able(pool, SavesRows)
        check_size(settings.parameters, self.capacity)
        self._check_messages(settings.parameters, pool.byte_limit)
        self.number = table_number(name)
        """Number of the table in message headers."""
        self.schema = settings.schema
        self.fingerprint = settings.schema.fingerprint
        self.storage = settings.storage
        self.parameters, self.parameters_version = settings.parameters, 1
        self.limiter = self.kind.limiter(settings, pool)
        """Limiter of how far drawing and recording may run apart."""
        self.own_limit = settings.byte_limit
        """Byte limit of this table alone; None if the table shares the server's bytes."""

    @property
    def key(self) -> str:
        """Key of the table's saved parameters in a state folder."""
        return "parameters" if self.name == DEFAULT_TABLE else f"parameters:{self.name}"

    @property
    def capacity(self) -> int:
        """Maximum number of entries; 0 if the table holds no entries, or only bytes limit them."""
        return 0 if self.room is None else self.room.capacity

    @property
    def content_settings(self) -> dict[str, Any]:
        """Settings, beside the parameters, that content is made with: plain values, by name."""
        return self.kind.content_settings(self.settings)

    def require(self, capability: type[C]) -> C:
        """Return the pool if it has this capability.

        Raises:
            ParameterError: the pool lacks the capability; the error names the kinds of tables that have it.
        """
        if not isinstance(self.pool, capability):
            names, wanted = kinds.names_of(capability), getattr(capability, "WANTED", "")
            expected = f"{' or '.join(map(repr, names))} {wanted.format(instead=self.kind.instead)}"
            raise ParameterError("storage", self.storage, expected)
        return self.pool

    def require_for(self, capability: type[C], what: str) -> C:
        """Return the pool for a message named by `what`. Raise ProtocolError (code "table") without the capability."""
        if not isinstance(self.pool, capability):
            names = " and ".join(kinds.names_of(capability))
            raise ProtocolError("table", f"table {self.name!r} has storage={self.storage!r}; {what} is for {names}")
        return self.pool

    def state(self) -> dict[str, Any]:
        """Return the state of drawing beside the held data: fields of a snapshot's `TableRecord`."""
        return {**self.pool.state(), "limiter": self.limiter.state()}

    def check_parameters(self, parameters: Parameters) -> None:
        """Raise ParameterError if these parameters do not fit the schema, the table, or the held caches."""
        self._check(parameters)
        self.pool.check_parameters(parameters)

    def take_parameters(self, parameters: Parameters, version: int, *, discard_mismatched: bool = False) -> None:
        """Apply these parameters from now on.

        Args:
            discard_mismatched: Evict held caches made with other values. If False, such caches make the call fail.

        Raises:
            ParameterError: they do not fit the schema, the table, or the held caches; nothing was changed.
        """
        self._check(parameters)
        if parameters != self.parameters:
            self.pool.configure(parameters, discard_mismatched=discard_mismatched)
            self.limiter.configure(parameters)
        self.parameters, self.parameters_version = parameters, version

    def _check(self, parameters: Parameters) -> None:
        parameters.check_for(self.schema)
        check_size(parameters, self.capacity)
        self._check_messages(parameters)
        self.kind.check_parameters(parameters)

    def _check_messages(self, parameters: Parameters, byte_limit: int | None = None) -> None:
        limits = PushLimits(self.push_bytes, self._message_bytes, byte_limit)
        self.kind.check_messages(self.settings, parameters, limits)

    def check_fingerprint(self, fingerprint: int) -> None:
        """Raise ProtocolError (code "schema") for content that was made for another schema."""
        if fingerprint != self.fingerprint:
            stored = f"table {self.name!r} of this server has schema {self.fingerprint:016x}"
            raise ProtocolError("schema", f"the content was made for schema {fingerprint:016x}; {stored}")

    def __repr__(self) -> str:
        return f"<table {self.name!r}, number {self.number}, {self.storage}>"


def _able(pool: TablePool, capability: type[C]) -> C | None:
    return pool if isinstance(pool, capability) else None


class Tables:
    """Tables of one server, at least one, in the order of `settings`. The collection never changes.

    Args:
        settings: Settings of each table, by name.
        make_pool: Function that returns the pool of a table, called with its name and settings.
        reserved: Memory that all tables together may fill; None reserves no memory.
        message_bytes: As in `OpenTable`.

    Raises:
        ParameterError: there are no tables or too many, or a name is invalid or taken.
    """

    def __init__(
        self,
        settings: Mapping[str, Table],
        make_pool: Callable[[str, Table], TablePool],
        reserved: Reservation | None = None,
        message_bytes: int = DEFAULTS.message_bytes,
    ) -> None:
        self.reserved = reserved or Reservation(None)
        """Memory that all tables together may fill."""
        if ROUNDTRIP in settings:
            raise ParameterError.with_text(
                f"The table name {ROUNDTRIP!r} is reserved for memoire doctor. Choose another name."
            )
        self.roundtrip = _roundtrip()
        """Table for `memoire doctor --roundtrip`."""
        if not 1 <= len(settings) <= MAX_TABLES:
            raise ParameterError("tables", len(settings), f"1 to {MAX_TABLES} tables")
        self._tables: dict[str, OpenTable] = {}
        self._numbers: dict[int, OpenTable] = {self.roundtrip.number: self.roundtrip}
        for name, each in settings.items():
            opened = OpenTable(name, checked(name, each), make_pool(name, each), message_bytes)
            if opened.number in self._numbers:
                twin = self._numbers[opened.number].name
                raise ParameterError.with_text(
                    f"The tables {twin!r} and {name!r} have names of one number. Choose another name."
                )
            self._tables[name] = self._numbers[opened.number] = opened
        self.first = next(iter(self._tables.values()))
        """Table of clients that name no table."""
        self._numbers.setdefault(0, self.first)
        self.usual_bytes = self._usual_bytes()
        """Usual size of the largest caches at the server's start; 0 if the size is unknown."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tables, in order."""
        return tuple(self._tables)

    def __iter__(self) -> Iterator[OpenTable]:
        return iter(self._tables.values())

    def __len__(self) -> int:
        return len(self._tables)

    def __contains__(self, name: object) -> bool:
        return name in self._tables

    def __getitem__(self, name: str) -> OpenTable:
        """Return the table of this name. Raise ParameterError if no table has this name."""
        try:
            return self._tables[name]
        except (KeyError, TypeError):
            raise ParameterError("table", name, one_of(name, self._tables)) from None

    def first_of(self, storage: str) -> OpenTable:
        """Return the first table of this kind, or the first of all tables if no table is of this kind."""
        return next((table for table in self if table.storage == storage), self.first)

    def named(self, name: str, role: str = "") -> OpenTable:
        """Return the table that a HELLO names. "" is the first table whose kind is `role`, or the first of all. Raise
        ProtocolError (code "table") if no table has this name.
        """
        if name == "":
            return self.first_of(role)
        if name == ROUNDTRIP:
            return self.roundtrip
        if name not in self._tables:
            raise ProtocolError(
                "table", f"this server has no table {name!r}; its tables are {self._list()}{hint(name, self._tables)}"
            )
        return self._tables[name]

    def numbered(self, number: int) -> OpenTable:
        """Return the table of this number from a header. Raise ProtocolError (code "table") for an unknown number."""
        try:
            return self._numbers[number]
        except KeyError:
            text = f"this server has no table number {number}; its tables are {self._list()}"
            raise ProtocolError("table", text) from None

    def _usual_bytes(self) -> int:
        sizes = [table.kind.usual_bytes(table.schema, table.parameters) for table in self._numbers.values()]
        return max(sizes) if all(sizes) else 0

    def name_of(self, number: int) -> str:
        """Return the name of the table of this number, or "" for an unknown number."""
        table = self._numbers.get(number)
        return "" if table is None else table.name

    @property
    def byte_limit(self) -> int:
        """Bytes that all tables together may hold."""
        return sum(table.pool.byte_limit for table in self)

    def limit_total_bytes(self, held_bytes: int) -> None:
        """Limit all tables together to this many bytes, including tables with limits of their own.

        Raises:
            ParameterError: too few bytes remain for the tables without limits of their own; nothing was changed.
        """
        limits = table_byte_limits({table.name: table.own_limit for table in self}, held_bytes)
        for name, limit in limits.items():
            if limit < (least := self[name].pool.least_bytes):
                expected = f"larger: table {name!r} needs {least} bytes for its capacity and would get {limit}"
                raise ParameterError("held_bytes", held_bytes, expected)
        self.reserved.reserve("held_bytes", held_bytes, sum(limits.values()))
        for name, limit in limits.items():
            self[name].pool.limit_bytes(limit)

    def limit_bytes(self, table: OpenTable, byte_limit: int) -> int:
        """Limit one table to this many bytes; return the number of caches or episodes that were evicted.

        Raises:
            ParameterError: it is no integer above 0, or more than the container has; nothing was changed.
        """
        limit = whole("byte_limit", byte_limit, 1)
        others = sum(each.pool.byte_limit for each in self if each is not table)
        self.reserved.reserve("byte_limit", byte_limit, others + limit)
        try:
            evicted = table.pool.limit_bytes(limit)
        except BaseException:
            self.reserved.reserve("byte_limit", byte_limit, others + table.pool.byte_limit)
            raise
        table.own_limit = limit
        return evicted

    def is_probe(self, number: int) -> bool:
        """Return True if clients of this table number only test the connection; no run counts these clients."""
        return number == self.roundtrip.number

    def _list(self) -> str:
        return ", ".join(map(repr, self._tables))


def _roundtrip() -> OpenTable:
    settings = Table(
        {"state": np.int64}, parameters=Parameters(reuse_cache=True, cache_size=16), cache_limit=_ROUNDTRIP_CACHES
    )
    place = PoolPlace(ROUNDTRIP, _ROUNDTRIP_BYTES, DEFAULTS, seed=None)
    return OpenTable(ROUNDTRIP, settings, settings.kind.make_pool(settings, place))


def table_byte_limits(own_limits: Mapping[str, int | None], held_bytes: int) -> dict[str, int]:
    """Return the bytes of each table: its own limit, or an equal share of the remaining bytes.

    Raises:
        ParameterError: the tables' own limits leave nothing for the other tables.
    """
    fixed = {name: limit for name, limit in own_limits.items() if limit is not None}
    others, taken = len(own_limits) - len(fixed), sum(fixed.values())
    share = (held_bytes - taken) // max(1, others)
    if others and share < 1:
        already = f"more than the {taken} bytes that byte_limit reserves for {', '.join(map(repr, fixed))}"
        raise ParameterError(
            "held_bytes", held_bytes, already if fixed else f"at least {others}, a byte for each table"
        )
    return {name: fixed.get(name, share) for name in own_limits}


def checked(name: Any, settings: Any) -> Table:
    """Return the settings of one table after checks of name and type. Raise ParameterError or WrongType."""
    arguments.name("tables", name)
    if not isinstance(settings, Table):
        raise WrongType(f"tables[{name!r}]", "a memoire.Table", type(settings).__name__)
    return settings
