"""From options to what decides: tables with their pools, the state folder, the dispatcher."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from memoire.accounting.logbook import LogEntry
from memoire.accounting.runs import StateStore
from memoire.errors import StateCorrupt
from memoire.limits import Limits
from memoire.pool.episode_memory import seed_of
from memoire.pool.interface import DrawsAtRandom, TablePool
from memoire.pool.kinds import PoolPlace
from memoire.pool.tables import Table, Tables
from memoire.wire import messages
from memoire.wire.identity import table_number

from . import recovery
from .announcements import Announcements
from .dispatch import Dispatcher
from .options import ServerOptions

_log = logging.getLogger(__name__)


def make_tables(options: ServerOptions) -> Tables:
    """The tables, with nothing in them. Raises ParameterError."""

    def make_pool(name: str, settings: Table) -> TablePool:
        place = PoolPlace(name, options.budgets[name], options.limits, _seed_of(options, name))
        return settings.kind.make_pool(settings, place)

    tables = Tables(options.settings, make_pool, options.reserved, options.limits.message_bytes)
    for table in tables:
        if table.once is not None:
            table.once.on_room = table.limiter.drew
    return tables


def reseed(options: ServerOptions, tables: Tables, lives: int) -> None:
    """Have a server that was given a seed draw otherwise than in its former lives, so many of them."""
    for table in tables:
        seed = seed_of(_seed_of(options, table.name), lives)
        if lives and seed is not None and isinstance(table.pool, DrawsAtRandom):
            table.pool.reseed(seed)


def _seed_of(options: ServerOptions, name: str) -> int | None:
    return None if options.seed is None else (options.seed ^ table_number(name)) & (2**64 - 1)


def make_store(options: ServerOptions, name: str) -> StateStore | None:
    """The state folder, opened and locked; None if there is to be none. Raises StateError.

    Args:
        name: What the server is called if neither its options nor the folder say.
    """
    if options.state_dir is None:
        return None
    return open_store(options.state_dir, options.name, name, options.limits, options.clock)


def open_store(
    folder: str | Path, name: str | None, default_name: str, limits: Limits, clock: Callable[[], float]
) -> StateStore:
    """The files of a server, opened and locked. Raises StateError."""
    from memoire.storage.state_folder import Store  # needs SQLite, which a thin Python may lack

    return Store(folder, name, default_name=default_name, limits=limits, clock=clock)


def recover_rows(tables: Tables, store: StateStore | None) -> None:
    """Hold again what the former life held of prompts, and have changes of them saved from now on.

    Raises:
        StateCorrupt: what was saved is nothing of these tables'.
        SnapshotMismatch: it was made with other settings.
    """
    for table in tables:
        if store is None or table.rows is None:
            continue
        table.rows.keep_changes()
        if next(iter(store.prompts(table.name)), None) is not None:
            recovery.check_making(table, store, str(store.folder))
        try:
            again, dropped = table.rows.restore(store.prompts(table.name))
        except (msgspec.MsgspecError, ValueError) as error:
            advice = "Start it with the settings that it had (group, schema), or give the server another state folder."
            raise StateCorrupt(
                str(store.folder), f"table {table.name!r} cannot be restored: {error}", advice
            ) from error
        if again or dropped:
            store.missing.append(
                f"{store.folder}: table {table.name!r}: answers of {again} prompts are missing, which wait for them "
                f"again if they are not over; {dropped} prompts were dropped, because their payload is missing"
            )
            _log.warning("%s", store.missing[-1])


def make_dispatcher(
    options: ServerOptions,
    tables: Tables,
    store: StateStore | None,
    announcements: Announcements,
    *,
    name: str,
    epoch: int,
    endpoints: Callable[[], messages.Endpoints],
    on_lines: Callable[[list[LogEntry]], None],
) -> Dispatcher:
    """What answers requests. If it cannot be made, the state folder is closed again.

    Args:
        name: The server's.
        epoch: Number of this life, above those of all former ones; a state folder has its own.
        endpoints: Where clients connect to, read at each HELLO.
        on_lines: Called with log lines that are new, in order.
    """
    try:
        recover_rows(tables, store)
        if store is not None:
            reseed(options, tables, recovery.lives_of(store))
        return Dispatcher(
            tables=tables,
            run=options.run,
            name=name,
            limits=options.limits,
            endpoints=endpoints,
            on_lines=on_lines,
            on_model=announcements.add_model,
            on_news=announcements.add_news,
            store=store,
            clock=options.clock,
            epoch=epoch,
        )
    except BaseException:
        if store is not None:
            store.close(0.0)
        raise
