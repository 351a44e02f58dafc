"""Builders of a server's parts: tables with their pools, the state folder, the dispatcher.

Server options: the keywords of `Server`, checked before any resource is opened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from memoire import arguments
from memoire.accounting.ledger import account_bytes, line_bytes
from memoire.accounting.runs import StateStore
from memoire.arguments import mapping, whole
from memoire.errors import ParameterError, StateCorrupt, WrongType
from memoire.limits import CONTAINER, HELD_BYTES, Limits, MemoryLimits, Reservation
from memoire.replay.schema import Schema
from memoire.security.keys import KeysLike
from memoire.tables import registry
from memoire.tables.base import DrawsAtRandom, TablePool
from memoire.tables.episodes.memory import seed_of
from memoire.tables.registry import PoolPlace
from memoire.tables.table import Table, Tables, checked, table_byte_limits
from memoire.wire.frames import DEFAULT_TABLE, table_number
from memoire.wire.messages import MAX_INFERENCE

from . import state as recovery
from .dispatch import Dispatcher
from .settings import Endpoints, Process, State

MODEL_COPIES = 2
"""Multiple of `model_bytes` that a server may use: for stored models, and for uploads."""
MESSAGE_COPIES = 4
"""Multiple of `message_bytes` that a server may use in addition to `held_bytes`: see `ServerState`, `Dispatcher`."""
MIN_SEED, MAX_SEED = -(2**63), 2**64


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """Keywords of `Server`, which documents them.

    Raises:
        ParameterError, WrongType: an option is out of its range, missing, or conflicts with another option.
    """

    endpoint: Endpoints
    schema: Schema | Mapping[str, Any] | None
    tables: Mapping[str, Table] | None
    run: str | None
    name: str | None
    state: State | None
    keys: KeysLike
    limits: Limits
    seed: int | None
    inference: Sequence[str]
    process: Process
    table: Mapping[str, Any]
    """Settings of the only table."""
    settings: Mapping[str, Table] = field(init=False)
    """Settings of the tables, by name: `tables`, or one table made of `schema` and `table`."""
    budgets: Mapping[str, int] = field(init=False)
    """Bytes that each table may hold at first, by name."""
    reserved: Reservation = field(init=False)
    """Reserved memory of all tables, and of models."""
    _container: ClassVar[MemoryLimits] = CONTAINER
    """Container whose memory limit bounds the reservation."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", self._settings())
        if self.seed is not None:
            object.__setattr__(self, "seed", whole("seed", self.seed, MIN_SEED, MAX_SEED))
        if self.name is not None:
            arguments.name("name", self.name)
        self._check_inference()
        self._share_out()

    def _share_out(self) -> None:
        byte_limits = {name: checked(name, table).byte_limit for name, table in self.settings.items()}
        byte_limit = self.table.get("byte_limit")  # all bytes of a server with one table
        if byte_limit is not None and self.limits.held_bytes not in (0, byte_limit):
            raise ParameterError.with_text(
                f"byte_limit={byte_limit} differs from limits.held_bytes={self.limits.held_bytes}: a single table "
                f"holds all bytes. Set one of them."
            )
        reserved = Reservation(self._container)

        def hold(limits: Limits) -> Limits:
            if byte_limit is None:
                name, held = "held_bytes", limits.held_bytes or reserved.default("held_bytes", HELD_BYTES)
            else:
                name, held = "byte_limit", whole("byte_limit", byte_limit, 1)
            budgets = table_byte_limits(byte_limits, held)
            reserved.reserve(name, sum(budgets.values()), sum(budgets.values()))
            limits = replace(limits, held_bytes=held)
            reserved.reserve(name, held, account_bytes(limits) + line_bytes(limits), "beside")
            object.__setattr__(self, "budgets", budgets)
            return limits

        limits = reserved.limits(self.limits, hold, message_bytes=MESSAGE_COPIES, model_bytes=MODEL_COPIES)
        object.__setattr__(self, "reserved", reserved)
        object.__setattr__(self, "limits", limits)

    def _settings(self) -> Mapping[str, Table]:
        settings = {name: value for name, value in self.table.items() if value is not None}
        if self.tables is None:
            if self.schema is None and registry.require_kind(settings.get("storage", registry.DEFAULT)).has_columns:
                raise WrongType("schema", "a memoire.Schema, or tables={name: memoire.Table(schema)}", "None")
            settings.pop("byte_limit", None)
            return {DEFAULT_TABLE: Table(self.schema, **settings)}
        for name in settings if self.schema is None else {"schema": self.schema, **settings}:
            raise ParameterError.with_text(f"{name}= cannot be combined with tables=: each memoire.Table has its own.")
        return mapping("tables", self.tables)

    def _check_inference(self) -> None:
        if isinstance(self.inference, str) or len(self.inference) > MAX_INFERENCE:
            raise ParameterError("inference", self.inference, f"a list of at most {MAX_INFERENCE} addresses")


def check_bytes(name: str, value: object) -> None:
    """Raise ParameterError unless the value is None or a positive number of bytes."""
    if value is not None:
        whole(name, value, 1)


_log = logging.getLogger(__name__)


def make_tables(options: ServerOptions) -> Tables:
    """Return the tables, empty. Raises ParameterError."""

    def make_pool(name: str, settings: Table) -> TablePool:
        place = PoolPlace(name, options.budgets[name], options.limits, _seed_of(options, name))
        return settings.kind.make_pool(settings, place)

    tables = Tables(options.settings, make_pool, options.reserved, options.limits.message_bytes)
    for table in tables:
        if table.once is not None:
            table.once.on_room = table.limiter.record_draw
    return tables


def reseed(options: ServerOptions, tables: Tables, lives: int) -> None:
    """Reseed the tables of a server with a seed after `lives` former starts, so that each start draws differently."""
    for table in tables:
        seed = seed_of(_seed_of(options, table.name), lives)
        if lives and seed is not None and isinstance(table.pool, DrawsAtRandom):
            table.pool.reseed(seed)


def _seed_of(options: ServerOptions, name: str) -> int | None:
    return None if options.seed is None else (options.seed ^ table_number(name)) & (2**64 - 1)


def make_store(options: ServerOptions, name: str) -> StateStore | None:
    """Return the state folder, opened and locked; None if the options name no folder. Raises StateError.

    Args:
        name: Name of the server if neither its options nor the folder contain a name.
    """
    if options.state is None:
        return None
    return open_store(options.state.folder, options.name, name, options.limits, options.process.clock)


def open_store(
    folder: str | Path, name: str | None, default_name: str, limits: Limits, clock: Callable[[], float]
) -> StateStore:
    """Return the state folder's store, opened and locked. Raises StateError."""
    from memoire.disk.state_folder import Store  # needs SQLite, which a thin Python may lack

    return Store(folder, name, default_name=default_name, limits=limits, clock=clock)


def recover_rows(tables: Tables, store: StateStore | None) -> None:
    """Restore the rows that tables saved continuously, and save their changes from now on.

    Raises:
        StateCorrupt: the saved rows do not fit the tables.
        SnapshotMismatch: the rows were made with other settings.
    """
    for table in tables:
        if store is None or table.rows is None:
            continue
        table.rows.keep_changes()
        if next(iter(store.rows(table.name)), None) is not None:
            recovery.check_content_settings(table, store, str(store.folder))
        try:
            missing = table.rows.restore(store.rows(table.name))
        except (msgspec.MsgspecError, ValueError) as error:
            advice = "Start it with the schema and settings that it had, or give the server another state folder."
            raise StateCorrupt(
                str(store.folder), f"table {table.name!r} cannot be restored: {error}", advice
            ) from error
        if missing:
            store.missing.append(f"{store.folder}: table {table.name!r}: {missing}")
            _log.warning("%s", store.missing[-1])


def make_dispatcher(options: ServerOptions, tables: Tables, store: StateStore | None, **facts: Any) -> Dispatcher:
    """Return the dispatcher, with restored rows. Closes the store if this fails.

    Args:
        facts: Further arguments of `Dispatcher`.
    """
    try:
        recover_rows(tables, store)
        if store is not None:
            reseed(options, tables, recovery.former_starts(store))
        clock = options.process.clock
        return Dispatcher(tables=tables, run=options.run, limits=options.limits, store=store, clock=clock, **facts)
    except BaseException:
        if store is not None:
            store.close(0.0)
        raise
